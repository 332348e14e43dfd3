//! Summary of a started model in a few lines that fit a terminal: its placement, the reason for it, and its cost.

use crate::deployment::DesiredDeployment;
use crate::output::table::{self, elided, wrapped};
use crate::placement_choice::PlacementChoice;
use remoe_planner::dollars;
use remoe_rollout::placement::RemoteProcess;
use std::collections::BTreeSet;
use std::net::SocketAddr;

/// Line width, for the narrowest supported terminal.
pub(super) const WIDTH_COLUMNS: usize = 80;
/// Maximum number of lines of one paragraph. Longer text is cut.
const PARAGRAPH_LINES: usize = 2;
/// Limit on the lines of the summary, which leaves room for earlier lines on the screen.
const MAX_LINES: usize = 10;
/// Maximum width of the model's name.
const NAME_COLUMNS: usize = 28;

/// Properties of a model that is ready.
pub(super) struct Summary<'a> {
    pub(super) wanted: &'a DesiredDeployment,
    pub(super) choice: &'a PlacementChoice,
    pub(super) address: SocketAddr,
    pub(super) seconds: f64,
    /// Cost of an hour in which all functions run, in dollars.
    pub(super) hourly: f64,
    /// Set if clients need a key.
    pub(super) has_key: bool,
    /// Set if the address serves other models as well.
    pub(super) is_one_of_several: bool,
    /// Set if the machine is measured while the model runs.
    pub(super) is_measured_later: bool,
}

impl Summary<'_> {
    /// Returns the lines of the summary, none wider than [`WIDTH_COLUMNS`].
    pub(super) fn lines(&self) -> Vec<String> {
        let name = elided(&self.wanted.name(), NAME_COLUMNS);
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
        if lines.len() + example.len() < MAX_LINES {
            lines.extend(example);
        }
        lines.push("Ctrl-C stops it; `up --verbose` shows the plan.".to_owned());
        lines
    }

    fn main_function(&self) -> String {
        let total: usize = self.wanted.moe_layers.iter().map(|layer| layer.experts as usize).sum();
        let remote: usize = self.wanted.placement.remote().iter().map(|set| set.experts.len()).sum();
        let experts = match (total, remote) {
            (0, _) => "the whole model".to_owned(),
            (total, 0) => format!("all {total} experts"),
            (total, remote) => format!("{} of {total} experts", total - remote),
        };
        let resources = self.wanted.main_report().map_or_else(String::new, |main| {
            format!(
                ", {}, {}, KV cache of {}",
                count_with_noun(main.threads, "thread"),
                table::bytes(main.memory_bytes),
                table::bytes(main.kv_cache_bytes)
            )
        });
        format!("main function: {experts}{resources}")
    }

    fn remote_functions(&self) -> String {
        let processes = self.wanted.placement.processes();
        if processes.is_empty() {
            return "remote functions: none".to_owned();
        }
        let experts =
            |process: &RemoteProcess| process.hosted.iter().map(|set| set.experts.len()).sum::<usize>();
        let mut uncounted: BTreeSet<&String> = processes.iter().map(|process| &process.function).collect();
        let distinct: usize =
            processes.iter().filter(|process| uncounted.remove(&process.function)).map(experts).sum();
        let names = match (processes.first(), processes.last()) {
            (Some(first), Some(last)) if first.name != last.name => {
                format!("{} to {}", first.name, last.name)
            }
            (first, _) => first.map_or_else(String::new, |first| first.name.clone()),
        };
        format!(
            "remote functions: {} ({names}) with {}",
            processes.len(),
            count_with_noun(distinct, "expert")
        )
    }

    /// Returns an example request, or no lines if it does not fit.
    fn example(&self, endpoint: &str) -> Vec<String> {
        let mut body = serde_json::json!({"prompt": "Once upon a time", "max_tokens": 32});
        if self.is_one_of_several {
            body["model"] = self.wanted.name().into();
        }
        // Escape a quote inside a quoted word of the shell.
        let body = body.to_string().replace('\'', r"'\''");
        let key = self.has_key.then(|| "  -H \"Authorization: Bearer $REMOE_API_KEY\" \\".to_owned());
        let lines = [format!("try: curl {endpoint}/v1/completions \\")].into_iter().chain(key);
        let lines: Vec<String> = lines.chain([format!("  -d '{body}'")]).collect();
        if lines.iter().all(|line| line.chars().count() <= WIDTH_COLUMNS) { lines } else { Vec::new() }
    }
}

const INDENT: &str = "  ";
const ELLIPSIS: &str = " ..";

/// Wraps `text` into at most [`PARAGRAPH_LINES`] lines of whole words.
fn paragraph(text: &str) -> Vec<String> {
    // Leave room for the indent of further lines and for the ellipsis.
    let width = WIDTH_COLUMNS - INDENT.len() - ELLIPSIS.len();
    let words: Vec<String> = text.split(' ').map(|word| elided(word, width)).collect();
    let mut lines: Vec<String> = wrapped(&words.join(" "), width).lines().map(str::to_owned).collect();
    if lines.len() > PARAGRAPH_LINES {
        lines.truncate(PARAGRAPH_LINES);
        lines.iter_mut().last().into_iter().for_each(|line| line.push_str(ELLIPSIS));
    }
    lines.iter_mut().skip(1).for_each(|line| line.insert_str(0, INDENT));
    lines
}

/// Formats `count` with the noun `one`, in the plural unless `count` is 1.
pub(super) fn count_with_noun(count: usize, one: &str) -> String {
    format!("{count} {one}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_have_whole_words_and_fit() {
        let path = format!("/{}", "long-folder/".repeat(20));
        let lines = paragraph(&format!("why: as --plan {path} says; {}", "a plan would choose ".repeat(10)));
        assert_eq!(lines.len(), PARAGRAPH_LINES);
        assert!(lines.iter().all(|line| line.chars().count() <= WIDTH_COLUMNS), "{lines:?}");
        assert!(lines.last().is_some_and(|line| line.ends_with(" ..")), "{lines:?}");
        assert_eq!(paragraph("remote functions: none"), ["remote functions: none"]);
    }

    #[test]
    fn only_one_is_singular() {
        assert_eq!([count_with_noun(1, "thread"), count_with_noun(2, "thread")], ["1 thread", "2 threads"]);
    }
}
