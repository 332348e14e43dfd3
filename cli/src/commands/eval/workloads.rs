//! Recorded requests, and what every way to predict says of them.

use crate::exit::CliError;
use crate::predictors;
use remoe_experiments::{ExpertShares, REQUESTS, SimulatedRequest, UsageForecast};
use remoe_model::Checkpoint;
use remoe_predictor::record::ActivationRecord;
use remoe_predictor::{
    ByPhase, Method, Phase, PredictError, Predictor, TrainedPredictor, UsageShares, quantile,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Requests of each file in the workload whose topic changes: so many come in an hour.
const AN_HOUR: usize = 24;
/// Usage that a placement that follows goes by, and that of one that was made once.
pub(super) const USED_OF_LATE: &str = "recent usage";
pub(super) const STAYS: &str = "the first hour's mean";
/// In what was used of late a request weighs half as much after so many others, as gateways count.
const HALF_LIFE: f64 = 24.0;

/// Requests that a model truly had.
pub(super) struct Recorded {
    pub(super) paths: Vec<PathBuf>,
    pub(super) requests: Vec<SimulatedRequest>,
    /// Median seconds of one prediction.
    pub(super) predict_seconds: f64,
    /// Predictions of each method for the requests of each file, and for those of all together.
    pub(super) workloads: Vec<Workload>,
}

/// Requests that come together, as every way to predict sees them.
pub(super) struct Workload {
    pub(super) name: String,
    /// Requests of each topic, where one comes after the other; empty where topics are mixed.
    pub(super) topics: Vec<usize>,
    pub(super) requests: Vec<SimulatedRequest>,
    pub(super) foresights: Vec<UsageForecast>,
}

impl Recorded {
    /// Predicts requests spread evenly over the files, with answers of `steps` decode steps.
    pub(super) fn read(
        checkpoint: &Arc<Checkpoint>,
        paths: &[PathBuf],
        predictor: &Path,
        steps: f64,
    ) -> Result<Self, CliError> {
        let model = predictors::PredictorModel::of(Arc::clone(checkpoint))?;
        let trained = model.saved_predictor(predictor)?;
        let mut files = Vec::with_capacity(paths.len());
        for path in paths {
            let (_, records) = model.records("--records", path)?;
            if records.is_empty() {
                let message = format!("invalid --records: no complete record in {}", path.display());
                return Err(CliError::arguments("--records", message));
            }
            files.push(records);
        }
        let name = |path: &PathBuf| {
            path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned())
        };
        let mut workloads = Vec::new();
        for (path, records) in paths.iter().zip(&files) {
            workloads.push(Workload::of(name(path), &trained, &evenly(records.iter(), REQUESTS), steps)?);
        }
        let mixed = in_turns(&files);
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
            let hours: Vec<_> = files.iter().map(|records| evenly(records.iter(), AN_HOUR)).collect();
            let topics = hours.iter().map(Vec::len).collect();
            let hourly = Workload::of("hourly".to_owned(), &trained, &hours.concat(), steps)?;
            workloads.extend([mixed, Workload { topics, ..hourly }]);
        }
        let predict_seconds = quantile(&mut seconds, 0.5);
        Ok(Self { paths: paths.to_vec(), requests, predict_seconds, workloads })
    }
}

/// At most so many of the records, spread over all.
fn evenly<'a, T>(records: impl Iterator<Item = &'a T>, most: usize) -> Vec<&'a T> {
    let all: Vec<_> = records.collect();
    let taken = all.len().min(most);
    (0..taken).filter_map(|index| all.get(index * all.len() / taken).copied()).collect()
}

/// As many records as a scenario has requests, spread over all files: one of each file after the other, so that no topic stays.
fn in_turns<T>(files: &[Vec<T>]) -> Vec<&T> {
    let all = files.iter().enumerate();
    let placed: Vec<(usize, usize, &T)> = all
        .flat_map(|(file, records)| records.iter().enumerate().map(move |(at, record)| (at, file, record)))
        .collect();
    let mut taken = evenly(placed.iter(), REQUESTS);
    // Of files of different lengths the requests of each are spread over the whole time.
    let part =
        |(at, file, _): &(usize, usize, &T)| *at as f64 / files.get(*file).map_or(1, Vec::len).max(1) as f64;
    taken.sort_by(|one, other| part(one).total_cmp(&part(other)).then(one.1.cmp(&other.1)));
    taken.into_iter().map(|(_, _, record)| *record).collect()
}

