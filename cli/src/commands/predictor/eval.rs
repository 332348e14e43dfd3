//! `remoe predictor eval`: how well, how fast, how large.

use super::args::EvalArgs;
use super::methods::{Contestant, Field};
use super::plot;
use super::source::Model;
use crate::exit::CliError;
use crate::output::{folders, json, table};
use crate::planning::rows;
use remoe_launcher::placement::least_used;
use remoe_predictor::correlation::{self, Pair};
use remoe_predictor::record::ActivationRecord;
use remoe_predictor::{History, Shares, SimilarPrompts, divergence, quantile};
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

/// Random past prompts that each test prompt is compared with for the correlation.
const PAIRS_EACH: usize = 200;

#[derive(Serialize)]
struct Evaluation {
    methods: Vec<Report>,
    /// Pearson's, of the similarity of prompts and the similarity of their activations.
    correlation: f64,
    correlation_spearman: f64,
    /// What `remoe predictor build` would answer with, chosen on held-out prompts of the training file.
    default: &'static str,
    train_prompts: usize,
    test_prompts: usize,
    /// The same for each test file.
    tests: Vec<OfFile>,
}

#[derive(Serialize)]
struct Report {
    name: &'static str,
    js_mean: f64,
    js_per_layer: Vec<f64>,
    /// Share of a prompt's work that falls on the half of each layer's experts that are expected to do least:
    /// what `--remote-ratio 0.5` sends away. Where all are expected to do alike, these are the last ids.
    remote_at_half: f64,
    build_seconds: f64,
    search_us_p50: f64,
    search_us_p99: f64,
    bytes: u64,
    /// Share of the truly most similar prompts that it finds; null where it looks for none.
    recall: Option<f64>,
}

#[derive(Serialize)]
struct OfFile {
    path: PathBuf,
    prompts: usize,
    methods: Vec<OfFileMethod>,
    correlation: f64,
}

#[derive(Serialize)]
struct OfFileMethod {
    name: &'static str,
    js_mean: f64,
}

/// Fits everyone, predicts, and prints how it went.
pub(crate) fn run(args: &EvalArgs, as_json: bool) -> Result<(), CliError> {
    let model = Model::open(&args.source)?;
    let (header, train) = model.records("--train", &args.train)?;
    let tests = args.test.iter().map(|path| Ok(model.records("--test", path)?.1));
    let tests = tests.collect::<Result<Vec<Vec<ActivationRecord>>, CliError>>()?;
    if tests.iter().all(Vec::is_empty) {
        return Err(CliError::arguments("--test", "the test files hold no whole record"));
    }
    args.plots.iter().try_for_each(|folder| folders::make("--plots", folder))?;
    let field = Field { model: &model, header: &header, records: &train, options: args.tree.options() };
    let (trained, seconds) = field.trained()?;
    let contestants = field.contestants(&trained, seconds)?;
    let history = trained.sps().history();
    let truths = truths(history, &tests)?;
    let nearest = true_neighbours(&contestants, &tests)?;
    let runs = contestants.iter().map(|one| Run::of(one, &tests, &truths, &nearest));
    let runs = runs.collect::<Result<Vec<_>, CliError>>()?;
    let seed = args.tree.options().tree.seed;
    let pairs = tests
        .iter()
        .map(|tests| correlation::pairs(&model.embedding, history, tests, PAIRS_EACH, seed))
        .collect::<Result<Vec<_>, _>>()?;
    let all: Vec<Pair> = pairs.concat();
    let of_files = args.test.iter().zip(&pairs).enumerate().map(|(index, (path, pairs))| OfFile {
        path: path.clone(),
        prompts: tests.get(index).map_or(0, Vec::len),
        methods: runs
            .iter()
            .map(|run| OfFileMethod { name: run.name, js_mean: run.mean_of(index) })
            .collect(),
        correlation: correlation::pearson(pairs),
    });
    let evaluation = Evaluation {
        methods: runs.iter().map(Run::report).collect(),
        correlation: correlation::pearson(&all),
        correlation_spearman: correlation::spearman(&all),
        default: trained.tuning().default.name(),
        train_prompts: train.len(),
        test_prompts: tests.iter().map(Vec::len).sum(),
        tests: of_files.collect(),
    };
    if let Some(folder) = &args.plots {
        let bars: Vec<(&str, f64)> = evaluation.methods.iter().map(|one| (one.name, one.js_mean)).collect();
        plot::write(folder, &bars, &all, evaluation.correlation)?;
    }
    if as_json {
        json::print(&evaluation)?;
    } else {
        writeln!(anstream::stdout().lock(), "{}", evaluation.for_people())?;
    }
    Ok(())
}

