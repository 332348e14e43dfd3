//! How replicas follow load, as a table.

use super::files::OutputFolder;
use crate::exit::CliError;
use crate::output::table;
use crate::plan_report::percent;
use remoe_experiments::ReplicaTrial;
use std::path::Path;

/// The ways to choose replicas, side by side.
pub(super) fn text(ways: &[ReplicaTrial]) -> String {
    let rows = ways.iter().map(|way| {
        let seconds = |seconds: f64| {
            if seconds < 1.0 { format!("{:.0} ms", seconds * 1e3) } else { format!("{seconds:.1} s") }
        };
        let [median, p95, p99] = way.wait.map(seconds);
        vec![way.name.to_owned(), format!("{:.1}", way.functions), median, p95, p99, percent(way.overloaded)]
    });
    let header = ["replicas", "functions", "wait, p50", "p95", "p99", "while overloaded"];
    let title = "== replicas of 8 groups, bursts and changing topics (simulated): wait for the slowest group per token ==";
    format!("{title}\n{}", table::with_header(&header, rows.collect()))
}

/// Writes the table, and its numbers as CSV.
pub(super) fn write(folder: &Path, ways: &[ReplicaTrial]) -> Result<(), CliError> {
    let target = OutputFolder::new(folder.join("replicas"));
    target.store("tables.txt", format!("{}\n", text(ways)).as_bytes())?;
    let header = ["replicas", "functions", "wait_p50_s", "wait_p95_s", "wait_p99_s", "overloaded"];
    let rows = ways.iter().map(|way| {
        let numbers = [way.functions, way.wait[0], way.wait[1], way.wait[2], way.overloaded];
        [vec![way.name.to_owned()], numbers.map(|number| number.to_string()).to_vec()].concat()
    });
    target.csv("replicas.csv", &header, rows.collect())
}
