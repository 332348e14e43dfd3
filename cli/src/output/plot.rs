//! Charts of lines, bars and tiles as SVG.

use std::fmt::Write;

/// Writing to a string does not fail.
macro_rules! put {
    ($target:expr, $($part:tt)*) => { writeln!($target, $($part)*).unwrap_or_default() };
}

pub(crate) mod heat_map;

/// Size of the field that lines or bars are drawn in.
const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 280.0;
/// Around it: titles above, axis below, numbers or names on the left, names of series on the right.
const TOP: f64 = 62.0;
const BOTTOM: f64 = 52.0;
const RIGHT: f64 = 290.0;
const NUMBERS: f64 = 76.0;
const NAMES: f64 = 330.0;
/// Height of one bar with the space below it.
const BAR: f64 = 22.0;
/// Steps of an axis, about.
const TICKS: f64 = 5.0;
/// Up to so many places that points have on the axis below are what is marked there.
const MARKED_PLACES: usize = 10;
/// A bar's piece below this share of the axis cannot be seen.
const VISIBLE: f64 = 0.002;
/// Colours that people with any kind of colour vision tell apart (Okabe and Ito, 2008).
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999"];

/// One axis.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Axis<'a> {
    /// Quantity of the axis, with its unit.
    pub(crate) label: &'a str,
    /// Set if equal ratios have equal lengths; all values must be above 0 then.
    pub(crate) logarithmic: bool,
}

/// Points that are joined.
#[derive(Debug, Clone)]
pub(crate) struct Series<'a> {
    pub(crate) name: String,
    /// Meaning of the name; may be empty.
    pub(crate) meaning: &'a str,
    pub(crate) points: Vec<(f64, f64)>,
}

/// A chart of lines.
#[derive(Debug, Clone)]
pub(crate) struct Lines<'a> {
    pub(crate) title: &'a str,
    /// Meaning of the title's names.
    pub(crate) subtitle: &'a str,
    pub(crate) x: Axis<'a>,
    pub(crate) y: Axis<'a>,
    pub(crate) series: Vec<Series<'a>>,
}

/// A piece of a bar.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    /// Index of its name among the chart's.
    pub(crate) series: usize,
    pub(crate) from: f64,
    pub(crate) to: f64,
}

/// One bar.
#[derive(Debug, Clone)]
pub(crate) struct Bar {
    pub(crate) name: String,
    pub(crate) segments: Vec<Segment>,
}

/// A chart of horizontal bars, from 0 on.
#[derive(Debug, Clone)]
pub(crate) struct Bars<'a> {
    pub(crate) title: &'a str,
    /// Meaning of the title's names.
    pub(crate) subtitle: &'a str,
    /// Quantity of the bars, with its unit.
    pub(crate) label: &'a str,
    /// Names of the series, where there are several.
    pub(crate) series: Vec<&'a str>,
    pub(crate) bars: Vec<Bar>,
}

/// A line across the field at `at`, with its number below `bottom`.
fn tick_below(svg: &mut String, at: f64, bottom: f64, value: f64) {
    put!(svg, "<path d=\"M{at:.1} {TOP}V{bottom}\" stroke=\"#ddd\"/>");
    let below = bottom + 18.0;
    put!(svg, "<text x=\"{at:.1}\" y=\"{below}\" text-anchor=\"middle\">{}</text>", number(value));
}

