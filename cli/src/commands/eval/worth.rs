//! What predictions are worth: dollars of recorded requests, planned by each way to predict.

use super::files::Target;
use super::inputs::Inputs;
use crate::exit::CliError;
use crate::output::table;
use crate::plan_report::{dollars, percent};
use remoe_experiments::Worth;
use serde::Serialize;
use std::path::Path;

/// What every prediction is worth on one workload.
#[derive(Debug, Serialize)]
pub(super) struct WorthReport {
    /// The file of the records, or `mixed`.
    workload: String,
    scenario: String,
    rows: Vec<Worth>,
}

/// What every prediction is worth on the recorded workloads.
pub(super) fn worths(inputs: &Inputs) -> Result<Vec<WorthReport>, CliError> {
    let Some((own, recorded)) = inputs.own.as_ref().and_then(|own| Some((own, own.recorded.as_ref()?)))
    else {
        return Ok(Vec::new());
    };
    let mut worths = Vec::new();
    for workload in &recorded.workloads {
        for scenario in inputs.scenarios_of(own, &workload.requests) {
            let rows = scenario.worth(&workload.foresights)?;
            worths.push(WorthReport { workload: workload.name.clone(), scenario: scenario.name, rows });
        }
    }
    Ok(worths)
}

/// A table for each workload.
pub(super) fn text(worths: &[WorthReport]) -> String {
    let of_workload = |of: &WorthReport| {
        let oracle = of.rows.first();
        let over = |cost: f64, best: Option<f64>| match best {
            Some(best) if best > 0.0 => percent(cost / best - 1.0),
            _ => String::new(),
        };
        let rows = of.rows.iter().map(|row| {
            vec![
                row.name.to_owned(),
                dollars(row.free),
                over(row.free, oracle.map(|oracle| oracle.free)),
                row.remote.map_or_else(|| "-".to_owned(), dollars),
                row.remote
                    .map_or_else(String::new, |cost| over(cost, oracle.and_then(|oracle| oracle.remote))),
                row.remote_pairs.map_or_else(String::new, percent),
            ]
        });
        let header = [
            "planned by",
            "1,000 requests",
            "over oracle",
            "remote experts in all layers",
            "over oracle",
            "remote pairs",
        ];
        let title = format!("== what a prediction is worth: {}, {} ==", of.workload, of.scenario);
        format!("{title}\n{}", table::with_header(&header, rows.collect()))
    };
    worths.iter().map(of_workload).collect::<Vec<_>>().join("\n\n")
}

/// Writes the table, and all numbers as CSV.
pub(super) fn write(folder: &Path, worths: &[WorthReport]) -> Result<(), CliError> {
    let target = Target::new(folder.join("prediction"));
    target.store("tables.txt", format!("{}\n", text(worths)).as_bytes())?;
    let header = ["workload", "scenario", "planned_by", "free_dollars", "remote_dollars", "remote_pairs"];
    let shown = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
    let rows = worths.iter().flat_map(|of| {
        of.rows.iter().map(move |row| {
            let [remote, pairs] = [row.remote, row.remote_pairs].map(shown);
            let name = row.name.to_owned();
            vec![of.workload.clone(), of.scenario.clone(), name, row.free.to_string(), remote, pairs]
        })
    });
    target.csv("worth.csv", &header, rows.collect())
}
