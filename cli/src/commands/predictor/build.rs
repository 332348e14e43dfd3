//! `remoe predictor build`: fits a predictor and saves it.

use super::args::BuildArgs;
use super::source::Model;
use crate::exit::CliError;
use crate::output::progress::Progress;
use crate::output::{folders, json, table};
use remoe_predictor::{ErrorBars, FitStage, Method, PREDICTOR_FILE, Phase, Trained, Tuning};
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
    /// The same errors about decode steps; none, too, where the requests had none.
    decode_held_out: Vec<HeldOut>,
    build_seconds: f64,
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

/// Fits, saves, and prints what came of it.
pub(crate) fn run(args: &BuildArgs, as_json: bool) -> Result<(), CliError> {
    let model = Model::open(&args.source)?;
    let (header, records) = model.records("--history", &args.history)?;
    folders::make("--out", &args.out)?;
    let started = Instant::now();
    let progress = Progress::new(false);
    progress.expect(FitStage::ALL.len());
    let options = args.tree.options();
    let begun = &mut |stage: FitStage| progress.doing(stage.name());
    let trained = Trained::fit_in_stages(header, &records, &model.embedding, options, begun);
    progress.clear();
    let trained = trained?;
    let build_seconds = started.elapsed().as_secs_f64();
    let bytes = trained.to_bytes()?;
    let path = args.out.join(PREDICTOR_FILE);
    save(&path, &bytes).map_err(|error| CliError {
        path: Some(path.clone()),
        ..CliError::runtime(format!("cannot write {}: {error}", path.display()))
    })?;
    let [tuning, decode] = Phase::ALL.map(|phase| trained.tuning(phase));
    let built = Built {
        path,
        records: records.len(),
        default: tuning.default.name(),
        temperature: tuning.temperature,
        token_rounds: tuning.rounds,
        held_out: held_out(tuning),
        decode_default: decode.default.name(),
        decode_held_out: held_out(decode),
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
            ("history", format!("{} prompts", self.records)),
            ("built in", format!("{:.2} s", self.build_seconds)),
            ("method", format!("{}, for decode steps {}", self.default, self.decode_default)),
        ]);
        if self.held_out.is_empty() {
            return format!(
                "{facts}\n\nThe history is too short for held-out prompts: prediction errors are unknown."
            );
        }
        let row = |(phase, method): (Phase, &HeldOut)| {
            let worst = method.js_quantiles.iter().map(|quantiles| quantiles[2]).fold(0.0, f64::max);
            let phase = phase.name().to_owned();
            vec![phase, method.name.to_owned(), format!("{:.5}", method.js_mean), format!("{worst:.5}")]
        };
        let both = [(Phase::Prefill, &self.held_out), (Phase::Decode, &self.decode_held_out)];
        let rows = both.into_iter().flat_map(|(phase, methods)| methods.iter().map(move |one| (phase, one)));
        let header = ["phase", "method", "JS divergence on held-out prompts", "95th percentile, worst layer"];
        format!("{facts}\n\n{}", table::with_header(&header, rows.map(row).collect()))
    }
}
