//! `remoe logits`: one prompt through the model, without sampling.

use crate::deployment::{self, Launch};
use crate::exit::CliError;
use crate::flags::{DeploymentArgs, PredictorFolder};
use crate::output::progress::Progress;
use crate::output::{json, table};
use crate::prompt::PromptArgs;
use crate::remote_set::PredictionSource;
use clap::Args;
use remoe_hub::ModelArgs;
use remoe_proto::v1::{InspectReply, InspectRequest, TokenRouting};
use serde::Serialize;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

#[derive(Debug, Args)]
pub(crate) struct LogitsArgs {
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    #[command(flatten)]
    pub(crate) predictor: PredictorFolder,
    #[command(flatten)]
    pub(crate) source: ModelArgs,
    #[command(flatten)]
    pub(crate) deployment: DeploymentArgs,
}

/// A prompt that takes longer than this has got stuck.
const DEADLINE: Duration = Duration::from_secs(600);
/// Likeliest tokens that people are shown.
const SHOWN: usize = 10;

#[derive(Debug, Serialize)]
struct Logits {
    prompt_ids: Vec<u32>,
    last_logits: Vec<f32>,
    argmax: usize,
    routing: Vec<Vec<Token>>,
}

#[derive(Debug, Serialize)]
struct Token {
    experts: Vec<u32>,
    weights: Vec<f32>,
}

/// Runs the prompt and prints what came of it.
pub(crate) async fn run(args: &LogitsArgs, as_json: bool, progress: &Arc<Progress>) -> Result<(), CliError> {
    let prediction =
        PredictionSource { predictor: args.predictor.predictor.as_deref(), prompt: Some(&args.prompt) };
    let wanted = deployment::desired_deployment(&args.source, &args.deployment, 0.0, prediction)?;
    args.prompt.check(&wanted.inspection, 0)?;
    let request =
        InspectRequest { prompt: Some(args.prompt.to_inspect_prompt()), hidden: false, scores: false };
    let reply = wanted
        .run_once(progress, async |mut client| {
            let answer = timeout(DEADLINE, client.inspect(request)).await;
            let answer = answer.map_err(|_elapsed| {
                CliError::runtime(format!("cannot compute logits: no answer within {DEADLINE:?}"))
            })?;
            Ok(answer?.into_inner())
        })
        .await?;
    if as_json {
        json::print(&Logits::of(reply))?;
    } else {
        writeln!(anstream::stdout().lock(), "{}", for_people(&reply))?;
    }
    Ok(())
}

impl Logits {
    fn of(reply: InspectReply) -> Self {
        let layers = reply.routing.into_iter();
        Self {
            prompt_ids: reply.prompt_ids,
            argmax: ranked(&reply.last_logits).first().copied().unwrap_or(0),
            last_logits: reply.last_logits,
            routing: layers.map(|layer| layer.tokens.into_iter().map(Token::of).collect()).collect(),
        }
    }
}

impl Token {
    fn of(routing: TokenRouting) -> Self {
        Self { experts: routing.experts, weights: routing.weights }
    }
}

/// Token ids by logit, the largest first; ties go to the lower id.
fn ranked(logits: &[f32]) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    ids
}

fn for_people(reply: &InspectReply) -> String {
    let best = ranked(&reply.last_logits).into_iter().take(SHOWN);
    let tokens = table::with_header(
        &["token", "logit"],
        best.map(|id| vec![id.to_string(), format!("{:.4}", reply.last_logits[id])]).collect(),
    );
    let routed = reply.routing.iter().filter_map(|layer| {
        let last = layer.tokens.last()?;
        let experts = last.experts.iter().zip(&last.weights);
        let shown: Vec<String> = experts.map(|(id, weight)| format!("{id} ({weight:.3})")).collect();
        Some(vec![layer.layer.to_string(), shown.join(", ")])
    });
    let routing = table::with_header(&["layer", "experts of the last token"], routed.collect());
    format!("{tokens}\n\n{routing}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_id() {
        assert_eq!(ranked(&[1.0, 3.0, -2.0, 3.0]), [1, 3, 0, 2]);
    }

    #[test]
    fn floats_survive_json() {
        for bits in [0x3dcc_cccd_u32, 0x0000_0001, 0x7f7f_ffff, 0xbf80_0001] {
            let value = f32::from_bits(bits);
            let text = serde_json::to_string(&value).unwrap();
            assert_eq!((text.parse::<f64>().unwrap() as f32).to_bits(), bits);
        }
    }
}
