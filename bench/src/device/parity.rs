//! Checks of reference models against transformers.

use super::expected::{Prompt, ReferenceModel, reference_models, relative_difference};
use super::function::{FunctionSettings, MainProcess, failure_of};
use super::{CheckOutcome, DeviceArgs};
use crate::error::Result;
use remoe_proto::v1::InspectReply;
use tokio::task::JoinSet;

/// Largest relative difference of logits in float32.
pub(super) const FLOAT32_TOLERANCE: f32 = 2e-4;
/// Largest relative difference of logits in bfloat16, which has 8 significant bits, from transformers in bfloat16. Prompts
/// with other experts than the reference are not compared. On CPUs it was at most 0.11 (2026-11-29); wrong operations come
/// to about 1.
const BFLOAT16_TOLERANCE: f32 = 0.15;
/// Largest relative difference from transformers in float32, for references without results in bfloat16. On CPUs at most 0.18 (2026-11-29).
const BFLOAT16_FROM_FLOAT32_TOLERANCE: f32 = 0.3;
/// Models that are compared at the same time.
const PARALLEL_MODELS: usize = 4;

/// Comparison of one model with its reference.
#[derive(Debug, Default)]
struct ParityComparison {
    failures: Vec<String>,
    /// Largest relative difference of logits.
    largest_difference: f32,
    /// Prompts whose logits were compared.
    compared: usize,
    prompts: usize,
}

/// Checks logits, experts and greedy tokens of all models in float32.
pub(super) async fn float32(args: &DeviceArgs) -> Result<CheckOutcome> {
    compare_models(args, "float32").await
}

/// Checks logits of all models in bfloat16, for prompts with the experts of the reference.
pub(super) async fn bfloat16(args: &DeviceArgs) -> Result<CheckOutcome> {
    compare_models(args, "bfloat16").await
}

async fn compare_models(args: &DeviceArgs, dtype: &'static str) -> Result<CheckOutcome> {
    let mut waiting = reference_models(args)?.into_iter();
    let (mut running, mut outcome) = (JoinSet::new(), CheckOutcome::default());
    let (mut largest, mut models, mut compared, mut prompts) = (0.0_f32, 0, 0, 0);
    loop {
        while running.len() < PARALLEL_MODELS {
            let Some(reference) = waiting.next() else { break };
            let args = args.clone();
            running.spawn(async move {
                let comparison = compare_model(&args, &reference, dtype).await;
                (reference.name, comparison)
            });
        }
        let Some(joined) = running.join_next().await else { break };
        models += 1;
        match joined {
            Ok((_, Ok(comparison))) => {
                largest = largest.max(comparison.largest_difference);
                compared += comparison.compared;
                prompts += comparison.prompts;
                outcome.failures.extend(comparison.failures);
            }
            Ok((name, Err(error))) => outcome.failures.push(failure_of(&name, error)),
            Err(error) => outcome.failures.push(error.to_string()),
        }
    }
    outcome.require(models > 0, || format!("no reference model in {}", args.fixtures.display()));
    outcome.set_figure("models", models);
    outcome.set_figure("prompts", prompts);
    outcome.set_figure("prompts_compared", compared);
    outcome.set_figure("largest_relative_difference", f64::from(largest));
    Ok(outcome)
}

async fn compare_model(
    args: &DeviceArgs,
    reference: &ReferenceModel,
    dtype: &'static str,
) -> Result<ParityComparison> {
    let ReferenceModel { name, folder, expected } = reference;
    let mut main = MainProcess::start(args, folder, &FunctionSettings::with_dtype(dtype)).await?;
    main.route(&[], &[]).await?;
    let mut comparison = ParityComparison::default();
    let is_float32 = dtype == "float32";
    for (index, prompt) in expected.prompts.iter().enumerate() {
        let reply = main.inspect(&prompt.ids).await?;
        let layers: Vec<u32> = reply.routing.iter().map(|layer| layer.layer).collect();
        if layers != expected.moe_layers {
            comparison.failures.push(failure_of(name, format!("layers with experts {layers:?}")));
        }
        let same_experts = has_experts_of(&reply, prompt);
        if is_float32 && !same_experts {
            comparison.failures.push(failure_of(name, format!("other experts for {:?}", prompt.ids)));
        }
        comparison.prompts += 1;
        if same_experts {
            comparison.compared += 1;
            let noted = expected.bfloat16.get(index).filter(|_| !is_float32).map(|noted| &noted.last_logits);
            let limit = match noted {
                _ if is_float32 => FLOAT32_TOLERANCE,
                Some(_) => BFLOAT16_TOLERANCE,
                None => BFLOAT16_FROM_FLOAT32_TOLERANCE,
            };
            let logits = noted.unwrap_or(&prompt.last_logits);
            let difference = relative_difference(&reply.last_logits, logits);
            comparison.largest_difference = comparison.largest_difference.max(difference);
            if difference > limit {
                comparison
                    .failures
                    .push(failure_of(name, format!("logits of {:?} differ by {difference:.1e}", prompt.ids)));
            }
        }
        let tokens = main.generate(&prompt.ids, prompt.greedy.len() as u32).await?.tokens;
        if is_float32 && tokens != prompt.greedy {
            comparison
                .failures
                .push(failure_of(name, format!("greedy tokens after {:?}: {tokens:?}", prompt.ids)));
        }
    }
    if comparison.compared == 0 {
        comparison.failures.push(failure_of(name, "no prompt takes the experts of the reference"));
    }
    Ok(comparison)
}

/// True if every token has the experts of the reference.
fn has_experts_of(reply: &InspectReply, prompt: &Prompt) -> bool {
    let found = reply.routing.iter().map(|layer| layer.tokens.iter().map(|token| &token.experts));
    let reference = prompt.routing.iter().map(|layer| layer.iter().map(|token| &token.experts));
    reply.routing.len() == prompt.routing.len()
        && found.zip(reference).all(|(found, reference)| found.eq(reference))
}
