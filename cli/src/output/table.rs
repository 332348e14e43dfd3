//! Tables and figures for people.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use remoe_proto::format_listing;
use remoe_proto::v1::LayerExperts;

/// Between two columns.
const GAP: usize = 2;

/// A table with a header. On a terminal that is too narrow for it, it goes on below itself with the first
/// column repeated.
pub(crate) fn with_header(header: &[&str], rows: Vec<Vec<String>>) -> String {
    let header = header.iter().map(|&title| title.to_owned()).collect();
    let lines = std::iter::once(header).chain(rows).collect();
    fitted(lines, terminal_width())
}

/// Rows without a header.
pub(crate) fn of_rows(rows: Vec<Vec<String>>) -> String {
    fitted(rows, terminal_width())
}

/// Names and values below each other; long values go on in the next line.
pub(crate) fn of_pairs(pairs: &[(&str, String)]) -> String {
    let lines = pairs.iter().map(|(name, value)| vec![(*name).to_owned(), value.clone()]);
    fitted(lines.collect(), terminal_width())
}

/// Columns of the terminal that reads standard output, where there is one.
fn terminal_width() -> Option<usize> {
    let terminal = console::Term::stdout();
    let size = terminal.is_term().then(|| terminal.size_checked()).flatten();
    size.map(|(_, columns)| columns.into())
}

/// The cells of `lines` in columns, in as many tables as it takes to stay within `width`.
fn fitted(mut lines: Vec<Vec<String>>, width: Option<usize>) -> String {
    let Some(width) = width else { return render(lines) };
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let widest = |lines: &[Vec<String>], column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.flat_map(|cell| cell.lines()).map(|line| line.chars().count()).max().unwrap_or(0)
    };
    let first = widest(&lines, 0);
    let room = width.saturating_sub(first + GAP).max(1);
    for line in &mut lines {
        line.iter_mut().skip(1).for_each(|cell| *cell = wrapped(cell, room));
    }
    let mut blocks: Vec<Vec<usize>> = Vec::new();
    let mut used = usize::MAX;
    for column in 1..columns {
        let needed = GAP + widest(&lines, column);
        if used.saturating_add(needed) > width {
            blocks.push(vec![0]);
            used = first;
        }
        used += needed;
        blocks.iter_mut().last().into_iter().for_each(|block| block.push(column));
    }
    let block = |columns: &Vec<usize>| {
        let cells =
            |line: &Vec<String>| columns.iter().filter_map(|column| line.get(*column).cloned()).collect();
        render(lines.iter().map(cells).collect())
    };
    match blocks.is_empty() {
        true => render(lines),
        false => blocks.iter().map(block).collect::<Vec<_>>().join("\n\n"),
    }
}

/// `text` in lines of at most `width` characters, broken behind spaces and commas; a longer word stays whole.
pub(crate) fn wrapped(text: &str, width: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_inclusive([' ', ',']) {
        let length = |text: &str| text.trim_end().chars().count();
        match lines.last_mut() {
            Some(line) if line.chars().count() + length(word) <= width => line.push_str(word),
            _ => lines.push(word.to_owned()),
        }
    }
    lines.iter().map(|line| line.trim_end()).collect::<Vec<_>>().join("\n")
}

/// `word` with its middle left out where it has more than `width` characters, at least 3.
pub(crate) fn elided(word: &str, width: usize) -> String {
    let characters: Vec<char> = word.chars().collect();
    if characters.len() <= width {
        return word.to_owned();
    }
    let kept = width.saturating_sub(2);
    let (head, tail) = (kept / 2, kept - kept / 2);
    let head: String = characters.iter().take(head).collect();
    let tail: String = characters.iter().skip(characters.len() - tail).collect();
    format!("{head}..{tail}")
}

fn render(lines: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.add_rows(lines);
    for column in table.column_iter_mut() {
        column.set_padding((0, GAP as u16)).set_cell_alignment(CellAlignment::Left);
    }
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    lines.join("\n")
}

/// A number of bytes in the unit that suits it.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    if count < 1000 {
        return format!("{count} B");
    }
    let mut value = count as f64 / 1000.0;
    let mut units = UNITS.iter().peekable();
    while let (Some(unit), next) = (units.next(), units.peek()) {
        if value < 999.95 || next.is_none() {
            return format!("{value:.1} {unit}");
        }
        value /= 1000.0;
    }
    format!("{count} B")
}

