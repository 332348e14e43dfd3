//! `remoe predictor eval`: how well, how fast, how large.

use super::args::EvalArgs;
use super::plot;
use crate::exit::CliError;
use crate::output::progress::{bar, print_warning};
use crate::output::{folders, json, table};
use crate::predictors::PredictorModel;
use remoe_predictor::correlation::{self, PromptPair};
use remoe_predictor::record::ActivationRecord;
use remoe_predictor::{
    ByPhase, ComparedMethod, ComparedMethods, History, MethodComparison, Phase, PredictError, SimilarPrompts,
    TrainedPredictor, UsageShares, divergence, quantile,
};
use remoe_rollout::placement::least_used;
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
    /// Method that `remoe predictor build` would answer with, chosen on held-out prompts of the training file.
    default: &'static str,
    /// As `default`, for decode steps.
    decode_default: &'static str,
    /// Share of test requests and layers whose error is within the 95th percentile that the default's error bars
    /// say, of the prefill and of the decode steps; null where errors are not known.
    covered_95: ByPhase<Option<f64>>,
    /// Mean divergence of the decode steps' true shares from their own prefill's: what knowing the prefill
    /// exactly would be worth. Null where no test request decoded.
    prefill_as_decode_js: Option<f64>,
    train_prompts: usize,
    test_prompts: usize,
    /// Results for each test file.
    tests: Vec<OfFile>,
}

#[derive(Serialize)]
struct Report {
    name: &'static str,
    /// Mean error of the prefill, as `prefill.mean_js`.
    js_mean: f64,
    prefill: OfPhase,
    /// Null where no test request decoded.
    decode: Option<OfPhase>,
    build_seconds: f64,
    search_us_p50: f64,
    search_us_p99: f64,
    bytes: u64,
    /// Share of the truly most similar prompts that it finds; null where it looks for none.
    recall: Option<f64>,
}

/// How far a method is off in a phase.
#[derive(Serialize)]
struct OfPhase {
    mean_js: f64,
    js_per_layer: Vec<f64>,
    /// Share of the phase's work that falls on the half of each layer's experts that are expected to do least:
    /// what `--remote-ratio 0.5` sends away. Where all are expected to do alike, these are the last ids.
    remote_at_half: f64,
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
    /// Null where no request of the file decoded.
    decode_js_mean: Option<f64>,
}