impl Lines<'_> {
    /// The chart as a file.
    pub(crate) fn svg(&self) -> String {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let x = Scale::of(self.x.logarithmic, points().map(|point| point.0));
        let y = Scale::of(self.y.logarithmic, points().map(|point| point.1));
        let mut svg = open(NUMBERS + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM, self.title, self.subtitle);
        let (right, bottom) = (NUMBERS + WIDTH, TOP + HEIGHT);
        let (left_of, up_of) =
            (|value| NUMBERS + x.part(value) * WIDTH, |value| bottom - y.part(value) * HEIGHT);
        let mut places: Vec<f64> = points().map(|point| point.0).collect();
        places.sort_by(f64::total_cmp);
        places.dedup();
        for tick in if places.len() <= MARKED_PLACES { places } else { x.ticks() } {
            tick_below(&mut svg, left_of(tick), bottom, tick);
        }
        for tick in y.ticks() {
            let at = up_of(tick);
            put!(svg, "<path d=\"M{NUMBERS} {at:.1}H{right}\" stroke=\"#ddd\"/>");
            let (end, middle) = (NUMBERS - 6.0, at + 4.0);
            put!(svg, "<text x=\"{end}\" y=\"{middle:.1}\" text-anchor=\"end\">{}</text>", number(tick));
        }
        for (index, series) in self.series.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let at = |point: &(f64, f64)| format!("{:.1},{:.1}", left_of(point.0), up_of(point.1));
            let points: Vec<String> = series.points.iter().map(at).collect();
            let points = points.join(" ");
            // Lines grow thinner, so that of equal ones all are seen.
            let width = 1.5 + 1.5 * (self.series.len() - 1 - index) as f64;
            put!(
                svg,
                "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"/>"
            );
        }
        let names = self.series.iter().map(|series| match series.meaning {
            "" => series.name.clone(),
            meaning => format!("{}: {meaning}", series.name),
        });
        legend(&mut svg, right + 14.0, names);
        let (middle, below) = (NUMBERS + WIDTH / 2.0, bottom + 40.0);
        put!(
            svg,
            "<text x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\">{}</text>",
            escaped(self.x.label)
        );
        let across = TOP + HEIGHT / 2.0;
        put!(
            svg,
            "<text transform=\"rotate(-90)\" x=\"-{across}\" y=\"14\" text-anchor=\"middle\">{}</text>",
            escaped(self.y.label)
        );
        close(svg)
    }
}

impl Bars<'_> {
    /// The chart as a file.
    pub(crate) fn svg(&self) -> String {
        let ends = self.bars.iter().flat_map(|bar| bar.segments.iter().map(|segment| segment.to));
        let scale = Scale::of(false, ends.chain([0.0]));
        let is_seen = |bar: &&Bar| bar.segments.iter().any(|one| scale.part(one.to) >= VISIBLE);
        let (seen, unseen): (Vec<&Bar>, Vec<&Bar>) = self.bars.iter().partition(is_seen);
        let height = BAR * seen.len() as f64;
        let side = if self.series.is_empty() { 70.0 } else { RIGHT };
        let mut svg = open(NAMES + WIDTH + side, TOP + height + BOTTOM, self.title, self.subtitle);
        let bottom = TOP + height;
        let left_of = |value| NAMES + scale.part(value) * WIDTH;
        for tick in scale.ticks() {
            tick_below(&mut svg, left_of(tick), bottom, tick);
        }
        for (index, bar) in seen.into_iter().enumerate() {
            let top = TOP + BAR * index as f64;
            let (end, middle) = (NAMES - 6.0, top + 14.0);
            put!(svg, "<text x=\"{end}\" y=\"{middle}\" text-anchor=\"end\">{}</text>", escaped(&bar.name));
            for segment in &bar.segments {
                let (left, width) = (left_of(segment.from), left_of(segment.to) - left_of(segment.from));
                let (colour, height) = (COLOURS[segment.series % COLOURS.len()], BAR - 5.0);
                put!(
                    svg,
                    "<rect x=\"{left:.1}\" y=\"{top}\" width=\"{width:.1}\" height=\"{height}\" fill=\"{colour}\"/>"
                );
            }
            if let Some(last) = bar.segments.last() {
                let after = left_of(last.to) + 5.0;
                put!(svg, "<text x=\"{after:.1}\" y=\"{middle}\">{}</text>", number(last.to));
            }
        }
        legend(&mut svg, NAMES + WIDTH + 60.0, self.series.iter().copied());
        let (middle, below) = (NAMES + WIDTH / 2.0, bottom + 40.0);
        let mut label = self.label.to_owned();
        if let Some(longest) = unseen.iter().flat_map(|bar| &bar.segments).map(|one| one.to).reduce(f64::max)
        {
            let names: Vec<&str> = unseen.iter().map(|bar| bar.name.as_str()).collect();
            label += &format!("; too short to be seen ({} at most): {}", number(longest), names.join(", "));
        }
        put!(svg, "<text x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\">{}</text>", escaped(&label));
        close(svg)
    }
}

