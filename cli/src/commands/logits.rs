//! `remoe logits`: next-token logits and expert routing of one prompt.

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

/// Timeout of the prompt.
const PROMPT_TIMEOUT: Duration = Duration::from_secs(600);
/// Number of most likely tokens in the table.
const SHOWN_TOKENS: usize = 10;

#[derive(Debug, Serialize)]
struct LogitsOutput {
    prompt_ids: Vec<u32>,
    last_logits: Vec<f32>,
    argmax: usize,
    routing: Vec<Vec<TokenExperts>>,
}

#[derive(Debug, Serialize)]
struct TokenExperts {
    experts: Vec<u32>,
    weights: Vec<f32>,
}

/// Runs the prompt, and prints its logits and routing.
pub(crate) async fn run(args: &LogitsArgs, as_json: bool, progress: &Arc<Progress>) -> Result<(), CliError> {
    let prediction =
        PredictionSource { predictor: args.predictor.predictor.as_deref(), prompt: Some(&args.prompt) };
    let desired = deployment::desired_deployment(&args.source, &args.deployment, 0.0, prediction)?;
    args.prompt.check(&desired.inspection, 0)?;
    let request =
        InspectRequest { prompt: Some(args.prompt.to_inspect_prompt()), hidden: false, scores: false };
    let reply = desired
        .run_once(progress, async |mut client| {
            let answer = timeout(PROMPT_TIMEOUT, client.inspect(request)).await;
            let answer = answer.map_err(|_elapsed| {
                CliError::runtime(format!("cannot compute logits: no answer within {PROMPT_TIMEOUT:?}"))
            })?;
            Ok(answer?.into_inner())
        })
        .await?;
    if as_json {
        json::print(&LogitsOutput::new(reply))?;
    } else {
        writeln!(anstream::stdout().lock(), "{}", to_tables(&reply))?;
    }
    Ok(())
}

impl LogitsOutput {
    fn new(reply: InspectReply) -> Self {
        let layers = reply.routing.into_iter();
        Self {
            prompt_ids: reply.prompt_ids,
            argmax: rank_tokens(&reply.last_logits).first().copied().unwrap_or(0),
            last_logits: reply.last_logits,
            routing: layers.map(|layer| layer.tokens.into_iter().map(TokenExperts::from).collect()).collect(),
        }
    }
}

impl From<TokenRouting> for TokenExperts {
    fn from(routing: TokenRouting) -> Self {
        Self { experts: routing.experts, weights: routing.weights }
    }
}

/// Sorts token ids by descending logit. Ties go to the lower id.
fn rank_tokens(logits: &[f32]) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    ids
}

fn to_tables(reply: &InspectReply) -> String {
    let best = rank_tokens(&reply.last_logits).into_iter().take(SHOWN_TOKENS);
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
        assert_eq!(rank_tokens(&[1.0, 3.0, -2.0, 3.0]), [1, 3, 0, 2]);
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
