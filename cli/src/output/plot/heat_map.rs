//! Tiles over two axes, coloured by name.

use super::{COLOURS, RIGHT, TOP, close, escaped, legend, open};
use std::fmt::Write;

const TILE_WIDTH: f64 = 92.0;
const TILE_HEIGHT: f64 = 46.0;
/// Names of rows, on the left, and of the axis beside them.
const LEFT: f64 = 190.0;
const BELOW: f64 = 58.0;
/// Distance of the legend from the tiles.
const LEGEND_GAP: f64 = 18.0;
/// Colour of a tile without a name.
const EMPTY: &str = "#eeeeee";
/// Colours on which white is read better than black.
const DARK: [&str; 2] = ["#0072b2", "#000000"];

/// One tile.
#[derive(Debug, Clone)]
pub(crate) struct Tile {
    /// Index of its name; none: nothing is there.
    pub(crate) series: Option<usize>,
    /// Text of the tile, in two lines.
    pub(crate) lines: [String; 2],
    /// Set if a frame marks it.
    pub(crate) framed: bool,
}

/// A chart of tiles. What a colour means stands in every tile too.
#[derive(Debug, Clone)]
pub(crate) struct HeatMap<'a> {
    pub(crate) title: &'a str,
    pub(crate) subtitle: &'a str,
    /// Meaning of the columns.
    pub(crate) x: &'a str,
    /// Meaning of the rows.
    pub(crate) y: &'a str,
    pub(crate) columns: Vec<String>,
    pub(crate) rows: Vec<String>,
    /// Meanings of the colours.
    pub(crate) series: Vec<&'a str>,
    /// Row by row.
    pub(crate) tiles: Vec<Tile>,
}

impl HeatMap<'_> {
    /// The chart as a file.
    pub(crate) fn svg(&self) -> String {
        let width = TILE_WIDTH * self.columns.len() as f64;
        let height = TILE_HEIGHT * self.rows.len() as f64;
        let (right, bottom) = (LEFT + width, TOP + height);
        let tall = bottom.max(TOP + LEGEND_GAP * self.series.len() as f64);
        let mut svg = open(right + LEGEND_GAP + RIGHT, tall + BELOW, self.title, self.subtitle);
        for (index, tile) in self.tiles.iter().enumerate() {
            let (row, column) = (index / self.columns.len().max(1), index % self.columns.len().max(1));
            let (left, top) = (LEFT + TILE_WIDTH * column as f64, TOP + TILE_HEIGHT * row as f64);
            put_tile(&mut svg, tile, left, top);
        }
        for (index, name) in self.rows.iter().enumerate() {
            let (end, middle) = (LEFT - 8.0, TOP + TILE_HEIGHT * (index as f64 + 0.5) + 4.0);
            put!(svg, "<text x=\"{end}\" y=\"{middle}\" text-anchor=\"end\">{}</text>", escaped(name));
        }
        for (index, name) in self.columns.iter().enumerate() {
            let (middle, below) = (LEFT + TILE_WIDTH * (index as f64 + 0.5), bottom + 18.0);
            put!(svg, "<text x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\">{}</text>", escaped(name));
        }
        legend(&mut svg, right + LEGEND_GAP, self.series.iter().copied());
        let (middle, below) = (LEFT + width / 2.0, bottom + 40.0);
        put!(svg, "<text x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\">{}</text>", escaped(self.x));
        let across = TOP + height / 2.0;
        put!(
            svg,
            "<text transform=\"rotate(-90)\" x=\"-{across}\" y=\"16\" text-anchor=\"middle\">{}</text>",
            escaped(self.y)
        );
        close(svg)
    }
}

fn put_tile(svg: &mut String, tile: &Tile, left: f64, top: f64) {
    let fill = tile.series.map_or(EMPTY, |series| COLOURS[series % COLOURS.len()]);
    let ink = if DARK.contains(&fill) { "#ffffff" } else { "#000000" };
    let (width, height) = (TILE_WIDTH - 3.0, TILE_HEIGHT - 3.0);
    let frame = if tile.framed { " stroke=\"#000000\" stroke-width=\"3\"" } else { "" };
    put!(
        svg,
        "<rect x=\"{}\" y=\"{}\" width=\"{width}\" height=\"{height}\" fill=\"{fill}\"{frame}/>",
        left + 1.5,
        top + 1.5
    );
    let middle = left + TILE_WIDTH / 2.0;
    for (line, text) in tile.lines.iter().enumerate().filter(|(_, text)| !text.is_empty()) {
        let (below, weight) = (top + 19.0 + 16.0 * line as f64, if line == 0 { "bold" } else { "normal" });
        put!(
            svg,
            "<text x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\" fill=\"{ink}\" font-weight=\"{weight}\">{}</text>",
            escaped(text)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile(series: Option<usize>, text: &str, framed: bool) -> Tile {
        Tile { series, lines: [text.to_owned(), String::new()], framed }
    }

    #[test]
    fn every_tile_is_drawn_where_its_row_and_column_are() {
        let map = HeatMap {
            title: "t",
            subtitle: "",
            x: "rate",
            y: "size",
            columns: vec!["1".to_owned(), "2".to_owned()],
            rows: vec!["a<b".to_owned(), "c".to_owned()],
            series: vec!["one", "two"],
            tiles: vec![
                tile(Some(0), "p", true),
                tile(Some(1), "q", false),
                tile(None, "r", false),
                tile(Some(1), "s", false),
            ],
        };
        let svg = map.svg();
        for (column, row, fill) in
            [(0.0, 0.0, COLOURS[0]), (1.0, 0.0, COLOURS[1]), (0.0, 1.0, EMPTY), (1.0, 1.0, COLOURS[1])]
        {
            let (left, top) = (LEFT + TILE_WIDTH * column + 1.5, TOP + TILE_HEIGHT * row + 1.5);
            let rect = format!("<rect x=\"{left}\" y=\"{top}\" width=\"89\" height=\"43\" fill=\"{fill}\"");
            assert!(svg.contains(&rect), "{rect} {svg}");
        }
        assert_eq!(svg.matches("stroke-width=\"3\"").count(), 1);
        assert!(svg.contains("a&lt;b") && svg.contains(">rate<") && svg.contains(">size<"), "{svg}");
        // White on the dark colour only.
        assert_eq!(svg.matches("fill=\"#ffffff\"").count(), 1);
    }
}