fn open(width: f64, height: f64, title: &str, subtitle: &str) -> String {
    let (title, subtitle) = (escaped(title), escaped(subtitle));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\" role=\"img\">\n<title>{title}</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"12\" y=\"22\" font-size=\"14\">{title}</text>\n\
         <text x=\"12\" y=\"40\" fill=\"#555\">{subtitle}</text>\n"
    )
}

fn close(mut svg: String) -> String {
    svg.push_str("</svg>\n");
    svg
}

fn legend(svg: &mut String, left: f64, names: impl Iterator<Item = impl AsRef<str>>) {
    for (index, name) in names.enumerate() {
        let (top, colour) = (TOP + 18.0 * index as f64, COLOURS[index % COLOURS.len()]);
        put!(svg, "<rect x=\"{left}\" y=\"{top}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>");
        put!(svg, "<text x=\"{}\" y=\"{}\">{}</text>", left + 18.0, top + 10.0, escaped(name.as_ref()));
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A number with three digits that count.
fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if !(1e-3..1e5).contains(&size) => format!("{value:.2e}"),
        size if size >= 100.0 => format!("{value:.0}"),
        _ => {
            let digits = (2.0 - value.abs().log10().floor()).max(0.0) as usize;
            let text = format!("{value:.digits$}");
            if text.contains('.') {
                text.trim_end_matches('0').trim_end_matches('.').to_owned()
            } else {
                text
            }
        }
    }
}

/// First digits of the marks on a logarithmic axis.
const DIGITS: [f64; 3] = [1.0, 2.0, 5.0];

/// Where values lie on an axis.
struct Scale {
    logarithmic: bool,
    low: f64,
    high: f64,
}

impl Scale {
    /// An axis that shows all `values`; a linear one begins at 0.
    fn of(logarithmic: bool, values: impl Iterator<Item = f64>) -> Self {
        let shown = values.filter(|value| value.is_finite() && (!logarithmic || *value > 0.0));
        let (least, most) =
            shown.fold((f64::MAX, f64::MIN), |(least, most), value| (least.min(value), most.max(value)));
        let (low, high) = if logarithmic { (least, most) } else { (least.min(0.0), most) };
        if low < high {
            return Self { logarithmic, low, high }.rounded_outwards();
        }
        // Nothing to show, or one value only.
        let low =
            if logarithmic && low > 0.0 && low < f64::MAX { low } else { f64::from(u8::from(logarithmic)) };
        Self { logarithmic, low, high: if logarithmic { low * 10.0 } else { low + 1.0 } }
    }

    /// Returns the axis, lengthened so that it begins and ends at a mark.
    fn rounded_outwards(self) -> Self {
        let Self { logarithmic, low, high } = self;
        if !logarithmic {
            let step = self.step();
            return Self { logarithmic, low, high: low + ((high - low) / step - 1e-9).ceil() * step };
        }
        let around = |value: f64| {
            let power = value.log10().floor() as i32;
            (power - 1..=power + 1).flat_map(|power| DIGITS.map(|digit| digit * 10_f64.powi(power)))
        };
        let low = around(low).filter(|mark| *mark <= low).fold(0.0, f64::max);
        let high = around(high).filter(|mark| *mark >= high).fold(f64::MAX, f64::min);
        Self { logarithmic, low, high }
    }

    /// From mark to mark of a linear axis.
    fn step(&self) -> f64 {
        let rough = (self.high - self.low) / TICKS;
        let power = 10_f64.powf(rough.log10().floor());
        let digit = [1.0, 2.0, 5.0, 10.0].into_iter().find(|digit| digit * power >= rough);
        digit.unwrap_or(10.0) * power
    }

