//! Two plots as SVG: the methods side by side, and whether similar prompts use similar experts.

use crate::exit::CliError;
use remoe_predictor::correlation::PromptPair;
use std::fmt::Write;
use std::path::Path;

/// Points of the scatter plot, at most: a file that opens at once.
const POINTS: usize = 2000;
/// Size of the scatter plot's square, and of the margins around it.
const SIDE: f64 = 400.0;
const MARGIN: f64 = 60.0;
/// Height of one method's bar, and width of the space for bars and names.
const BAR: f64 = 22.0;
const BARS: f64 = 440.0;
const NAMES: f64 = 130.0;

/// Writes `methods.svg` and `correlation.svg` into `folder`.
pub(super) fn write(
    folder: &Path,
    methods: &[(&str, f64)],
    pairs: &[PromptPair],
    correlation: f64,
) -> Result<(), CliError> {
    let store = |name: &str, text: String| {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(|error| CliError {
            path: Some(path.clone()),
            ..CliError::runtime(format!("cannot write {}: {error}", path.display()))
        })
    };
    store("methods.svg", bars(methods))?;
    store("correlation.svg", scatter(pairs, correlation))
}

fn open(width: f64, height: f64, title: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\" role=\"img\">\n<title>{title}</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"12\" y=\"22\" font-size=\"14\">{title}</text>\n"
    )
}

/// Writing to a string does not fail.
macro_rules! put {
    ($target:expr, $($part:tt)*) => { writeln!($target, $($part)*).unwrap_or_default() };
}

fn bars(methods: &[(&str, f64)]) -> String {
    let mut ranked = methods.to_vec();
    ranked.sort_by(|a, b| a.1.total_cmp(&b.1));
    let most = ranked.last().map_or(1.0, |(_, value)| value.max(f64::MIN_POSITIVE));
    let height = 50.0 + ranked.len() as f64 * BAR;
    let mut svg = open(NAMES + BARS + 90.0, height, "Mean Jensen-Shannon divergence (less is better)");
    for (row, (name, value)) in ranked.iter().enumerate() {
        let (top, width) = (40.0 + row as f64 * BAR, BARS * value / most);
        let (left, middle, end) = (NAMES + 4.0, top + 14.0, NAMES + width + 10.0);
        put!(svg, "<text x=\"{NAMES}\" y=\"{middle}\" text-anchor=\"end\">{name}</text>");
        put!(svg, "<rect x=\"{left}\" y=\"{top}\" width=\"{width:.1}\" height=\"18\" fill=\"#4a78b0\"/>");
        put!(svg, "<text x=\"{end:.1}\" y=\"{middle}\">{value:.4}</text>");
    }
    svg.push_str("</svg>\n");
    svg
}

fn scatter(pairs: &[PromptPair], correlation: f64) -> String {
    let step = pairs.len().div_ceil(POINTS).max(1);
    let shown: Vec<&PromptPair> = pairs.iter().step_by(step).collect();
    let range = |of: fn(&PromptPair) -> f64| {
        let values = shown.iter().map(|pair| of(pair));
        let (low, high) =
            values.fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
        if high > low { (low, high) } else { (low - 0.5, low + 0.5) }
    };
    let (x, y) = (range(|pair| pair.prompt_similarity), range(|pair| pair.activation_similarity));
    let place = |value: f64, (low, high): (f64, f64)| (value - low) / (high - low) * SIDE;
    let size = SIDE + 2.0 * MARGIN;
    let mut svg =
        open(size, size, &format!("Similar prompts, similar experts: correlation {correlation:.3}"));
    put!(
        svg,
        "<rect x=\"{MARGIN}\" y=\"{MARGIN}\" width=\"{SIDE}\" height=\"{SIDE}\" fill=\"none\" stroke=\"#999\"/>"
    );
    svg.push_str("<g fill=\"#4a78b0\" fill-opacity=\"0.4\">\n");
    for pair in &shown {
        let (left, up) =
            (MARGIN + place(pair.prompt_similarity, x), MARGIN + SIDE - place(pair.activation_similarity, y));
        put!(svg, "<circle cx=\"{left:.0}\" cy=\"{up:.0}\" r=\"2\"/>");
    }
    svg.push_str("</g>\n");
    let bottom = MARGIN + SIDE;
    for tick in 0..=4 {
        let part = f64::from(tick) / 4.0;
        let (at_x, at_y) = (x.0 + part * (x.1 - x.0), y.0 + part * (y.1 - y.0));
        let (left, up) = (MARGIN + part * SIDE, bottom - part * SIDE);
        put!(svg, "<text x=\"{left}\" y=\"{}\" text-anchor=\"middle\">{at_x:.2}</text>", bottom + 16.0);
        put!(svg, "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{at_y:.2}</text>", MARGIN - 6.0, up + 4.0);
    }
    let centre = size / 2.0;
    put!(
        svg,
        "<text x=\"{centre}\" y=\"{}\" text-anchor=\"middle\">soft cosine similarity of two prompts</text>",
        size - 18.0
    );
    put!(
        svg,
        "<text transform=\"rotate(-90)\" x=\"-{centre}\" y=\"16\" text-anchor=\"middle\">similarity of their activations, 1 - JS / ln 2</text>"
    );
    svg.push_str("</svg>\n");
    svg
}