/// Fits everyone, predicts, and prints how it went.
pub(crate) fn run(args: &EvalArgs, as_json: bool) -> Result<(), CliError> {
    let model = PredictorModel::open(&args.source)?;
    let (header, train) = model.records("--train", &args.train)?;
    let tests = args.test.iter().map(|path| Ok(model.records("--test", path)?.1));
    let tests = tests.collect::<Result<Vec<Vec<ActivationRecord>>, CliError>>()?;
    if tests.iter().all(Vec::is_empty) {
        return Err(CliError::arguments("--test", "invalid --test: no complete record in these files"));
    }
    args.plots.iter().try_for_each(|folder| folders::make("--plots", folder))?;
    let begun = Instant::now();
    let contest = MethodComparison {
        embedding: &model.embedding,
        header: &header,
        records: &train,
        options: args.tree.options(),
        clock: &|| begun.elapsed().as_secs_f64(),
    };
    let (trained, seconds) = contest.trained()?;
    let ComparedMethods { methods: contestants, excluded: left_out } =
        contest.build_all((&trained, seconds), model.fate()?)?;
    for (name, why) in left_out {
        print_warning(&format!("skipped {name}: {why}"));
    }
    let history = trained.sps().history();
    let truths = ByPhase {
        prefill: truths(history, &tests, Phase::Prefill)?,
        decode: truths(history, &tests, Phase::Decode)?,
    };
    let nearest = true_neighbours(&contestants, &tests)?;
    let bar = bar(contestants.len(), "methods");
    let runs = contestants.iter().map(|one| {
        let run = MethodRun::of(one, &tests, &truths, &nearest);
        bar.inc(1);
        run
    });
    let runs = runs.collect::<Result<Vec<_>, CliError>>()?;
    bar.finish_and_clear();
    let seed = args.tree.options().tree.seed;
    let pairs = tests
        .iter()
        .map(|tests| correlation::pairs(&model.embedding, history, tests, PAIRS_EACH, seed))
        .collect::<Result<Vec<_>, _>>()?;
    let all: Vec<PromptPair> = pairs.concat();
    let of_files = args.test.iter().zip(&pairs).enumerate().map(|(index, (path, pairs))| OfFile {
        path: path.clone(),
        prompts: tests.get(index).map_or(0, Vec::len),
        methods: runs
            .iter()
            .map(|run| OfFileMethod {
                name: run.name,
                js_mean: run.prefill.mean_of(index).unwrap_or_default(),
                decode_js_mean: run.decode.mean_of(index),
            })
            .collect(),
        correlation: correlation::pearson(pairs),
    });
    let evaluation = Evaluation {
        methods: runs.iter().filter_map(MethodRun::report).collect(),
        correlation: correlation::pearson(&all),
        correlation_spearman: correlation::spearman(&all),
        default: trained.tuning(Phase::Prefill).default.name(),
        decode_default: trained.tuning(Phase::Decode).default.name(),
        covered_95: ByPhase {
            prefill: covered(&trained, &tests, &truths.prefill, Phase::Prefill)?,
            decode: covered(&trained, &tests, &truths.decode, Phase::Decode)?,
        },
        prefill_as_decode_js: prefill_as_decode(&truths),
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

/// True shares of a phase, file after file and request after request.
type Truths = Vec<Vec<Option<UsageShares>>>;

fn truths(history: &History, tests: &[Vec<ActivationRecord>], phase: Phase) -> Result<Truths, PredictError> {
    let of_file = |tests: &Vec<ActivationRecord>| {
        tests.iter().map(|record| history.shares_of(record, phase)).collect::<Result<Vec<_>, _>>()
    };
    tests.iter().map(of_file).collect()
}

/// How far the decode steps are from their own prefill.
fn prefill_as_decode(truths: &ByPhase<Truths>) -> Option<f64> {
    let pairs = truths.prefill.iter().flatten().zip(truths.decode.iter().flatten());
    let apart = |(prefill, decode): (&Option<UsageShares>, &Option<UsageShares>)| {
        Some(divergence::mean(prefill.as_ref()?, decode.as_ref()?))
    };
    mean(pairs.filter_map(apart))
}

/// Share of requests and layers whose error is within the 95th percentile that the error bars say.
fn covered(
    trained: &TrainedPredictor,
    tests: &[Vec<ActivationRecord>],
    truths: &Truths,
    phase: Phase,
) -> Result<Option<f64>, PredictError> {
    let mut within = Vec::new();
    for (record, truth) in tests.iter().flatten().zip(truths.iter().flatten()) {
        let prediction = trained.predict_with_errors(&record.prompt, phase)?;
        let (Some(truth), Some(errors)) = (truth, prediction.errors) else { continue };
        let layers = divergence::per_layer(&prediction.shares, truth).into_iter().zip(&errors.js_quantiles);
        within.extend(layers.map(|(error, [_, _, p95])| f64::from(u8::from(error <= *p95))));
    }
    Ok(mean(within.into_iter()))
}

/// Finds the true neighbours of each prompt by brute force, file after file.
fn true_neighbours<'a>(
    contestants: &'a [ComparedMethod<'_>],
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
struct MethodRun {
    name: &'static str,
    prefill: Errors,
    decode: Errors,
    microseconds: Vec<f64>,
    build_seconds: f64,
    bytes: u64,
    recall: Option<f64>,
}

/// How far off it was in one phase.
#[derive(Default)]
struct Errors {
    /// Divergence of each layer, per file and request.
    divergences: Vec<Vec<Vec<f64>>>,
    /// True shares of each layer's experts that would be remote, per request and layer.
    remote: Vec<f64>,
}

impl Errors {
    fn of(
        contestant: &ComparedMethod<'_>,
        tests: &[Vec<ActivationRecord>],
        truths: &Truths,
        phase: Phase,
        microseconds: &mut Vec<f64>,
    ) -> Result<Self, PredictError> {
        let mut errors = Self::default();
        for (tests, truths) in tests.iter().zip(truths) {
            let mut of_file = Vec::with_capacity(tests.len());
            for (record, truth) in tests.iter().zip(truths) {
                let Some(truth) = truth else { continue };
                let started = Instant::now();
                let prediction = contestant.predictor.predict(&record.prompt, phase)?;
                microseconds.push(started.elapsed().as_secs_f64() * 1e6);
                of_file.push(divergence::per_layer(&prediction, truth));
                errors.remote.extend(prediction.to_rows().iter().zip(truth.rows()).map(
                    |(expected, truth)| {
                        let away = least_used(expected, expected.len().div_ceil(2));
                        away.iter().map(|id| f64::from(truth[*id as usize])).sum::<f64>()
                    },
                ));
            }
            errors.divergences.push(of_file);
        }
        Ok(errors)
    }

    fn mean_of(&self, file: usize) -> Option<f64> {
        mean(self.divergences.get(file)?.iter().flatten().copied())
    }

    fn report(&self) -> Option<OfPhase> {
        let requests = || self.divergences.iter().flatten();
        let layers = requests().next()?.len();
        let of_layer = |layer| {
            mean(requests().filter_map(|layers: &Vec<f64>| layers.get(layer).copied())).unwrap_or(0.0)
        };
        Some(OfPhase {
            mean_js: mean(requests().flatten().copied())?,
            js_per_layer: (0..layers).map(of_layer).collect(),
            remote_at_half: mean(self.remote.iter().copied())?,
        })
    }
}

impl MethodRun {
    fn of(
        contestant: &ComparedMethod<'_>,
        tests: &[Vec<ActivationRecord>],
        truths: &ByPhase<Truths>,
        nearest: &[Vec<&[u32]>],
    ) -> Result<Self, CliError> {
        let predictor = &contestant.predictor;
        // A first pass is not measured, so that cold memory does not count.
        let warm = |record: &ActivationRecord| predictor.predict(&record.prompt, Phase::Prefill).map(drop);
        tests.iter().flatten().try_for_each(warm)?;
        let mut microseconds = Vec::new();
        let mut of =
            |phase: Phase| Errors::of(contestant, tests, truths.get(phase), phase, &mut microseconds);
        let (prefill, decode) = (of(Phase::Prefill)?, of(Phase::Decode)?);
        let recall = contestant.similar.as_ref().filter(|one| one.weighs_tokens_equally()).map(|similar| {
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
            prefill,
            decode,
            microseconds,
            build_seconds: contestant.build_seconds,
            bytes: predictor.bytes(),
            recall: recall.transpose()?,
        })
    }

    /// `None` where there was no request to predict.
    fn report(&self) -> Option<Report> {
        let mut microseconds = self.microseconds.clone();
        let prefill = self.prefill.report()?;
        Some(Report {
            name: self.name,
            js_mean: prefill.mean_js,
            prefill,
            decode: self.decode.report(),
            build_seconds: self.build_seconds,
            search_us_p50: quantile(&mut microseconds, 0.5),
            search_us_p99: quantile(&mut microseconds, 0.99),
            bytes: self.bytes,
            recall: self.recall,
        })
    }
}

/// `None` of nothing.
fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0_usize), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / count as f64)
}

