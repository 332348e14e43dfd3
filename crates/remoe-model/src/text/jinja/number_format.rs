//! Digits and padding of Python's formats.

use super::python_text::python_exponent;

/// Format specification of a value.
#[derive(Clone, Copy)]
pub(super) struct FormatSpec {
    pub(super) fill: char,
    /// Alignment `<`, `>`, `^` or `=`; the character zero if the specification has none.
    pub(super) align: char,
    pub(super) sign: char,
    pub(super) alternate: bool,
    pub(super) zero: bool,
    pub(super) width: usize,
    pub(super) grouping: Option<char>,
    pub(super) precision: Option<usize>,
}

impl Default for FormatSpec {
    fn default() -> Self {
        Self {
            fill: ' ',
            align: '\0',
            sign: '-',
            alternate: false,
            zero: false,
            width: 0,
            grouping: None,
            precision: None,
        }
    }
}

/// Pads `text` to the width of `spec`; `default` is the alignment if `spec` has none.
pub(super) fn padded(text: &str, spec: FormatSpec, default: char) -> String {
    let missing = spec.width.saturating_sub(text.chars().count());
    let fill = |count: usize| String::from(spec.fill).repeat(count);
    match if spec.align == '\0' { default } else { spec.align } {
        '<' => format!("{text}{}", fill(missing)),
        '^' => format!("{}{text}{}", fill(missing / 2), fill(missing - missing / 2)),
        _ => format!("{}{text}", fill(missing)),
    }
}

/// Separates digits into groups of `size`, counted from the end.
pub(super) fn grouped(digits: &str, separator: Option<char>, size: usize) -> String {
    let Some(separator) = separator else {
        return digits.to_owned();
    };
    let count = digits.chars().count();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (count - index).is_multiple_of(size) {
            out.push(separator);
        }
        out.push(digit);
    }
    out
}

/// Formats a number that is not negative by one of C's formats: `e`, `f` or `g`, or upper case.
pub(super) fn float_digits(number: f64, kind: char, precision: Option<usize>, alternate: bool) -> String {
    let upper = kind.is_ascii_uppercase();
    let letter = if upper { 'E' } else { 'e' };
    if !number.is_finite() {
        let name = if number.is_nan() { "nan" } else { "inf" };
        return if upper { name.to_uppercase() } else { name.to_owned() };
    }
    let precision = precision.unwrap_or(6);
    let with_point = |text: String| if alternate && precision == 0 { format!("{text}.") } else { text };
    match kind.to_ascii_lowercase() {
        'f' => with_point(format!("{number:.precision$}")),
        'e' => python_exponent(&format!("{number:.precision$e}"), letter),
        _ => {
            let significant = precision.max(1);
            let text = format!("{number:.*e}", significant - 1);
            let power: i64 = text.split_once('e').and_then(|(_, power)| power.parse().ok()).unwrap_or(0);
            let most = i64::try_from(significant).unwrap_or(i64::MAX);
            let trimmed = |digits: &str| {
                if alternate || !digits.contains('.') {
                    digits.to_owned()
                } else {
                    digits.trim_end_matches('0').trim_end_matches('.').to_owned()
                }
            };
            if power < -4 || power >= most {
                let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
                return python_exponent(&format!("{}e{power}", trimmed(digits)), letter);
            }
            let decimals = usize::try_from(most - 1 - power).unwrap_or(0);
            trimmed(&format!("{number:.decimals$}"))
        }
    }
}
