//! The map of regimes: who is cheapest for which model at which rate, under which prices and limits.

use super::EvalArgs;
use super::files::OutputFolder;
use super::inputs::Inputs;
use crate::exit::CliError;
use crate::files;
use crate::output::plot::heat_map::{HeatMap, Tile};
use crate::output::progress::bar;
use crate::output::table;
use crate::plan_report::bytes;
use remoe_experiments::ExperimentError;
use remoe_experiments::map::{Cell, ListRegime, PER_DAY, Regime, STRATEGIES, Subject, UnitRegime};
use remoe_hardware::NodeList;
use remoe_planner::ServingStrategy;
use serde::Serialize;
use std::path::Path;

/// Folder of the map beside the figures.
const FOLDER: &str = "map";

/// The map, and what it rests on.
#[derive(Debug, Serialize)]
pub(super) struct MapReport {
    /// Where prices by the core, the GB and the GPU come from.
    #[serde(skip_serializing_if = "Option::is_none")]
    prices: Option<String>,
    /// Where prices of nodes come from.
    #[serde(skip_serializing_if = "Option::is_none")]
    nodes: Option<String>,
    models: Vec<Subject>,
    regimes: Vec<Regime>,
}

impl MapReport {
    /// Asks the planner for every cell at the prices that were given.
    pub(super) fn of(args: &EvalArgs, inputs: &Inputs) -> Result<Self, CliError> {
        let wrong =
            |flag: &str, path: &Path, error: &dyn std::fmt::Display| files::file_error(flag, path, error);
        let models = Subject::all();
        let mut regimes = Vec::new();
        let failed = |error: ExperimentError| CliError::runtime(error.to_string());
        let mut prices = None;
        if let Some((path, stated)) = &inputs.prices {
            let pricing = stated.separate_pricing().map_err(|error| wrong("--pricing", path, &error))?;
            let all = UnitRegime::all(pricing);
            let bar = bar(all.len(), "maps");
            for regime in all {
                bar.set_message(regime.name);
                regimes.push(regime.regime(&models).map_err(failed)?);
                bar.inc(1);
            }
            bar.finish_and_clear();
            prices = Some(named(path, [&stated.source, &stated.date]));
        }
        let mut nodes = None;
        if let Some(path) = &args.nodes {
            let list = NodeList::from_yaml(&files::read("--nodes", path)?)
                .map_err(|error| wrong("--nodes", path, &error))?;
            let all = ListRegime::all(&list);
            let bar = bar(all.len(), "maps");
            for regime in all {
                bar.set_message(regime.name);
                regimes.push(regime.regime(&models).map_err(failed)?);
                bar.inc(1);
            }
            bar.finish_and_clear();
            nodes = Some(named(path, [&list.source, &list.date]));
        }
        Ok(Self { prices, nodes, models, regimes })
    }

    /// The tables.
    pub(super) fn text(&self) -> String {
        let mut pairs = Vec::new();
        pairs.extend(self.prices.clone().map(|prices| ("unit prices from", prices)));
        pairs.extend(self.nodes.clone().map(|nodes| ("nodes from", nodes)));
        let names =
            self.models.iter().map(|model| format!("{} {}", model.name, bytes(model.total_bytes as f64)));
        pairs.push(("models", names.collect::<Vec<_>>().join(", ")));
        pairs.push((
            "a cell",
            "cheapest placement in $/hour, and the relative cost of remote experts; only: nothing else meets the \
             limits; none: remote experts do not"
                .to_owned(),
        ));
        let mut parts = vec![format!("Map of regimes\n{}", table::of_pairs(&pairs))];
        parts.extend(self.regimes.iter().map(regime_table));
        parts.join("\n\n")
    }

    /// Writes the tables, all numbers and every map into a folder of their own.
    pub(super) fn write(&self, folder: &Path) -> Result<(), CliError> {
        let target = OutputFolder::new(folder.join(FOLDER));
        target.store("tables.txt", format!("{}\n", self.text()).as_bytes())?;
        target.store("map.json", &serde_json::to_vec(self).map_err(std::io::Error::from)?)?;
        target.store("README.md", self.gallery().as_bytes())?;
        for regime in &self.regimes {
            let header = [
                "model",
                "requests_per_day",
                "way",
                "dollars_per_hour",
                "cheapest",
                "sleeps",
                "ttft_seconds",
                "tpot_seconds",
                "on",
                "why_not",
            ];
            target.csv(&format!("{}.csv", regime.name), &header, rows(regime))?;
            target.store(&format!("{}.svg", regime.name), picture(regime).svg().as_bytes())?;
        }
        Ok(())
    }

    fn gallery(&self) -> String {
        let mut page = "# The map of regimes\n\nThe cheapest placement over model sizes and request rates. The numbers \
                        are in [tables.txt](tables.txt), [map.json](map.json) and a CSV file beside each map; their \
                        assumptions are on the page of the evaluation.\n"
            .to_owned();
        for regime in &self.regimes {
            page += &format!(
                "\n## {}\n\nLimits: {}. {}\n\n![{}]({}.svg)\n",
                regime.title,
                regime.limits,
                summary(regime),
                regime.title,
                regime.name
            );
        }
        page
    }
}