fn truths(history: &History, tests: &[Vec<ActivationRecord>]) -> Result<Vec<Vec<Shares>>, CliError> {
    let of_file = |tests: &Vec<ActivationRecord>| {
        tests.iter().map(|record| Ok(history.shares_of(record)?)).collect::<Result<Vec<_>, CliError>>()
    };
    tests.iter().map(of_file).collect()
}

/// What brute force finds for each prompt, file after file.
fn true_neighbours<'a>(
    contestants: &'a [Contestant<'_>],
    tests: &[Vec<ActivationRecord>],
) -> Result<Vec<Vec<&'a [u32]>>, CliError> {
    let exhaustive = contestants.iter().find(|one| one.predictor.name() == "bf");
    let Some(exhaustive) = exhaustive.and_then(|one| one.similar.as_ref()) else { return Ok(Vec::new()) };
    tests.iter().flatten().map(|record| neighbouring_prompts(exhaustive, &record.prompt)).collect()
}

/// The past prompts that a prediction leans on; their slots differ from index to index.
fn neighbouring_prompts<'a>(similar: &'a SimilarPrompts, prompt: &[u32]) -> Result<Vec<&'a [u32]>, CliError> {
    let found = similar.neighbours(prompt)?;
    Ok(found.iter().map(|neighbour| similar.history().prompt(neighbour.slot)).collect())
}

/// One method on all test prompts.
struct Run {
    name: &'static str,
    /// Divergence of each layer, per file and prompt.
    divergences: Vec<Vec<Vec<f64>>>,
    /// True shares of each layer's experts that would be remote, per prompt and layer.
    remote: Vec<f64>,
    microseconds: Vec<f64>,
    build_seconds: f64,
    bytes: u64,
    recall: Option<f64>,
}

impl Run {
    fn of(
        contestant: &Contestant<'_>,
        tests: &[Vec<ActivationRecord>],
        truths: &[Vec<Shares>],
        nearest: &[Vec<&[u32]>],
    ) -> Result<Self, CliError> {
        let predictor = &contestant.predictor;
        // Once unmeasured, so that nobody pays for cold memory.
        tests.iter().flatten().try_for_each(|record| predictor.predict(&record.prompt).map(drop))?;
        let (mut divergences, mut remote, mut microseconds) = (Vec::new(), Vec::new(), Vec::new());
        for (tests, truths) in tests.iter().zip(truths) {
            let mut of_file = Vec::with_capacity(tests.len());
            for (record, truth) in tests.iter().zip(truths) {
                let started = Instant::now();
                let prediction = predictor.predict(&record.prompt)?;
                microseconds.push(started.elapsed().as_secs_f64() * 1e6);
                of_file.push(divergence::per_layer(&prediction, truth));
                remote.extend(rows(&prediction).iter().zip(truth.rows()).map(|(expected, truth)| {
                    let away = least_used(expected, expected.len().div_ceil(2));
                    away.iter().map(|id| f64::from(truth[*id as usize])).sum::<f64>()
                }));
            }
            divergences.push(of_file);
        }
        let recall = contestant.similar.as_ref().filter(|one| one.embedding_is_plain()).map(|similar| {
            let (mut found, mut wanted) = (0, 0);
            for (record, nearest) in tests.iter().flatten().zip(nearest) {
                let own = neighbouring_prompts(similar, &record.prompt)?;
                found += nearest.iter().filter(|one| own.contains(one)).count();
                wanted += nearest.len();
            }
            Ok::<_, CliError>(found as f64 / wanted.max(1) as f64)
        });
        Ok(Self {
            name: predictor.name(),
            divergences,
            remote,
            microseconds,
            build_seconds: contestant.build_seconds,
            bytes: predictor.bytes(),
            recall: recall.transpose()?,
        })
    }