impl Evaluation {
    /// How well errors are known, and how far decode steps are from their prefill.
    fn known_errors(&self) -> String {
        let named = [("prefill", self.covered_95.prefill), ("decode", self.covered_95.decode)];
        let covered: Vec<String> = named
            .iter()
            .filter_map(|(phase, covered)| Some(format!("{phase} {:.1} %", 100.0 * (*covered)?)))
            .collect();
        let mut text = String::new();
        if !covered.is_empty() {
            text += &format!("Within the 95 % error bars: {}.\n", covered.join(", "));
        }
        if let Some(apart) = self.prefill_as_decode_js {
            text += &format!("Decode steps against the true shares of their own prefill: {apart:.5}.\n");
        }
        text
    }

    fn for_people(&self) -> String {
        let best_force = self.methods.iter().find(|one| one.name == "bf").map_or(f64::NAN, |one| one.js_mean);
        let rows = self.methods.iter().map(|one| {
            let mut row = vec![
                one.name.to_owned(),
                format!("{:.5}", one.js_mean),
                format!("{:+.1} %", 100.0 * (one.js_mean / best_force - 1.0)),
                format!("{:.3}", one.prefill.remote_at_half),
                one.decode.as_ref().map_or(String::new(), |decode| format!("{:.5}", decode.mean_js)),
                one.decode.as_ref().map_or(String::new(), |decode| format!("{:.3}", decode.remote_at_half)),
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
            "decode JS",
            "at 0.5",
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
            "{methods}\n\n{} training prompts, {} test prompts; `build` selects {}, for decode steps {}.\n\
             {}Correlation of prompt similarity with activation similarity: {:.3} (of ranks {:.3}); {}.",
            self.train_prompts,
            self.test_prompts,
            self.default,
            self.decode_default,
            self.known_errors(),
            self.correlation,
            self.correlation_spearman,
            each.join(", ")
        )
    }
}
