//! `remoe predictor build`: fits a predictor and saves it, with the portable form that gateways get.

use super::args::BuildArgs;
use crate::exit::CliError;
use crate::output::progress::Progress;
use crate::output::{folders, json, table};
use crate::predictors::PredictorModel;
use remoe_predictor::{
    Embedding, ErrorBars, FitStage, Method, PORTABLE_FILE, PREDICTOR_FILE, Phase, PortablePredictor,
    TrainedPredictor, TunedPredictor, Tuning, sketch_dimensions,
};
use serde::Serialize;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

#[derive(Serialize)]
struct Built {
    path: PathBuf,
    records: usize,
    /// The method that answers.
    default: &'static str,
    temperature: f32,
    token_rounds: usize,
    /// Errors of each method on prompts of the history that nothing was tuned on; none where the history is
    /// too short to hold any out.
    held_out: Vec<HeldOut>,
    /// The method that answers for the decode steps.
    decode_default: &'static str,
    /// As `held_out`, for the decode steps; none, too, if the requests had none.
    decode_held_out: Vec<HeldOut>,
    /// The predictor that gateways get where the whole one does not travel.
    portable: BuiltPortable,
    build_seconds: f64,
    bytes: u64,
}

#[derive(Serialize)]
struct BuiltPortable {
    path: PathBuf,
    /// Dimensions of the sketch of the embedding that it needs.
    dimensions: usize,
    held_out: Vec<HeldOut>,
    decode_held_out: Vec<HeldOut>,
    bytes: u64,
}

#[derive(Serialize)]
struct HeldOut {
    name: &'static str,
    prompts: usize,
    js_mean: f64,
    /// Per layer the median, the 90th and the 95th percentile.
    js_quantiles: Vec<[f64; 3]>,
}

/// Fits a predictor of so many records, or reads the one that is converted.
fn fitted(
    args: &BuildArgs,
    model: &PredictorModel,
    sketch: &Embedding,
) -> Result<(TrainedPredictor, PortablePredictor, usize), CliError> {
    let Some(history) = &args.history else {
        let folder = args.convert.as_deref().unwrap_or(&args.out);
        let trained = model.saved_predictor(folder)?;
        folders::make("--out", &args.out)?;
        let portable = PortablePredictor::from_trained(&trained, &model.embedding, sketch)?;
        let records = trained.sps().history().len();
        return Ok((trained, portable, records));
    };
    let (header, records) = model.records("--history", history)?;
    folders::make("--out", &args.out)?;
    let progress = Progress::new(false);
    progress.expect(FitStage::ALL.len());
    let begun = &mut |stage: FitStage| progress.doing(stage.name());
    let pair = (&model.embedding, sketch);
    let fitted = TrainedPredictor::fit_with_portable(header, &records, pair, args.tree.options(), begun);
    progress.clear();
    let (trained, portable) = fitted?;
    Ok((trained, portable, records.len()))
}

/// Fits, saves, and prints what came of it.
pub(crate) fn run(args: &BuildArgs, as_json: bool) -> Result<(), CliError> {
    let model = PredictorModel::open(&args.source)?;
    let started = Instant::now();
    let dimensions = sketch_dimensions(model.embedding.vocabulary(), args.dimensions)?;
    let sketch = model.embedding.sketched(dimensions)?;
    let (trained, portable, records) = fitted(args, &model, &sketch)?;
    let build_seconds = started.elapsed().as_secs_f64();
    let (bytes, portable_bytes) = (trained.to_bytes()?, portable.to_bytes()?);
    // One that is converted stays as it is.
    let path = args.convert.as_ref().unwrap_or(&args.out).join(PREDICTOR_FILE);
    let portable_path = args.out.join(PORTABLE_FILE);
    let whole = args.convert.is_none().then_some((&path, &bytes));
    for (path, bytes) in whole.into_iter().chain([(&portable_path, &portable_bytes)]) {
        save(path, bytes).map_err(|error| CliError {
            path: Some(path.clone()),
            ..CliError::runtime(format!("cannot write {}: {error}", path.display()))
        })?;
    }
    let [tuning, decode] = Phase::ALL.map(|phase| trained.tuning(phase));
    let built = Built {
        path,
        records,
        default: tuning.default.name(),
        temperature: tuning.temperature,
        token_rounds: tuning.rounds,
        held_out: held_out(tuning),
        decode_default: decode.default.name(),
        decode_held_out: held_out(decode),
        portable: BuiltPortable {
            path: portable_path,
            dimensions,
            held_out: held_out(portable.tuning(Phase::Prefill)),
            decode_held_out: held_out(portable.tuning(Phase::Decode)),
            bytes: portable_bytes.len() as u64,
        },
        build_seconds,
        bytes: bytes.len() as u64,
    };
    if as_json {
        json::print(&built)?;
    } else {
        writeln!(anstream::stdout().lock(), "{}", built.for_people())?;
    }
    Ok(())
}

fn held_out(tuning: &Tuning) -> Vec<HeldOut> {
    let of_method = |(method, bars): &(Method, ErrorBars)| HeldOut {
        name: method.name(),
        prompts: bars.prompts,
        js_mean: bars.js_mean,
        js_quantiles: bars.js_quantiles.clone(),
    };
    tuning.errors.iter().map(of_method).collect()
}

/// A reader sees the old file or the new one, never a part.
fn save(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let partial = path.with_extension("partial");
    fs::write(&partial, bytes)?;
    fs::rename(&partial, path)
}

impl Built {
    fn for_people(&self) -> String {
        let facts = table::of_pairs(&[
            ("saved", format!("{} ({})", self.path.display(), table::bytes(self.bytes))),
            ("for gateways", self.portable.for_people()),
            ("history", format!("{} prompts", self.records)),
            ("built in", format!("{:.2} s", self.build_seconds)),
            ("method", format!("{}, for decode steps {}", self.default, self.decode_default)),
        ]);
        if self.held_out.is_empty() {
            return format!(
                "{facts}\n\nThe history is too short for held-out prompts: prediction errors are unknown."
            );
        }
        let row = |(predictor, phase, method): (&str, Phase, &HeldOut)| {
            let worst = method.js_quantiles.iter().map(|quantiles| quantiles[2]).fold(0.0, f64::max);
            let (predictor, phase) = (predictor.to_owned(), phase.name().to_owned());
            vec![
                predictor,
                phase,
                method.name.to_owned(),
                format!("{:.5}", method.js_mean),
                format!("{worst:.5}"),
            ]
        };
        let all = [
            ("whole", Phase::Prefill, &self.held_out),
            ("whole", Phase::Decode, &self.decode_held_out),
            ("for gateways", Phase::Prefill, &self.portable.held_out),
            ("for gateways", Phase::Decode, &self.portable.decode_held_out),
        ];
        let rows = all
            .into_iter()
            .flat_map(|(name, phase, methods)| methods.iter().map(move |one| (name, phase, one)));
        let header = [
            "predictor",
            "phase",
            "method",
            "JS divergence on held-out prompts",
            "95th percentile, worst layer",
        ];
        format!("{facts}\n\n{}", table::with_header(&header, rows.map(row).collect()))
    }
}

impl BuiltPortable {
    fn for_people(&self) -> String {
        let (path, bytes) = (self.path.display(), table::bytes(self.bytes));
        format!("{path} ({bytes}), with a sketch of the embedding in {} dimensions", self.dimensions)
    }
}
