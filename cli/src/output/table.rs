//! Tables and figures for people.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use remoe_wire::format_listing;
use remoe_wire::v1::LayerExperts;

/// A table with a header.
pub(crate) fn with_header(header: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = plain();
    table.set_header(header);
    table.add_rows(rows);
    render(&table)
}

/// Names and values below each other.
pub(crate) fn of_pairs(pairs: &[(&str, String)]) -> String {
    let mut table = plain();
    table.add_rows(pairs.iter().map(|(name, value)| [(*name).to_owned(), value.clone()]));
    render(&table)
}

fn plain() -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table
}

fn render(table: &Table) -> String {
    let mut table = table.clone();
    for column in table.column_iter_mut() {
        column.set_padding((0, 2)).set_cell_alignment(CellAlignment::Left);
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
    fn columns_are_aligned_without_trailing_space() {
        let text = of_pairs(&[("a", "1".to_owned()), ("long", "22".to_owned())]);
        assert_eq!(text, "a     1\nlong  22");
    }
}