impl Workload {
    fn of(
        name: String,
        trained: &TrainedPredictor,
        records: &[&ActivationRecord],
        steps: f64,
    ) -> Result<Self, PredictError> {
        let experts = trained.header().experts as usize;
        let part = |record: &ActivationRecord| steps / (record.prompt.len() as f64 + steps);
        let both = |record: &ActivationRecord, prefill: &UsageShares, decode: &UsageShares| {
            Ok::<_, PredictError>(prefill.towards(decode, part(record))?.to_rows())
        };
        let mut truths = Vec::with_capacity(records.len());
        for record in records {
            let prefill = UsageShares::from_counts(experts, &record.prefill)?;
            // One that ended before its first decode step is taken to decode as it prefilled.
            let decode = record.counts(Phase::Decode).map(|counts| UsageShares::from_counts(experts, counts));
            truths.push((decode.transpose()?.unwrap_or_else(|| prefill.clone()), prefill));
        }
        let each = |of: &dyn Fn(usize, &ActivationRecord) -> Result<ExpertShares, PredictError>| {
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
        let requests = requests.map(|((record, (decode, prefill)), predicted)| SimulatedRequest {
            input_tokens: record.prompt.len() as f64,
            predicted,
            prefill: prefill.to_rows(),
            decode: decode.to_rows(),
        });
        let layers = trained.header().layers.len();
        let uniform = UsageShares::uniform(layers, experts).to_rows();
        let mean = mean_of(&oracle);
        let late = of_late(&oracle, &uniform);
        let stays = mean_of(oracle.get(..AN_HOUR).unwrap_or(&oracle));
        let same = |rows: ExpertShares| vec![rows; records.len()];
        let foresights = vec![
            UsageForecast { name: "oracle", predicted: oracle },
            UsageForecast { name: "blend", predicted: by(Method::Blend)? },
            UsageForecast { name: "tokens", predicted: by(Method::Tokens)? },
            UsageForecast { name: "sps", predicted: by(Method::Sps)? },
            UsageForecast { name: "the workload's mean", predicted: same(mean) },
            UsageForecast { name: USED_OF_LATE, predicted: late },
            UsageForecast { name: STAYS, predicted: same(stays) },
            UsageForecast { name: "dop", predicted: by(Method::Dop)? },
            UsageForecast { name: "uniform", predicted: same(uniform) },
        ];
        Ok(Self { name, topics: Vec::new(), requests: requests.collect(), foresights })
    }
}

/// The mean of some requests' shares.
fn mean_of(requests: &[ExpertShares]) -> ExpertShares {
    let mut mean = requests.first().cloned().unwrap_or_default();
    for (layer, row) in mean.iter_mut().enumerate() {
        for (expert, share) in row.iter_mut().enumerate() {
            *share = requests.iter().map(|rows| rows[layer][expert]).sum::<f64>() / requests.len() as f64;
        }
    }
    mean
}

/// For each of some requests what those before it used, the latest most; `first` for the one that has none before it.
fn of_late(requests: &[ExpertShares], first: &ExpertShares) -> Vec<ExpertShares> {
    let kept = 0.5_f64.powf(1.0 / HALF_LIFE);
    let (mut known, mut weight) = (ExpertShares::new(), 0.0);
    let each = requests.iter().map(|used| {
        let before = if weight == 0.0 { first.clone() } else { known.clone() };
        let mixed = before.iter().zip(used).map(|(before, used)| {
            let of_expert = |(before, used): (&f64, &f64)| (before * weight + used) / (weight + 1.0);
            before.iter().zip(used).map(of_expert).collect()
        });
        known = mixed.collect();
        weight = (weight + 1.0) * kept;
        before
    });
    each.collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn mixed_requests_stay_with_no_topic_and_hours_do() {
        let files: Vec<Vec<(usize, usize)>> = [80, 40]
            .iter()
            .enumerate()
            .map(|(file, count)| (0..*count).map(|at| (file, at)).collect())
            .collect();
        let mixed = in_turns(&files);
        assert_eq!(mixed.len(), REQUESTS);
        let of_second: Vec<usize> = mixed.iter().map(|(file, _)| *file).collect();
        // A third of them, and no stretch without.
        assert!((14..=19).contains(&of_second.iter().sum::<usize>()), "{of_second:?}");
        assert!(
            of_second.chunks_exact(6).all(|some| some.contains(&0) && some.contains(&1)),
            "{of_second:?}"
        );
        assert_eq!(in_turns(&files[..0]), Vec::<&(usize, usize)>::new());
    }

    #[test]
    fn recent_usage_follows_topic_and_never_the_future() {
        let (one, other) = (vec![vec![1.0, 0.0]], vec![vec![0.0, 1.0]]);
        let requests: Vec<ExpertShares> = [vec![one.clone(); 60], vec![other.clone(); 60]].concat();
        let late = of_late(&requests, &vec![vec![0.5, 0.5]]);
        assert_eq!(late.len(), 120);
        assert_eq!((&late[0], &late[1]), (&vec![vec![0.5, 0.5]], &one));
        assert!((late[60][0][0] - 1.0).abs() < 1e-12, "the first of the new topic comes as a surprise");
        let old = |at: usize| late[at][0][0];
        assert!(old(72) > 0.5 && old(96) < 0.45 && old(119) < 0.25, "{} {} {}", old(72), old(96), old(119));
        assert!(late.iter().all(|rows| (rows[0].iter().sum::<f64>() - 1.0).abs() < 1e-9));
    }
}
