//! Worth of predictions: dollars of recorded requests, planned with each method of prediction.

use super::files::OutputFolder;
use super::inputs::Inputs;
use super::workloads::{STAYS, USED_OF_LATE};
use crate::exit::CliError;
use crate::output::table;
use crate::plan_report::percent;
use remoe_experiments::{ForecastCost, RequestPrice};
use remoe_planner::dollars;
use serde::Serialize;
use std::path::Path;

/// Worth of every prediction on one workload.
#[derive(Debug, Serialize)]
pub(super) struct WorthReport {
    /// The file of the records; `mixed`: all in turns; `hourly`: one after the other, an hour each.
    workload: String,
    scenario: String,
    rows: Vec<ForecastCost>,
    /// Cost of requests after a change of topic; empty if the topic does not change.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    turns: Vec<TopicRun>,
}

/// Requests that are shown together, by their number since the topic changed.
const TOGETHER: usize = 6;

/// Some requests of all topics but the first.
#[derive(Debug, Serialize)]
struct TopicRun {
    /// The first and last of them, counted from the change of topic.
    requests: [usize; 2],
    /// Cost of the requests, by the prediction that planned them.
    planned_by: Vec<PredictionCost>,
}

/// Cost of some requests under one prediction.
#[derive(Debug, Serialize)]
struct PredictionCost {
    name: &'static str,
    /// Dollars of 1,000 of them, where some experts of every layer are remote.
    dollars: f64,
    remote_pairs: f64,
}

/// How the topics that come after the first are followed: the oracle, the placement that follows, and one that stays.
fn turns(topics: &[usize], rows: &[ForecastCost]) -> Vec<TopicRun> {
    let longest = topics.iter().skip(1).copied().max().unwrap_or(0);
    let of_turn = |first: usize| {
        let after = |worth: &ForecastCost| {
            let (mut begin, mut some) = (0, Vec::new());
            for (at, length) in topics.iter().enumerate() {
                let topic = worth.each.get(begin..begin + length).unwrap_or_default();
                some.extend(topic.iter().skip(first).take(TOGETHER).filter(|_| at > 0));
                begin += length;
            }
            let mean = |of: fn(&RequestPrice) -> f64| some.iter().map(of).sum::<f64>() / some.len() as f64;
            let (dollars, remote_pairs) =
                (1000.0 * mean(|price| price.dollars), mean(|price| price.remote_share));
            (!some.is_empty()).then_some(PredictionCost { name: worth.name, dollars, remote_pairs })
        };
        let shown = rows.iter().filter(|row| ["oracle", USED_OF_LATE, STAYS].contains(&row.name));
        let requests = [first + 1, (first + TOGETHER).min(longest)];
        TopicRun { requests, planned_by: shown.filter_map(after).collect() }
    };
    (0..longest).step_by(TOGETHER).map(of_turn).filter(|turn| !turn.planned_by.is_empty()).collect()
}

/// Computes the worth of every prediction on the recorded workloads.
pub(super) fn worths(inputs: &Inputs) -> Result<Vec<WorthReport>, CliError> {
    let Some((own, recorded)) = inputs.own.as_ref().and_then(|own| Some((own, own.recorded.as_ref()?)))
    else {
        return Ok(Vec::new());
    };
    let mut worths = Vec::new();
    for workload in &recorded.workloads {
        for scenario in inputs.scenarios_of(own, &workload.requests) {
            let rows = scenario.forecast_costs(&workload.foresights)?;
            let turns = turns(&workload.topics, &rows);
            worths.push(WorthReport {
                workload: workload.name.clone(),
                scenario: scenario.name,
                rows,
                turns,
            });
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
                dollars(row.auto_dollars),
                over(row.auto_dollars, oracle.map(|oracle| oracle.auto_dollars)),
                row.always_remote_dollars.map_or_else(|| "-".to_owned(), dollars),
                row.always_remote_dollars.map_or_else(String::new, |cost| {
                    over(cost, oracle.and_then(|oracle| oracle.always_remote_dollars))
                }),
                row.remote_share.map_or_else(String::new, percent),
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
        let title = format!("== value of predictions: {}, {} ==", of.workload, of.scenario);
        let worth = format!("{title}\n{}", table::with_header(&header, rows.collect()));
        match of.turns.is_empty() {
            true => worth,
            false => format!("{worth}\n\n{}", turns_text(of)),
        }
    };
    worths.iter().map(of_workload).collect::<Vec<_>>().join("\n\n")
}

/// A table of what requests cost after a change of topic.
fn turns_text(of: &WorthReport) -> String {
    let rows = of.turns.iter().flat_map(|turn| {
        let [first, last] = turn.requests;
        turn.planned_by.iter().map(move |after| {
            let name = after.name.to_owned();
            vec![format!("{first}-{last}"), name, dollars(after.dollars), percent(after.remote_pairs)]
        })
    });
    let header = ["requests", "planned by", "1,000 requests, remote experts in all layers", "remote pairs"];
    let title = format!("== requests since the topic changed: {}, {} ==", of.workload, of.scenario);
    format!("{title}\n{}", table::with_header(&header, rows.collect()))
}

/// Writes the table, and all numbers as CSV.
pub(super) fn write(folder: &Path, worths: &[WorthReport]) -> Result<(), CliError> {
    let target = OutputFolder::new(folder.join("prediction"));
    target.store("tables.txt", format!("{}\n", text(worths)).as_bytes())?;
    let header = ["workload", "scenario", "planned_by", "free_dollars", "remote_dollars", "remote_pairs"];
    let shown = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
    let rows = worths.iter().flat_map(|of| {
        of.rows.iter().map(move |row| {
            let [remote, pairs] = [row.always_remote_dollars, row.remote_share].map(shown);
            let name = row.name.to_owned();
            vec![of.workload.clone(), of.scenario.clone(), name, row.auto_dollars.to_string(), remote, pairs]
        })
    });
    target.csv("worth.csv", &header, rows.collect())?;
    let header = ["workload", "scenario", "first", "last", "planned_by", "remote_dollars", "remote_pairs"];
    let rows = worths.iter().flat_map(|of| {
        of.turns.iter().flat_map(move |turn| {
            turn.planned_by.iter().map(move |after| {
                let [first, last] = turn.requests.map(|number| number.to_string());
                let numbers = [after.dollars, after.remote_pairs].map(|number| number.to_string());
                let [cost, pairs] = numbers;
                let name = after.name.to_owned();
                vec![of.workload.clone(), of.scenario.clone(), first, last, name, cost, pairs]
            })
        })
    });
    target.csv("turns.csv", &header, rows.collect())
}
