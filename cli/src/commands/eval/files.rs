//! The results as files: the tables, and every figure as CSV and SVG.

use super::report::{Report, ScenarioReport};
use crate::exit::CliError;
use crate::output::plot::{Axis, Bar, Bars, Lines, Segment, Series};
use remoe_experiments::{CORES, ColdStart, ColdStartStage, ExpertTime, Strategy, StrategyCost};
use std::fs;
use std::path::{Path, PathBuf};

/// Costs are shown for so many requests or steps: one costs too little for numbers that people read.
const THOUSAND: f64 = 1e3;

/// Writes everything into `folder`, a folder for each scenario; what was there before is replaced.
pub(super) fn write(folder: &Path, report: &Report, tables: &str) -> Result<(), CliError> {
    let target = OutputFolder(folder.to_owned());
    target.store("tables.txt", format!("{tables}\n").as_bytes())?;
    target.store("report.json", &serde_json::to_vec(report).map_err(std::io::Error::from)?)?;
    target.store("README.md", gallery(report).as_bytes())?;
    for scenario in &report.scenarios {
        let target = OutputFolder(folder.join(&scenario.name));
        expert_times(&target, scenario)?;
        phases(&target, scenario)?;
        costs(&target, scenario)?;
        ratios(&target, scenario)?;
        cold_starts(&target, scenario)?;
    }
    for of in &report.sensitivities {
        let rows = of.rows.iter().flat_map(|row| {
            row.costs.iter().map(|one| {
                vec![row.change.clone(), row.scaling.name().to_owned(), name(one), one.cost.to_string()]
            })
        });
        let header = ["change", "cpus", "strategy", "expected_cost_dollars"];
        target.csv(&format!("sensitivity-{}.csv", of.model), &header, rows.collect())?;
    }
    Ok(())
}

/// A page that shows every figure.
fn gallery(report: &Report) -> String {
    let mut page = "# Every figure of this run\n\nThe numbers are in [tables.txt](tables.txt), \
                    [report.json](report.json) and a CSV file beside each figure.\n"
        .to_owned();
    for scenario in &report.scenarios {
        page += &format!("\n## {}\n\n{}\n\n", scenario.name, scenario.meaning);
        for (figure, shows) in FIGURES {
            page += &format!("![{shows}]({}/{figure}.svg)\n", scenario.name);
        }
    }
    page
}

/// Figures of a scenario by their files' names, and what they show.
const FIGURES: [(&str, &str); 6] = [
    ("figure-4-decode", "Figure 4: experts over the remote ratio, decode"),
    ("figure-4-prefill", "Figure 4: experts over the remote ratio, prefill"),
    ("figure-5", "Figure 5: prefill against decode"),
    ("figure-9", "Figure 9: cost of requests"),
    ("figure-10", "Figure 10: cost over the length of answers"),
    ("figure-11", "Figure 11: cold starts"),
];

/// A folder that files go to.
pub(super) struct OutputFolder(PathBuf);

impl OutputFolder {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self(folder)
    }

    pub(super) fn store(&self, name: &str, bytes: &[u8]) -> Result<(), CliError> {
        let path = self.0.join(name);
        fs::create_dir_all(&self.0).and_then(|()| fs::write(&path, bytes)).map_err(|error| CliError {
            path: Some(path.clone()),
            ..CliError::runtime(format!("cannot write {}: {error}", path.display()))
        })
    }

    pub(super) fn csv(&self, name: &str, header: &[&str], rows: Vec<Vec<String>>) -> Result<(), CliError> {
        let mut writer = csv::Writer::from_writer(Vec::new());
        let failed = |error: String| CliError::runtime(format!("cannot write {name}: {error}"));
        writer.write_record(header).map_err(|error| failed(error.to_string()))?;
        for row in rows {
            writer.write_record(&row).map_err(|error| failed(error.to_string()))?;
        }
        let bytes = writer.into_inner().map_err(|error| failed(error.to_string()))?;
        self.store(name, &bytes)
    }
}

fn name(of: &StrategyCost) -> String {
    of.strategy.name().to_owned()
}

fn expert_times(target: &OutputFolder, scenario: &ScenarioReport) -> Result<(), CliError> {
    let rows = scenario.figure_4.iter().map(|time| {
        [f64::from(time.cores), time.ratio, time.prefill_seconds, time.decode_seconds]
            .map(|value| value.to_string())
            .to_vec()
    });
    target.csv("figure-4.csv", &["vcpus", "ratio", "prefill_seconds", "decode_seconds"], rows.collect())?;
    let names: Vec<(u32, String)> = CORES.map(|cores| (cores, format!("{cores} vCPUs"))).to_vec();
    for (phase, of) in [
        ("decode", (|time| time.decode_seconds) as fn(&ExpertTime) -> f64),
        ("prefill", |time| time.prefill_seconds),
    ] {
        let series = names.iter().map(|(cores, name)| {
            let times = scenario.figure_4.iter().filter(|time| time.cores == *cores);
            let points = times.map(|time| (time.ratio, of(time))).collect();
            Series { name: name.clone(), meaning: "of the main function", points }
        });
        let title = format!("{}: experts over the remote ratio, {phase}", scenario.name);
        let unit = if phase == "decode" { "seconds of one decode step" } else { "seconds of a prefill" };
        let lines = Lines {
            title: &title,
            subtitle: &scenario.meaning,
            x: Axis { label: "share of each layer's experts that are remote", logarithmic: false },
            y: Axis { label: unit, logarithmic: false },
            series: series.collect(),
        };
        target.store(&format!("figure-4-{phase}.svg"), lines.svg().as_bytes())?;
    }
    Ok(())
}