/// Expert sets with runs of layers that have the same one: `layers 0-3: 6-7; layer 4: 0,7`.
pub(crate) fn experts(layers: &[LayerExperts]) -> String {
    if layers.is_empty() {
        return "none".to_owned();
    }
    let follows = |a: &LayerExperts, b: &LayerExperts| a.layer + 1 == b.layer && a.experts == b.experts;
    let runs = layers.chunk_by(follows).map(|run| {
        let (first, last) = (&run[0], &run[run.len() - 1]);
        let listing = format_listing(std::slice::from_ref(first));
        let ids = listing.split_once(':').map_or("", |(_, ids)| ids);
        if first.layer == last.layer {
            format!("layer {}: {ids}", first.layer)
        } else {
            format!("layers {}-{}: {ids}", first.layer, last.layer)
        }
    });
    runs.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(layer: u32, experts: &[u32]) -> LayerExperts {
        LayerExperts { layer, experts: experts.to_vec() }
    }

    #[test]
    fn equal_layers_are_shown_as_ranges() {
        let layers = [set(0, &[6, 7]), set(1, &[6, 7]), set(3, &[6, 7]), set(4, &[0, 5, 6])];
        assert_eq!(experts(&layers), "layers 0-1: 6-7; layer 3: 6-7; layer 4: 0,5-6");
        assert_eq!(experts(&[]), "none");
    }

    #[test]
    fn bytes_in_a_unit_that_suits() {
        let shown = [0, 999, 1000, 12_345_678, 999_999_999, 5_000_000_000_000_000].map(bytes);
        assert_eq!(shown, ["0 B", "999 B", "1.0 kB", "12.3 MB", "1.0 GB", "5000.0 TB"]);
    }

    #[test]
    fn a_narrow_terminal_gets_whole_words_and_no_line_beyond_it() {
        let row = |name: &str, cells: [&str; 4]| {
            std::iter::once(name).chain(cells).map(str::to_owned).collect::<Vec<_>>()
        };
        let lines = vec![
            row("layer", ["local experts", "remote experts", "memory", "decode step"]),
            row("0", ["0-3,6,8,10-12,15,17,19-30,33,36,39,41,44", "4,5,7", "100.0 MB", "1.20 ms"]),
            row("1", ["all", "-", "", "900.0 us"]),
        ];
        let wide = fitted(lines.clone(), None);
        assert_eq!(wide, fitted(lines.clone(), Some(200)));
        let narrow = fitted(lines.clone(), Some(40));
        assert!(wide.lines().any(|line| line.chars().count() > 40));
        assert!(narrow.lines().all(|line| line.chars().count() <= 40), "{narrow}");
        // Every word is there, whole, and every part names its rows.
        for cell in lines.iter().flatten().filter(|cell| !cell.contains(',')) {
            assert!(cell.is_empty() || narrow.contains(cell.as_str()), "{cell}: {narrow}");
        }
        for word in lines[1][1].split(',') {
            let words = narrow.split([' ', ',', '\n']);
            assert!(words.into_iter().any(|shown| shown == word), "{word}: {narrow}");
        }
        assert_eq!(
            narrow.lines().filter(|line| line.starts_with("layer")).count(),
            narrow.split("\n\n").count()
        );
    }

    #[test]
    fn long_values_go_on_in_the_next_line() {
        let text =
            fitted(vec![vec!["limits".to_owned(), "first token 30 s, payload 6 MB".to_owned()]], Some(28));
        assert_eq!(text, "limits  first token 30 s,\n        payload 6 MB");
    }

    #[test]
    fn long_words_lose_their_middle() {
        assert_eq!(elided("abcdefghij", 10), "abcdefghij");
        assert_eq!(elided("abcdefghijk", 10), "abcd..hijk");
    }

    #[test]
    fn columns_are_aligned_without_trailing_space() {
        let text = of_pairs(&[("a", "1".to_owned()), ("long", "22".to_owned())]);
        assert_eq!(text, "a     1\nlong  22");
    }
}
