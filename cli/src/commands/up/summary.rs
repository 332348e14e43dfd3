//! The start of a model in a few lines that fit a terminal: what runs where, why, and what it costs.

use crate::deployment::DesiredDeployment;
use crate::output::table::{self, elided, wrapped};
use crate::placement_choice::PlacementChoice;
use remoe_planner::dollars;
use remoe_rollout::placement::RemoteProcess;
use std::collections::BTreeSet;
use std::net::SocketAddr;

/// Columns of the narrowest terminal that is thought of.
pub(super) const WIDTH: usize = 80;
/// Lines of one paragraph; what is longer is for `--verbose`.
const PARAGRAPH: usize = 2;
/// Lines at most, with one or two that were said before.
const LINES: usize = 10;
/// Columns of a model's name.
const NAME: usize = 28;

/// Facts of a model that is ready.
pub(super) struct Summary<'a> {
    pub(super) wanted: &'a DesiredDeployment,
    pub(super) choice: &'a PlacementChoice,
    pub(super) address: SocketAddr,
    pub(super) seconds: f64,
    /// Dollars of an hour in which all functions run.
    pub(super) hourly: f64,
    /// Clients need a key.
    pub(super) has_key: bool,
    /// Other models are served at this address.
    pub(super) is_one_of_several: bool,
    /// The machine is measured beside it.
    pub(super) is_measured_later: bool,
}

impl Summary<'_> {
    /// Returns its lines, none wider than [`WIDTH`].
    pub(super) fn lines(&self) -> Vec<String> {
        let name = elided(&self.wanted.name(), NAME);
        let endpoint = format!("http://{}", self.address);
        let mut lines = paragraph(&format!("{name} is ready at {endpoint} after {:.1} s", self.seconds));
        lines.extend(paragraph(&self.main_function()));
        lines.extend(paragraph(&self.remote_functions()));
        let later = if self.is_measured_later { "; planned again once measured, while idle" } else { "" };
        lines.extend(paragraph(&format!("why: {}{later}", self.choice.reason)));
        lines.extend(self.choice.expected_latency.iter().flat_map(|expected| paragraph(expected)));
        let hourly = format!("cost: {} per hour of all functions", dollars(self.hourly));
        let each = self.choice.cost_per_million.as_ref().map_or_else(String::new, |each| format!(", {each}"));
        lines.extend(paragraph(&format!("{hourly}{each}")));
        let example = self.example(&endpoint);
        if lines.len() + example.len() < LINES {
            lines.extend(example);
        }
        lines.push("Ctrl-C stops it; `up --verbose` shows the plan.".to_owned());
        lines
    }

    fn main_function(&self) -> String {
        let all: usize = self.wanted.moe_layers.iter().map(|layer| layer.experts as usize).sum();
        let away: usize = self.wanted.placement.remote().iter().map(|set| set.experts.len()).sum();
        let experts = match (all, away) {
            (0, _) => "the whole model".to_owned(),
            (all, 0) => format!("all {all} experts"),
            (all, away) => format!("{} of {all} experts", all - away),
        };
        let given = self.wanted.main_report().map_or_else(String::new, |main| {
            format!(
                ", {}, {}, KV cache of {}",
                counted(main.threads, "thread"),
                table::bytes(main.memory_bytes),
                table::bytes(main.kv_cache_bytes)
            )
        });
        format!("main function: {experts}{given}")
    }

    fn remote_functions(&self) -> String {
        let processes = self.wanted.placement.processes();
        if processes.is_empty() {
            return "remote functions: none".to_owned();
        }
        let experts =
            |process: &RemoteProcess| process.hosted.iter().map(|set| set.experts.len()).sum::<usize>();
        let mut one_of_each: BTreeSet<&String> = processes.iter().map(|process| &process.function).collect();
        let distinct: usize =
            processes.iter().filter(|one| one_of_each.remove(&one.function)).map(experts).sum();
        let names = match (processes.first(), processes.last()) {
            (Some(first), Some(last)) if first.name != last.name => {
                format!("{} to {}", first.name, last.name)
            }
            (first, _) => first.map_or_else(String::new, |first| first.name.clone()),
        };
        format!("remote functions: {} ({names}) with {}", processes.len(), counted(distinct, "expert"))
    }

    /// A first request; nothing where it does not fit.
    fn example(&self, endpoint: &str) -> Vec<String> {
        let mut body = serde_json::json!({"prompt": "Once upon a time", "max_tokens": 32});
        if self.is_one_of_several {
            body["model"] = self.wanted.name().into();
        }
        // A quote inside a quoted word of the shell.
        let body = body.to_string().replace('\'', r"'\''");
        let key = self.has_key.then(|| "  -H \"Authorization: Bearer $REMOE_API_KEY\" \\".to_owned());
        let lines = [format!("try: curl {endpoint}/v1/completions \\")].into_iter().chain(key);
        let lines: Vec<String> = lines.chain([format!("  -d '{body}'")]).collect();
        if lines.iter().all(|line| line.chars().count() <= WIDTH) { lines } else { Vec::new() }
    }
}

const INDENT: &str = "  ";
const LEFT_OUT: &str = " ..";

/// `text` in at most [`PARAGRAPH`] lines of whole words.
fn paragraph(text: &str) -> Vec<String> {
    // Room for the indent of further lines, and for the mark of what is left out.
    let width = WIDTH - INDENT.len() - LEFT_OUT.len();
    let words: Vec<String> = text.split(' ').map(|word| elided(word, width)).collect();
    let mut lines: Vec<String> = wrapped(&words.join(" "), width).lines().map(str::to_owned).collect();
    if lines.len() > PARAGRAPH {
        lines.truncate(PARAGRAPH);
        lines.iter_mut().last().into_iter().for_each(|line| line.push_str(LEFT_OUT));
    }
    lines.iter_mut().skip(1).for_each(|line| line.insert_str(0, INDENT));
    lines
}

/// So many of a thing.
pub(super) fn counted(count: usize, one: &str) -> String {
    format!("{count} {one}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_have_whole_words_and_fit() {
        let path = format!("/{}", "long-folder/".repeat(20));
        let lines = paragraph(&format!("why: as --plan {path} says; {}", "a plan would choose ".repeat(10)));
        assert_eq!(lines.len(), PARAGRAPH);
        assert!(lines.iter().all(|line| line.chars().count() <= WIDTH), "{lines:?}");
        assert!(lines.last().is_some_and(|line| line.ends_with(" ..")), "{lines:?}");
        assert_eq!(paragraph("remote functions: none"), ["remote functions: none"]);
    }

    #[test]
    fn one_is_no_plural() {
        assert_eq!([counted(1, "thread"), counted(2, "thread")], ["1 thread", "2 threads"]);
    }
}