fn phases(target: &OutputFolder, scenario: &ScenarioReport) -> Result<(), CliError> {
    let rows = scenario.figure_5.iter().map(|phases| {
        [phases.tokens, phases.prefill_seconds, phases.decode_seconds].map(|value| value.to_string()).to_vec()
    });
    target.csv("figure-5.csv", &["tokens", "prefill_seconds", "decode_seconds"], rows.collect())?;
    let points = |of: fn(&remoe_experiments::Phases) -> f64| {
        scenario.figure_5.iter().map(|phases| (phases.tokens, of(phases))).collect()
    };
    let lines = Lines {
        title: &format!("{}: prefill against decode under MIX", scenario.name),
        subtitle: &scenario.meaning,
        x: Axis { label: "tokens of the prompt, and decode steps", logarithmic: true },
        y: Axis { label: "seconds", logarithmic: true },
        series: vec![
            Series {
                name: "prefill".to_owned(),
                meaning: "of so many tokens",
                points: points(|phases| phases.prefill_seconds),
            },
            Series {
                name: "decode".to_owned(),
                meaning: "of so many steps",
                points: points(|phases| phases.decode_seconds),
            },
        ],
    };
    target.store("figure-5.svg", lines.svg().as_bytes())
}

fn costs(target: &OutputFolder, scenario: &ScenarioReport) -> Result<(), CliError> {
    let strategies = &scenario.figure_9.strategies;
    let rows = strategies.iter().flat_map(|one| {
        one.costs.iter().enumerate().map(|(request, cost)| {
            vec![request.to_string(), one.strategy.name().to_owned(), cost.to_string()]
        })
    });
    target.csv("figure-9.csv", &["request", "strategy", "cost_dollars"], rows.collect())?;
    let bars = strategies.iter().map(|one| Bar {
        name: format!("{}: {}", one.strategy.name(), one.strategy.meaning()),
        segments: vec![Segment { series: 0, from: 0.0, to: one.mean_cost * THOUSAND }],
    });
    let bars = Bars {
        title: &format!("{}: cost of requests with their true routing", scenario.name),
        subtitle: &scenario.meaning,
        label: "dollars for 1,000 requests",
        series: Vec::new(),
        bars: bars.collect(),
    };
    target.store("figure-9.svg", bars.svg().as_bytes())
}

fn ratios(target: &OutputFolder, scenario: &ScenarioReport) -> Result<(), CliError> {
    let rows = scenario.figure_10.iter().flat_map(|ratio| {
        ratio.costs.iter().map(|one| {
            vec![
                ratio.input_tokens.to_string(),
                ratio.decode_steps.to_string(),
                name(one),
                one.cost.to_string(),
            ]
        })
    });
    let header = ["input_tokens", "decode_steps", "strategy", "expected_cost_dollars"];
    target.csv("figure-10.csv", &header, rows.collect())?;
    let series = Strategy::OF_THE_PAPER.into_iter().map(|strategy| {
        let cost =
            |costs: &[StrategyCost]| costs.iter().find(|one| one.strategy == strategy).map(|one| one.cost);
        let points = scenario.figure_10.iter().filter_map(|ratio| {
            Some((ratio.decode_steps, cost(&ratio.costs)? * THOUSAND / ratio.decode_steps))
        });
        Series { name: strategy.name().to_owned(), meaning: strategy.meaning(), points: points.collect() }
    });
    let prompt = scenario.figure_10.first().map_or(0.0, |ratio| ratio.input_tokens);
    let steps = format!("decode steps after a prompt of {prompt:.0} tokens");
    let lines = Lines {
        title: &format!("{}: cost over the length of answers", scenario.name),
        subtitle: &scenario.meaning,
        x: Axis { label: &steps, logarithmic: true },
        y: Axis { label: "dollars for 1,000 decode steps", logarithmic: true },
        series: series.filter(|series| !series.points.is_empty()).collect(),
    };
    target.store("figure-10.svg", lines.svg().as_bytes())
}

fn cold_starts(target: &OutputFolder, scenario: &ScenarioReport) -> Result<(), CliError> {
    let rows = scenario.figure_11.iter().flat_map(|start| {
        start.lanes.iter().flat_map(|lane| {
            lane.spans.iter().map(|span| {
                let [strategy, who, part] = [start.strategy.name(), lane.who.as_str(), span.part.name()];
                let times = [span.from, span.to].map(|value| value.to_string());
                [strategy, who, part].map(str::to_owned).into_iter().chain(times).collect()
            })
        })
    });
    let header = ["strategy", "function", "part", "from_seconds", "to_seconds"];
    target.csv("figure-11.csv", &header, rows.collect())?;
    let bars = Bars {
        title: &format!("{}: cold start", scenario.name),
        subtitle: &scenario.meaning,
        label: "seconds since the request arrived",
        series: ColdStartStage::ALL.map(ColdStartStage::name).to_vec(),
        bars: scenario.figure_11.iter().flat_map(lanes).collect(),
    };
    target.store("figure-11.svg", bars.svg().as_bytes())
}

fn lanes(start: &ColdStart) -> impl Iterator<Item = Bar> {
    start.lanes.iter().map(|lane| {
        let segments = lane.spans.iter().map(|span| Segment {
            series: ColdStartStage::ALL.iter().position(|part| *part == span.part).unwrap_or(0),
            from: span.from,
            to: span.to,
        });
        Bar { name: format!("{}: {}", start.strategy.name(), lane.who), segments: segments.collect() }
    })
}