fn named(path: &Path, stated: [&Option<String>; 2]) -> String {
    let stated = stated.into_iter().flatten().cloned();
    std::iter::once(path.display().to_string()).chain(stated).collect::<Vec<_>>().join(", ")
}

/// Where remote experts pay, in a sentence or two.
fn summary(regime: &Regime) -> String {
    let paying: Vec<&Cell> = regime.cells.iter().filter(|cell| cell.pays()).collect();
    let only = paying.iter().filter(|cell| cell.saving.is_none()).count();
    let mut text = match (paying.len(), only) {
        (0, _) => "Remote experts are the cheapest in no cell".to_owned(),
        (count, 0) => format!("Remote experts are the cheapest in {count} of {} cells", regime.cells.len()),
        (count, only) => format!(
            "Remote experts are the cheapest in {count} of {} cells, in {only} of them because nothing else meets the \
             limits",
            regime.cells.len()
        ),
    };
    if let Some(cell) = regime.largest_saving()
        && let Some(saving) = cell.saving
    {
        let how = if saving > 0.0 { "largest saving" } else { "smallest extra cost" };
        text +=
            &format!("; {how}: {:.0} % ({}, {})", 100.0 * saving.abs(), cell.model, frequency(cell.per_day));
    }
    text + "."
}

fn frequency(per_day: f64) -> String {
    match per_day {
        1.0 => "1 request per day".to_owned(),
        count => format!("{count} requests per day"),
    }
}

/// A way in one word.
fn word(way: ServingStrategy) -> &'static str {
    match way {
        ServingStrategy::Sliced => "sliced",
        ServingStrategy::Layers => "layers",
        ServingStrategy::Mix => "mix",
        ServingStrategy::Cpu => "cpu",
        ServingStrategy::Gpu => "gpu",
        ServingStrategy::Fetch => "fetch",
    }
}

/// Formats the cost of remote experts against the best way without them.
fn against(cell: &Cell) -> String {
    match (cell.best, cell.saving) {
        (None, _) => String::new(),
        (_, Some(saving)) => format!("{:+.0} %", -100.0 * saving),
        (_, None) if cell.pays() => "only".to_owned(),
        _ => "none".to_owned(),
    }
}

fn regime_table(regime: &Regime) -> String {
    let columns: Vec<String> = PER_DAY.iter().map(|per_day| per_day.to_string()).collect();
    let header: Vec<&str> =
        std::iter::once("requests per day").chain(columns.iter().map(String::as_str)).collect();
    let rows = regime.cells.chunks(PER_DAY.len()).map(|cells| {
        let name = cells.first().map_or_else(String::new, |cell| cell.model.clone());
        let shown = cells.iter().map(|cell| match cell.best {
            None => "nothing".to_owned(),
            Some(best) => {
                let dollars = cell.offer(best).and_then(|offer| offer.dollars_per_hour).unwrap_or(0.0);
                format!("{} {dollars:.3}, {}", word(best), against(cell))
            }
        });
        std::iter::once(name).chain(shown).collect()
    });
    let pairs = table::of_pairs(&[("limits", regime.limits.clone()), ("result", summary(regime))]);
    format!("== {} ==\n{pairs}\n{}", regime.title, table::with_header(&header, rows.collect()))
}

fn rows(regime: &Regime) -> Vec<Vec<String>> {
    let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
    let rows = regime.cells.iter().flat_map(|cell| {
        cell.offers.iter().map(move |offer| {
            vec![
                cell.model.clone(),
                cell.per_day.to_string(),
                word(offer.way).to_owned(),
                number(offer.dollars_per_hour),
                (cell.best == Some(offer.way)).to_string(),
                offer.sleeps.to_string(),
                number(offer.ttft_seconds),
                number(offer.tpot_seconds),
                offer.on.clone(),
                offer.why.clone(),
            ]
        })
    });
    rows.collect()
}

fn picture(regime: &Regime) -> HeatMap<'_> {
    let tile = |cell: &Cell| Tile {
        series: cell.best.and_then(|best| STRATEGIES.iter().position(|way| *way == best)),
        lines: match cell.best {
            Some(best) => [word(best).to_owned(), against(cell)],
            None => ["nothing".to_owned(), "meets the limits".to_owned()],
        },
        framed: cell.pays(),
    };
    HeatMap {
        title: &regime.title,
        subtitle: "the cheapest placement; below it the relative cost of remote experts",
        x: "requests per day",
        y: "model",
        columns: PER_DAY.iter().map(|per_day| per_day.to_string()).collect(),
        rows: regime
            .cells
            .chunks(PER_DAY.len())
            .filter_map(|cells| Some(cells.first()?.model.clone()))
            .collect(),
        series: STRATEGIES.map(meaning).to_vec(),
        tiles: regime.cells.iter().map(tile).collect(),
    }
}

fn meaning(way: ServingStrategy) -> &'static str {
    match way {
        ServingStrategy::Sliced => "sliced: remote experts in groups",
        ServingStrategy::Layers => "layers: remote experts by layer",
        ServingStrategy::Mix => "mix: experts on the main function's CPUs",
        ServingStrategy::Cpu => "cpu: everything on CPUs",
        ServingStrategy::Gpu => "gpu: everything on GPUs",
        ServingStrategy::Fetch => "fetch: experts fetched to GPUs on use",
    }
}
