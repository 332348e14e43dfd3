//! Recorded requests, and what every way to predict says of them.

use crate::commands::predictor::source;
use crate::exit::CliError;
use remoe_experiments::{Foresight, REQUESTS, Request, Rows};
use remoe_model::Checkpoint;
use remoe_predictor::record::ActivationRecord;
use remoe_predictor::{ByPhase, Method, Phase, PredictError, Predictor, Shares, Trained, quantile};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Requests that a model truly had.
pub(super) struct Recorded {
    pub(super) paths: Vec<PathBuf>,
    pub(super) requests: Vec<Request>,
    /// Median seconds of one prediction.
    pub(super) predict_seconds: f64,
    /// What each way to predict says of the requests of each file, and of those of all together.
    pub(super) workloads: Vec<Workload>,
}

/// Requests that come together, as every way to predict sees them.
pub(super) struct Workload {
    pub(super) name: String,
    pub(super) requests: Vec<Request>,
    pub(super) foresights: Vec<Foresight>,
}

impl Recorded {
    /// Predicts requests spread evenly over the files, with answers of `steps` decode steps.
    pub(super) fn read(
        checkpoint: &Arc<Checkpoint>,
        paths: &[PathBuf],
        predictor: &Path,
        steps: f64,
    ) -> Result<Self, CliError> {
        let model = source::Model::of(Arc::clone(checkpoint))?;
        let trained = model.saved_predictor(predictor)?;
        let mut files = Vec::with_capacity(paths.len());
        for path in paths {
            let (_, records) = model.records("--records", path)?;
            if records.is_empty() {
                let message = format!("{} holds no whole record", path.display());
                return Err(CliError::arguments("--records", message));
            }
            files.push(records);
        }
        let name = |path: &PathBuf| {
            path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned())
        };
        let mut workloads = Vec::new();
        for (path, records) in paths.iter().zip(&files) {
            workloads.push(Workload::of(name(path), &trained, &evenly(records.iter()), steps)?);
        }
        let mixed = evenly(files.iter().flatten());
        let mut seconds = Vec::with_capacity(mixed.len());
        for record in &mixed {
            let started = Instant::now();
            let tokens = ByPhase { prefill: record.prompt.len() as f64, decode: steps };
            trained.expectation(Some(&record.prompt), tokens)?;
            seconds.push(started.elapsed().as_secs_f64());
        }
        let mixed = Workload::of("mixed".to_owned(), &trained, &mixed, steps)?;
        let requests = mixed.requests.clone();
        if files.len() > 1 {
            workloads.push(mixed);
        }
        let predict_seconds = quantile(&mut seconds, 0.5);
        Ok(Self { paths: paths.to_vec(), requests, predict_seconds, workloads })
    }
}

/// At most as many records as a scenario has requests, spread over all.
fn evenly<'a>(records: impl Iterator<Item = &'a ActivationRecord>) -> Vec<&'a ActivationRecord> {
    let all: Vec<_> = records.collect();
    let taken = all.len().min(REQUESTS);
    (0..taken).filter_map(|index| all.get(index * all.len() / taken).copied()).collect()
}

impl Workload {
    fn of(
        name: String,
        trained: &Trained,
        records: &[&ActivationRecord],
        steps: f64,
    ) -> Result<Self, PredictError> {
        let experts = trained.header().experts as usize;
        let part = |record: &ActivationRecord| steps / (record.prompt.len() as f64 + steps);
        let both = |record: &ActivationRecord, prefill: &Shares, decode: &Shares| {
            Ok::<_, PredictError>(prefill.towards(decode, part(record))?.to_rows())
        };
        let mut truths = Vec::with_capacity(records.len());
        for record in records {
            let prefill = Shares::from_counts(experts, &record.prefill)?;
            // One that ended before its first decode step is taken to decode as it prefilled.
            let decode = record.counts(Phase::Decode).map(|counts| Shares::from_counts(experts, counts));
            truths.push((decode.transpose()?.unwrap_or_else(|| prefill.clone()), prefill));
        }
        let each = |of: &dyn Fn(usize, &ActivationRecord) -> Result<Rows, PredictError>| {
            records.iter().enumerate().map(|(index, record)| of(index, record)).collect::<Result<Vec<_>, _>>()
        };
        let oracle = each(&|index, record| both(record, &truths[index].1, &truths[index].0))?;
        let by = |method: Method| {
            each(&|_, record| {
                let [prefill, decode] =
                    Phase::ALL.map(|phase| trained.method(method).predict(&record.prompt, phase));
                both(record, &prefill?, &decode?)
            })
        };
        let expected = each(&|_, record| {
            let tokens = ByPhase { prefill: record.prompt.len() as f64, decode: steps };
            Ok(trained.expectation(Some(&record.prompt), tokens)?.shares.to_rows())
        })?;
        let requests = records.iter().zip(&truths).zip(expected);
        let requests = requests.map(|((record, (decode, prefill)), predicted)| Request {
            input_tokens: record.prompt.len() as f64,
            predicted,
            prefill: prefill.to_rows(),
            decode: decode.to_rows(),
        });
        let layers = trained.header().layers.len();
        let uniform = Shares::uniform(layers, experts).to_rows();
        let mean = mean_of(&oracle);
        let same = |rows: Rows| vec![rows; records.len()];
        let foresights = vec![
            Foresight { name: "oracle", predicted: oracle },
            Foresight { name: "blend", predicted: by(Method::Blend)? },
            Foresight { name: "tokens", predicted: by(Method::Tokens)? },
            Foresight { name: "sps", predicted: by(Method::Sps)? },
            Foresight { name: "the workload's mean", predicted: same(mean) },
            Foresight { name: "dop", predicted: by(Method::Dop)? },
            Foresight { name: "uniform", predicted: same(uniform) },
        ];
        Ok(Self { name, requests: requests.collect(), foresights })
    }
}

/// The mean of some requests' shares.
fn mean_of(requests: &[Rows]) -> Rows {
    let mut mean = requests.first().cloned().unwrap_or_default();
    for (layer, row) in mean.iter_mut().enumerate() {
        for (expert, share) in row.iter_mut().enumerate() {
            *share = requests.iter().map(|rows| rows[layer][expert]).sum::<f64>() / requests.len() as f64;
        }
    }
    mean
}