    fn mean_of(&self, file: usize) -> f64 {
        self.divergences.get(file).map_or(0.0, |prompts| mean(prompts.iter().flatten()))
    }

    fn report(&self) -> Report {
        let prompts: Vec<&Vec<f64>> = self.divergences.iter().flatten().collect();
        let layers = prompts.first().map_or(0, |layers| layers.len());
        let of_layer = |layer| mean(prompts.iter().filter_map(|layers: &&Vec<f64>| layers.get(layer)));
        let mut microseconds = self.microseconds.clone();
        Report {
            name: self.name,
            js_mean: mean(prompts.iter().copied().flatten()),
            js_per_layer: (0..layers).map(of_layer).collect(),
            remote_at_half: mean(self.remote.iter()),
            build_seconds: self.build_seconds,
            search_us_p50: quantile(&mut microseconds, 0.5),
            search_us_p99: quantile(&mut microseconds, 0.99),
            bytes: self.bytes,
            recall: self.recall,
        }
    }
}

fn mean<'a>(values: impl Iterator<Item = &'a f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0_usize), |(sum, count), value| (sum + value, count + 1));
    sum / count.max(1) as f64
}

impl Evaluation {
    fn for_people(&self) -> String {
        let best_force = self.methods.iter().find(|one| one.name == "bf").map_or(f64::NAN, |one| one.js_mean);
        let rows = self.methods.iter().map(|one| {
            let mut row = vec![
                one.name.to_owned(),
                format!("{:.5}", one.js_mean),
                format!("{:+.1} %", 100.0 * (one.js_mean / best_force - 1.0)),
                format!("{:.3}", one.remote_at_half),
                format!("{:.3}", one.build_seconds),
                format!("{:.1}", one.search_us_p50),
                format!("{:.1}", one.search_us_p99),
                table::bytes(one.bytes),
                one.recall.map_or(String::new(), |recall| format!("{recall:.2}")),
            ];
            if self.tests.len() > 1 {
                let of_method = |file: &OfFile| {
                    file.methods.iter().find(|other| other.name == one.name).map(|other| other.js_mean)
                };
                row.extend(
                    self.tests
                        .iter()
                        .map(|file| of_method(file).map_or(String::new(), |js| format!("{js:.5}"))),
                );
            }
            row
        });
        let mut header = vec![
            "method",
            "JS mean",
            "to bf",
            "remote at 0.5",
            "build s",
            "p50 us",
            "p99 us",
            "memory",
            "recall",
        ];
        let names: Vec<String> = self
            .tests
            .iter()
            .map(|file| {
                file.path.file_stem().map_or(String::new(), |name| name.to_string_lossy().into_owned())
            })
            .collect();
        if self.tests.len() > 1 {
            header.extend(names.iter().map(String::as_str));
        }
        let methods = table::with_header(&header, rows.collect());
        let each: Vec<String> = names
            .iter()
            .zip(&self.tests)
            .map(|(name, file)| format!("{name} {:.2}", file.correlation))
            .collect();
        format!(
            "{methods}\n\n{} training prompts, {} test prompts; `build` would answer with {}.\nSimilarity of prompts \
             against similarity of activations: correlation {:.3} (of ranks {:.3}); {}.",
            self.train_prompts,
            self.test_prompts,
            self.default,
            self.correlation,
            self.correlation_spearman,
            each.join(", ")
        )
    }
}
