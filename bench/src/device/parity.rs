//! Reference models beside what transformers computed.

use super::expected::{Prompt, Reference, references, relative_difference};
use super::function::{FunctionSettings, Main, of};
use super::{DeviceArgs, Outcome};
use crate::error::Result;
use remoe_proto::v1::InspectReply;
use tokio::task::JoinSet;

/// Difference of logits in float32, over the largest.
pub(super) const FLOAT32: f32 = 2e-4;
/// Difference in bfloat16, whose numbers have 8 bits, if a prompt's tokens take the experts of the reference: beside
/// transformers in bfloat16, and beside it in float32 where no more is noted. On CPUs 0.11 and 0.18 at most (2026-11-29);
/// wrong operations come to about 1.
const BFLOAT16: f32 = 0.15;
const BFLOAT16_BESIDE_FLOAT32: f32 = 0.3;
/// Models at the same time.
const AT_ONCE: usize = 4;

/// Comparison of one model.
#[derive(Debug, Default)]
struct Shown {
    failures: Vec<String>,
    logits: f32,
    /// Prompts whose logits were compared.
    compared: usize,
    prompts: usize,
}

/// All models in float32: the same logits, experts and greedy tokens.
pub(super) async fn float32(args: &DeviceArgs) -> Result<Outcome> {
    of_all(args, "float32").await
}

/// All models in bfloat16: the same logits where the same experts are used.
pub(super) async fn bfloat16(args: &DeviceArgs) -> Result<Outcome> {
    of_all(args, "bfloat16").await
}

async fn of_all(args: &DeviceArgs, dtype: &'static str) -> Result<Outcome> {
    let mut waiting = references(args)?.into_iter();
    let (mut running, mut outcome) = (JoinSet::new(), Outcome::default());
    let (mut largest, mut models, mut compared, mut prompts) = (0.0_f32, 0, 0, 0);
    loop {
        while running.len() < AT_ONCE {
            let Some(reference) = waiting.next() else { break };
            let args = args.clone();
            running.spawn(async move {
                let shown = one(&args, &reference, dtype).await;
                (reference.name, shown)
            });
        }
        let Some(joined) = running.join_next().await else { break };
        models += 1;
        match joined {
            Ok((_, Ok(shown))) => {
                largest = largest.max(shown.logits);
                compared += shown.compared;
                prompts += shown.prompts;
                outcome.failures.extend(shown.failures);
            }
            Ok((name, Err(error))) => outcome.failures.push(of(&name, error)),
            Err(error) => outcome.failures.push(error.to_string()),
        }
    }
    outcome.require(models > 0, || format!("no reference model in {}", args.fixtures.display()));
    outcome.figure("models", models);
    outcome.figure("prompts", prompts);
    outcome.figure("prompts_compared", compared);
    outcome.figure("largest_relative_difference", f64::from(largest));
    Ok(outcome)
}

async fn one(args: &DeviceArgs, reference: &Reference, dtype: &'static str) -> Result<Shown> {
    let Reference { name, folder, expected } = reference;
    let mut main = Main::start(args, folder, &FunctionSettings::of(dtype)).await?;
    main.route(&[], &[]).await?;
    let mut shown = Shown::default();
    let exact = dtype == "float32";
    for (index, prompt) in expected.prompts.iter().enumerate() {
        let reply = main.inspect(&prompt.ids).await?;
        let layers: Vec<u32> = reply.routing.iter().map(|layer| layer.layer).collect();
        if layers != expected.moe_layers {
            shown.failures.push(of(name, format!("layers with experts {layers:?}")));
        }
        let same_experts = has_experts_of(&reply, prompt);
        if exact && !same_experts {
            shown.failures.push(of(name, format!("other experts for {:?}", prompt.ids)));
        }
        shown.prompts += 1;
        if same_experts {
            shown.compared += 1;
            let noted = expected.bfloat16.get(index).filter(|_| !exact).map(|noted| &noted.last_logits);
            let limit = match noted {
                _ if exact => FLOAT32,
                Some(_) => BFLOAT16,
                None => BFLOAT16_BESIDE_FLOAT32,
            };
            let logits = noted.unwrap_or(&prompt.last_logits);
            let difference = relative_difference(&reply.last_logits, logits);
            shown.logits = shown.logits.max(difference);
            if difference > limit {
                shown
                    .failures
                    .push(of(name, format!("logits of {:?} differ by {difference:.1e}", prompt.ids)));
            }
        }
        let tokens = main.generate(&prompt.ids, prompt.greedy.len() as u32).await?.tokens;
        if exact && tokens != prompt.greedy {
            shown.failures.push(of(name, format!("greedy tokens after {:?}: {tokens:?}", prompt.ids)));
        }
    }
    if shown.compared == 0 {
        shown.failures.push(of(name, "no prompt takes the experts of the reference"));
    }
    Ok(shown)
}

fn has_experts_of(reply: &InspectReply, prompt: &Prompt) -> bool {
    let found = reply.routing.iter().map(|layer| layer.tokens.iter().map(|token| &token.experts));
    let reference = prompt.routing.iter().map(|layer| layer.iter().map(|token| &token.experts));
    reply.routing.len() == prompt.routing.len()
        && found.zip(reference).all(|(found, reference)| found.eq(reference))
}
