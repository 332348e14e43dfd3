//! Expert usage for selecting the remote experts of `--remote-ratio`.

use crate::exit::CliError;
use crate::flags::{DeploymentArgs, RemoteSet};
use crate::predictors::PredictorModel;
use crate::prompt::PromptArgs;
use remoe_model::Checkpoint;
use remoe_predictor::ByPhase;
use std::path::Path;
use std::sync::Arc;

/// Sources of a usage prediction.
#[derive(Default, Clone, Copy)]
pub(crate) struct PredictionSource<'a> {
    /// Folder of a predictor. `None`: the one in the model's folder.
    pub(crate) predictor: Option<&'a Path>,
    /// Prompt of the command's only request.
    pub(crate) prompt: Option<&'a PromptArgs>,
}

/// Returns the usage of each expert, [layers][experts], by which the least used ones become remote. Returns `None` if
/// the experts with the highest ids become remote.
pub(crate) fn expert_usage(
    args: &DeploymentArgs,
    prediction: PredictionSource<'_>,
    checkpoint: &Arc<Checkpoint>,
) -> Result<Option<Vec<Vec<f64>>>, CliError> {
    if args.history.is_some() && args.remote_set != RemoteSet::History {
        return Err(CliError::arguments(
            "--history",
            "cannot apply --history: requires --remote-set history",
        ));
    }
    match args.remote_set {
        RemoteSet::Last => Ok(None),
        RemoteSet::History => {
            let path = args.history.as_deref().ok_or_else(|| {
                let message =
                    "missing --history: --remote-set history needs the activation records of `remoe record`";
                CliError::arguments("--history", message)
            })?;
            Ok(Some(recorded_usage(path, checkpoint)?))
        }
        RemoteSet::Prediction => {
            let trained = PredictorModel::predictor_of(checkpoint, prediction.predictor)?.ok_or_else(|| {
                let message = "missing --predictor: --remote-set prediction needs a predictor; run `remoe predictor \
                               build`, and give its folder unless it is `predictor` in the model's folder";
                CliError::arguments("--predictor", message)
            })?;
            let prompt = prediction.prompt.map(|prompt| prompt.tokens(checkpoint)).transpose()?;
            // The length of the answer is unknown: weights prefill and decode equally.
            let expected = trained.expectation(prompt.as_deref(), ByPhase::both(1.0))?;
            Ok(Some(expected.shares.to_rows()))
        }
    }
}

/// Sums the expert counts of all records in a file, of prefill and decode.
fn recorded_usage(path: &Path, checkpoint: &Arc<Checkpoint>) -> Result<Vec<Vec<f64>>, CliError> {
    let (header, records) = PredictorModel::of(Arc::clone(checkpoint))?.records("--history", path)?;
    if records.is_empty() {
        return Err(CliError {
            path: Some(path.to_owned()),
            ..CliError::arguments(
                "--history",
                format!("invalid --history: no complete record in {}", path.display()),
            )
        });
    }
    let experts = header.experts as usize;
    let mut counts = vec![0.0; header.layers.len() * experts];
    for record in &records {
        let pairs = record.prefill.iter().zip(&record.decode);
        counts
            .iter_mut()
            .zip(pairs)
            .for_each(|(sum, (prefill, decode))| *sum += f64::from(*prefill) + f64::from(*decode));
    }
    Ok(counts.chunks(experts).map(<[f64]>::to_vec).collect())
}
