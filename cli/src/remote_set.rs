//! Which experts make up `--remote-ratio`: the least used ones, where it is known how much they are used.

use crate::exit::CliError;
use crate::flags::{DeploymentArgs, RemoteSet};
use crate::predictors::PredictorModel;
use crate::prompt::PromptArgs;
use remoe_model::Checkpoint;
use remoe_predictor::ByPhase;
use std::path::Path;
use std::sync::Arc;

/// Knowledge of a command beside the placement flags.
#[derive(Default, Clone, Copy)]
pub(crate) struct PredictionSource<'a> {
    /// Folder of a predictor.
    pub(crate) predictor: Option<&'a Path>,
    /// The one prompt that there will be.
    pub(crate) prompt: Option<&'a PromptArgs>,
}

/// The share of each expert in its layer's work, [layers][experts], by which the least used ones are found;
/// `None`: the last ids are taken.
pub(crate) fn usage(
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
            Ok(Some(recorded(path, checkpoint)?))
        }
        RemoteSet::Prediction => {
            let trained = PredictorModel::predictor_of(checkpoint, prediction.predictor)?.ok_or_else(|| {
                let message = "missing --predictor: --remote-set prediction needs a predictor; run `remoe predictor \
                               build`, and give its folder unless it is `predictor` in the model's folder";
                CliError::arguments("--predictor", message)
            })?;
            let prompt = prediction.prompt.map(|prompt| prompt.tokens(checkpoint)).transpose()?;
            // How long the answer will be is not known: the prompt's tokens for those of the answer.
            let expected = trained.expectation(prompt.as_deref(), ByPhase::both(1.0))?;
            Ok(Some(expected.shares.to_rows()))
        }
    }
}

/// The pairs of all requests in a record file, prompts and answers.
fn recorded(path: &Path, checkpoint: &Arc<Checkpoint>) -> Result<Vec<Vec<f64>>, CliError> {
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
        counts.iter_mut().zip(pairs).for_each(|(sum, (a, b))| *sum += f64::from(*a) + f64::from(*b));
    }
    Ok(counts.chunks(experts).map(<[f64]>::to_vec).collect())
}