    /// 0 at the beginning of the axis, 1 at its end.
    fn part(&self, value: f64) -> f64 {
        let part = if self.logarithmic {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        if part.is_finite() { part.clamp(0.0, 1.0) } else { 0.0 }
    }

    /// Round values along the axis.
    fn ticks(&self) -> Vec<f64> {
        if self.logarithmic {
            let decades = (self.high / self.low).log10();
            let digits: &[f64] = if decades > 3.0 { &[1.0] } else { &DIGITS };
            let powers = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
            let all = powers.flat_map(|power| digits.iter().map(move |digit| digit * 10_f64.powi(power)));
            return all.filter(|tick| (self.low..=self.high).contains(tick)).collect();
        }
        let step = self.step();
        let last = ((self.high - self.low) / step + 1e-9).floor() as u32;
        (0..=last).map(|tick| self.low + f64::from(tick) * step).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within_the_axis() {
        assert_eq!(Scale::of(false, [3.0, 47.0].into_iter()).ticks(), [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]);
        let decades = Scale::of(true, [0.3, 30.0].into_iter());
        assert_eq!(decades.ticks(), [0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0]);
        // A narrow range still has two marks.
        assert!(Scale::of(true, [1.3e-5, 1.4e-5].into_iter()).ticks().len() >= 2);
        assert_eq!(Scale::of(true, std::iter::empty()).ticks().first(), Some(&1.0));
        assert_eq!(Scale::of(false, [0.0].into_iter()).part(0.0), 0.0);
    }

    #[test]
    fn numbers_keep_three_digits() {
        let shown = [0.0, 0.5, 12.345, 1234.0, 0.001_234, 1.5e-6, 2e6].map(number);
        assert_eq!(shown, ["0", "0.5", "12.3", "1234", "0.00123", "1.50e-6", "2.00e6"]);
    }

    #[test]
    fn names_cannot_break_the_file() {
        let bar =
            Bar { name: "a<b & \"c\"".to_owned(), segments: vec![Segment { series: 0, from: 0.0, to: 2.0 }] };
        let svg = Bars { title: "x > y", subtitle: "", label: "s", series: vec![], bars: vec![bar] }.svg();
        assert!(svg.contains("a&lt;b &amp; &quot;c&quot;") && svg.contains("x &gt; y"), "{svg}");
    }

    #[test]
    fn bars_that_cannot_be_seen_are_named_instead() {
        let bar = |name: &str, to| Bar {
            name: name.to_owned(),
            segments: vec![Segment { series: 0, from: 0.0, to }],
        };
        let bars = vec![bar("long", 40.0), bar("short", 0.01)];
        let svg = Bars { title: "t", subtitle: "", label: "seconds", series: vec![], bars }.svg();
        assert!(svg.contains("seconds; too short to be seen (0.01 at most): short"), "{svg}");
        assert!(!svg.contains(">short<"), "{svg}");
    }

    #[test]
    fn of_equal_lines_all_are_seen() {
        let axis = Axis { label: "v", logarithmic: false };
        let one =
            |name: &str| Series { name: name.to_owned(), meaning: "", points: vec![(0.0, 1.0), (1.0, 2.0)] };
        let series = vec![one("a"), one("b"), one("c")];
        let svg = Lines { title: "t", subtitle: "", x: axis, y: axis, series }.svg();
        let widths: Vec<&str> =
            svg.split("stroke-width=\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
        assert_eq!(widths, ["4.5", "3", "1.5"]);
    }

    #[test]
    fn lines_run_from_corner_to_corner() {
        let axis = Axis { label: "v", logarithmic: false };
        let points = vec![(0.0, 0.0), (10.0, 4.0)];
        let series = vec![Series { name: "s".to_owned(), meaning: "", points }];
        let svg = Lines { title: "t", subtitle: "", x: axis, y: axis, series }.svg();
        let (left, right) =
            (format!("{NUMBERS:.1},{:.1}", TOP + HEIGHT), format!("{:.1},{TOP:.1}", NUMBERS + WIDTH));
        assert!(svg.contains(&format!("points=\"{left} {right}\"")), "{svg}");
    }
}
