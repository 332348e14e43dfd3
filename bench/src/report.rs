//! Results of a run, as JSON for programs and as a Markdown table for people.

use crate::load::MachineLoad;
use crate::machine::BenchMachine;
use crate::pace::{RoundsEnd, StopCause};
use crate::series::{Series, Spread};
use serde::Serialize;
use serde_json::Value;
use std::fmt::{self, Write};

/// Raised by every change that a reader of older reports would misread.
const VERSION: u32 = 1;

/// A whole run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    version: u32,
    /// Fewer and shorter rounds: good for a look, not for a comparison.
    quick: bool,
    machine: BenchMachine,
    pub(crate) parts: Vec<BenchSection>,
}

/// One question and its answers.
#[derive(Debug, Serialize)]
pub(crate) struct BenchSection {
    name: String,
    /// Settings of the measurement, with its sizes.
    settings: Value,
    figures: Vec<Figure>,
    /// Notes that a reader needs beside the figures.
    notes: Vec<String>,
    /// Why there are no (further) figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) failure: Option<String>,
    /// Other load of the machine meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) load: Option<MachineLoad>,
}

/// One figure.
#[derive(Debug, Serialize)]
struct Figure {
    name: String,
    unit: &'static str,
    #[serde(flatten)]
    spread: Spread,
    #[serde(skip_serializing_if = "Option::is_none")]
    bar: Option<Bar>,
}

/// Bar that the median should reach.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Bar {
    AtLeast(f64),
    AtMost(f64),
}

impl Report {
    pub(crate) fn new(quick: bool, machine: BenchMachine) -> Self {
        Self { version: VERSION, quick, machine, parts: Vec::new() }
    }
}

impl BenchSection {
    pub(crate) fn new(name: impl Into<String>, settings: Value) -> Self {
        Self {
            name: name.into(),
            settings,
            figures: Vec::new(),
            notes: Vec::new(),
            failure: None,
            load: None,
        }
    }

    /// A part that could not be measured.
    pub(crate) fn failed(name: impl Into<String>, why: impl fmt::Display) -> Self {
        Self { failure: Some(why.to_string()), ..Self::new(name, Value::Null) }
    }

    /// Adds a figure; a series without values adds nothing.
    pub(crate) fn add(&mut self, name: impl Into<String>, unit: &'static str, series: &Series) {
        self.push(name.into(), unit, series, None);
    }

    /// Adds a figure that has something to reach.
    pub(crate) fn add_with_bar(
        &mut self,
        name: impl Into<String>,
        unit: &'static str,
        series: &Series,
        bar: Bar,
    ) {
        self.push(name.into(), unit, series, Some(bar));
    }

    fn push(&mut self, name: String, unit: &'static str, series: &Series, bar: Option<Bar>) {
        if let Some(spread) = series.spread() {
            self.figures.push(Figure { name, unit, spread, bar });
        }
    }

    /// Says how many rounds the figures are of, and that the part failed where no round counted or one
    /// broke.
    pub(crate) fn conclude(&mut self, ending: RoundsEnd) {
        self.note(ending.to_string());
        self.failure = match ending.cause {
            StopCause::Failed(error) => Some(error.to_string()),
            StopCause::Interrupted if ending.done == 0 => Some("interrupted".to_owned()),
            StopCause::Complete | StopCause::TimeLimit | StopCause::Interrupted => None,
        };
    }

    pub(crate) fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }
}

impl Bar {
    fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtLeast(bar) => value >= bar,
            Self::AtMost(bar) => value <= bar,
        }
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtLeast(bar) => write!(f, "≥ {bar}"),
            Self::AtMost(bar) => write!(f, "≤ {bar}"),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.machine)?;
        if self.quick {
            writeln!(f, "\nA quick run: fewer and shorter rounds, too few for comparisons.")?;
        }
        self.parts.iter().try_for_each(|part| write!(f, "\n{part}"))
    }
}

impl fmt::Display for BenchSection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "### {}\n", self.name)?;
        if !self.figures.is_empty() {
            writeln!(f, "| | unit | median | min | max | bar |\n| --- | --- | ---: | ---: | ---: | --- |")?;
            let judged = self.load.as_ref().is_none_or(MachineLoad::is_quiet);
            self.figures.iter().try_for_each(|figure| writeln!(f, "{}", figure.row(judged)))?;
        }
        for note in &self.notes {
            writeln!(f, "\n{note}")?;
        }
        if let Some(load) = &self.load {
            writeln!(f, "\n{load}")?;
        }
        self.failure.iter().try_for_each(|why| writeln!(f, "\nNot measured to the end: {why}"))
    }
}

impl Figure {
    /// A row of the table; `judged`: whether the bar is called met or missed.
    fn row(&self, judged: bool) -> String {
        let Spread { min, median, max, .. } = self.spread;
        let mut row = format!("| {} | {} ", self.name, self.unit);
        for value in [median, min, max] {
            // Writing to a string cannot fail.
            let _written = write!(row, "| {} ", digits(value));
        }
        let bar = match self.bar {
            None => String::new(),
            Some(bar) if !judged => bar.to_string(),
            Some(bar) => format!("{bar} {}", if bar.is_met(median) { "met" } else { "**missed**" }),
        };
        row + &format!("| {bar} |")
    }
}

/// Three significant digits, no more than there is meaning in.
fn digits(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missed_bar_is_seen() {
        let mut part = BenchSection::new("reading", Value::Null);
        part.add_with_bar("share", "", &Series::from_iter([0.5, 0.8, 0.9]), Bar::AtLeast(0.85));
        part.add_with_bar("time", "ms", &Series::from_iter([12.34]), Bar::AtMost(50.0));
        part.add("nothing", "ms", &Series::default());
        let text = part.to_string();
        assert!(text.contains("| share |  | 0.800 | 0.500 | 0.900 | ≥ 0.85 **missed** |"), "{text}");
        assert!(text.contains("| time | ms | 12.3 | 12.3 | 12.3 | ≤ 50 met |"), "{text}");
        assert!(!text.contains("nothing"), "{text}");
    }
}
