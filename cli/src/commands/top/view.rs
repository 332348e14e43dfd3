//! Rows of `remoe top`, in the order that the user wants.

use super::figures::Figures;
use super::{FunctionLine, ModelLine};
use crate::commands::cost::dollars;
use crate::output::table;
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// Columns to sort by, with their titles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Column {
    Model,
    State,
    Running,
    Waiting,
    Requests,
    Tokens,
    FirstMedian,
    FirstTail,
    Memory,
    CostPerHour,
    Paid,
}

impl Column {
    const ALL: [Self; 11] = [
        Self::Model,
        Self::State,
        Self::Running,
        Self::Waiting,
        Self::Requests,
        Self::Tokens,
        Self::FirstMedian,
        Self::FirstTail,
        Self::Memory,
        Self::CostPerHour,
        Self::Paid,
    ];

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::State => "state",
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Requests => "req/s",
            Self::Tokens => "tok/s",
            Self::FirstMedian => "TTFT p50",
            Self::FirstTail => "TTFT p99",
            Self::Memory => "memory",
            Self::CostPerHour => "cost/h",
            Self::Paid => "paid",
        }
    }

    /// Returns the column beside this one; the first and the last are neighbours.
    pub(super) fn step(self, forward: bool) -> Self {
        let count = Self::ALL.len();
        let at = Self::ALL.iter().position(|column| *column == self).unwrap_or(0);
        Self::ALL[(at + if forward { 1 } else { count - 1 }) % count]
    }

    fn cell(self, line: &ModelLine) -> String {
        let seconds = |value: f64| match value {
            short if short < 1.0 => format!("{:.0} ms", short * 1e3),
            long => format!("{long:.2} s"),
        };
        let known = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let figures = &line.figures;
        let cost = line.cost.as_ref();
        match self {
            Self::Model => line.model.clone(),
            Self::State => line.state.clone(),
            Self::Running => line.in_flight.to_string(),
            Self::Waiting => line.waiting.to_string(),
            Self::Requests => known(figures.requests_per_second.map(|rate| format!("{rate:.1}"))),
            Self::Tokens => known(figures.tokens_per_second.map(|rate| format!("{rate:.1}"))),
            Self::FirstMedian => known(figures.ttft_p50_s.map(seconds)),
            Self::FirstTail => known(figures.ttft_p99_s.map(seconds)),
            Self::Memory => known(figures.memory_bytes.map(table::bytes)),
            Self::CostPerHour => known(cost.map(|cost| dollars(cost.per_hour))),
            Self::Paid => known(cost.and_then(|cost| cost.paid).map(dollars)),
        }
    }

    /// Compares two models: numbers from the largest down, unknown ones last, names from a to z.
    fn compare(self, one: &ModelLine, other: &ModelLine) -> Ordering {
        let number = |line: &ModelLine| {
            let Figures { requests_per_second, tokens_per_second, ttft_p50_s, ttft_p99_s, memory_bytes } =
                line.figures;
            let cost = line.cost.as_ref();
            match self {
                Self::Model | Self::State => None,
                Self::Running => Some(line.in_flight as f64),
                Self::Waiting => Some(line.waiting as f64),
                Self::Requests => requests_per_second,
                Self::Tokens => tokens_per_second,
                Self::FirstMedian => ttft_p50_s,
                Self::FirstTail => ttft_p99_s,
                Self::Memory => memory_bytes.map(|bytes| bytes as f64),
                Self::CostPerHour => cost.map(|cost| cost.per_hour as f64),
                Self::Paid => cost.and_then(|cost| cost.paid).map(|paid| paid as f64),
            }
        };
        let by_number = match (number(one), number(other)) {
            (Some(one), Some(other)) => other.total_cmp(&one),
            (one, other) => other.is_some().cmp(&one.is_some()),
        };
        let by_state = match self {
            Self::State => one.state.cmp(&other.state),
            _ => Ordering::Equal,
        };
        by_number.then(by_state).then_with(|| one.model.cmp(&other.model))
    }
}

/// Order of the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) column: Column,
    pub(super) is_reversed: bool,
}

impl Default for Order {
    fn default() -> Self {
        Self { column: Column::Model, is_reversed: false }
    }
}

impl Order {
    pub(super) fn sort(self, models: &mut [ModelLine]) {
        models.sort_by(|one, other| match self.is_reversed {
            true => self.column.compare(other, one),
            false => self.column.compare(one, other),
        });
    }
}

/// Returns the text of all models, on a screen with a mark at the column that they are sorted by.
pub(super) fn text(models: &[ModelLine], order: Option<Order>) -> String {
    let mark = |column: Column| match order {
        Some(order) if order.column == column && order.is_reversed => " ▲",
        Some(order) if order.column == column => " ▼",
        _ => "",
    };
    let mut header: Vec<String> =
        Column::ALL.iter().map(|&column| format!("{}{}", column.title(), mark(column))).collect();
    header.insert(2, "functions".to_owned());
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let rows = models.iter().map(|line| {
        let mut row: Vec<String> = Column::ALL.iter().map(|column| column.cell(line)).collect();
        row.insert(2, states(&line.functions));
        row
    });
    let figures = table::with_header(&header, rows.collect());
    match models.is_empty() {
        true => "no models".to_owned(),
        false => format!("{figures}\n\n{}", sleep_and_functions(models)),
    }
}

/// Returns how many functions are in which state.
fn states(functions: &[FunctionLine]) -> String {
    let mut states: BTreeMap<&str, usize> = BTreeMap::new();
    for function in functions {
        *states.entry(&function.state).or_default() += 1;
    }
    if states.is_empty() {
        return "-".to_owned();
    }
    states.iter().map(|(state, count)| format!("{count} {state}")).collect::<Vec<_>>().join(", ")
}

fn sleep_and_functions(models: &[ModelLine]) -> String {
    let seconds = |value: f64| format!("{value:.1} s");
    let rows = models.iter().map(|line| {
        let functions = line.functions.iter().map(|function| match function.pid {
            Some(pid) => format!("{} {} ({pid})", function.name, function.state),
            None => format!("{} {}", function.name, function.state),
        });
        vec![
            line.model.clone(),
            seconds(line.quiet_s),
            line.idle_s.map_or_else(|| "never".to_owned(), seconds),
            line.wakes.to_string(),
            line.last_wake_s.map_or_else(|| "-".to_owned(), seconds),
            line.group_wakes.to_string(),
            functions.collect::<Vec<_>>().join(", "),
        ]
    });
    let header = ["model", "idle for", "idle window", "wakes", "last wake", "group wakes", "functions"];
    table::with_header(&header, rows.collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn line(model: &str, state: &str, running: usize, tokens: Option<f64>) -> ModelLine {
        let mut line: ModelLine = serde_json::from_value(json!({
            "model": model, "state": state, "in_flight": running, "waiting": 0, "waiting_bytes": 0,
            "quiet_s": 1.0, "idle_s": null, "wakes": 0, "last_wake_s": null,
            "cost": {"per_hour": 2_000_000_000_u64, "paid": null, "requests": null},
            "functions": [{"name": "main", "state": "serving", "pid": 7}, {"name": "a:1", "state": "asleep", "pid": null}],
        }))
        .unwrap();
        line.figures.tokens_per_second = tokens;
        line
    }

    fn sorted(column: Column, is_reversed: bool) -> String {
        let mut models = [
            line("b", "active", 3, Some(1.0)),
            line("a", "asleep", 1, None),
            line("c", "active", 1, Some(20.0)),
        ];
        Order { column, is_reversed }.sort(&mut models);
        models.iter().map(|line| &*line.model).collect()
    }

    #[test]
    fn models_are_sorted_largest_first_and_unknown_last() {
        assert_eq!(sorted(Column::Model, false), "abc");
        assert_eq!(sorted(Column::Model, true), "cba");
        assert_eq!(sorted(Column::Running, false), "bac");
        assert_eq!(sorted(Column::Tokens, false), "cba");
        assert_eq!(sorted(Column::Tokens, true), "abc");
        assert_eq!(sorted(Column::State, false), "bca");
    }

    #[test]
    fn columns_go_round() {
        let all = Column::ALL.iter().fold(Column::Model, |column, _| column.step(true));
        assert_eq!(all, Column::Model);
        assert_eq!(Column::Model.step(false), Column::Paid);
    }

    #[test]
    fn sleeping_model_is_shown_as_asleep() {
        let mut asleep = line("m", "asleep", 0, None);
        asleep.functions[0].state = "asleep".to_owned();
        let order = Order { column: Column::Tokens, is_reversed: false };
        let text = text(&[asleep], Some(order));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].contains("tok/s ▼") && lines[0].contains("TTFT p99"), "{text}");
        assert!(lines[1].starts_with("m") && lines[1].contains("asleep") && lines[1].contains("2 asleep"));
    }
}
