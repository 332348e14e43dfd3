//! `remoe eval --perplexity`: how well a model foresees a text, with its experts as they are and quantised.

use super::EvalArgs;
use crate::deployment::{self, DesiredDeployment, Launch};
use crate::exit::CliError;
use crate::flags::{CPU, DeploymentArgs, default_dtype};
use crate::output::progress::{Progress, bar};
use crate::output::{json, table};
use crate::{files, prompt};
use indicatif::ProgressBar;
use remoe_hub::ModelArgs;
use remoe_model::{DenseDtype, ExpertsDtype, KvCacheDtype};
use remoe_proto::v1::main_model_client::MainModelClient;
use remoe_proto::v1::{InspectRequest, TokenIds, inspect_request};
use serde::Serialize;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use tonic::transport::Channel;

/// Tokens of the text that are scored together; none sees what is before its window.
const WINDOW: usize = 512;
/// Tokens that are scored at most.
const MOST_TOKENS: usize = 1 << 20;
/// Name of the form that is not quantised.
const PLAIN: &str = "as computed";
/// A window that takes longer than this has got stuck.
const DEADLINE: Duration = Duration::from_secs(600);
/// Forms of experts, other weights and the KV cache; none: the compute dtype.
type WeightForm = (Option<ExpertsDtype>, Option<DenseDtype>, Option<KvCacheDtype>);
/// Forms to score, in turn.
const FORMS: [WeightForm; 10] = {
    let (int8, int4) = (Some(ExpertsDtype::Int8), Some(ExpertsDtype::Int4));
    let mxfp4 = Some(ExpertsDtype::Mxfp4);
    let (dense8, dense4) = (Some(DenseDtype::Int8), Some(DenseDtype::Int4));
    let cache8 = Some(KvCacheDtype::Int8);
    [
        (None, None, None),
        (int8, dense8, None),
        (int4, dense8, None),
        (int4, dense4, None),
        (mxfp4, dense8, None),
        (int8, None, None),
        (int4, None, None),
        (mxfp4, None, None),
        (None, None, cache8),
        (int4, dense8, cache8),
    ]
};

#[derive(Serialize)]
struct Perplexities {
    /// Tokens of a window, of which all but the first are scored.
    window: usize,
    /// Tokens that were scored.
    tokens: usize,
    perplexity: Vec<Perplexity>,
}

#[derive(Serialize)]
struct Perplexity {
    /// `int8`, `int4`, `mxfp4`, or `as computed` where experts are not quantised.
    experts: &'static str,
    /// Form of attention, dense layers, shared experts and the head: `int8`, `int4`, or `as computed`.
    dense: &'static str,
    /// Form of the KV cache: `int8` or `as computed`.
    kv_cache: &'static str,
    /// e to the mean negative log-probability of a token.
    perplexity: f64,
}

/// Scores the text with each form of experts and prints what comes of it.
pub(crate) async fn run(
    args: &EvalArgs,
    file: &Path,
    as_json: bool,
    progress: &Arc<Progress>,
) -> Result<(), CliError> {
    let Some(source) = &args.source else {
        return Err(CliError::arguments("--model", "missing --model: --perplexity needs a model"));
    };
    let text = files::read("--perplexity", file)?;
    let mut answer = Perplexities { window: 0, tokens: 0, perplexity: Vec::new() };
    for (number, form) in (1..).zip(FORMS) {
        let wanted = wanted(source, form)?;
        let tokens = prompt::tokens(&wanted.checkpoint, &text, false, "--perplexity")?;
        answer.window = WINDOW.min(wanted.inspection.served_context());
        let windows: Vec<&[u32]> = tokens
            .chunks(answer.window)
            .filter(|window| window.len() > 1)
            .take(MOST_TOKENS / WINDOW)
            .collect();
        if windows.is_empty() {
            let message = "invalid --perplexity: expected a text of at least 2 tokens";
            return Err(CliError::arguments("--perplexity", message));
        }
        let bar = bar(windows.len(), "windows");
        bar.set_message(format!("form {number} of {}", FORMS.len()));
        let scores = wanted.run_once(progress, async |client| scores(client, &windows, &bar).await).await;
        bar.finish_and_clear();
        let scores = scores?;
        answer.tokens = scores.len();
        let mean = scores.iter().map(|&score| f64::from(score)).sum::<f64>() / scores.len() as f64;
        let experts = form.0.map_or(PLAIN, ExpertsDtype::name);
        let dense = form.1.map_or(PLAIN, DenseDtype::name);
        let kv_cache = form.2.map_or(PLAIN, KvCacheDtype::name);
        answer.perplexity.push(Perplexity { experts, dense, kv_cache, perplexity: (-mean).exp() });
    }
    if as_json {
        return Ok(json::print(&answer)?);
    }
    let row = |it: &Perplexity| {
        vec![
            it.experts.to_owned(),
            it.dense.to_owned(),
            it.kv_cache.to_owned(),
            format!("{:.4}", it.perplexity),
        ]
    };
    let table = table::with_header(
        &["experts", "other weights", "KV cache", "perplexity"],
        answer.perplexity.iter().map(row).collect(),
    );
    let (tokens, window) = (answer.tokens, answer.window);
    writeln!(anstream::stdout().lock(), "{tokens} tokens, in windows of {window}\n{table}")?;
    Ok(())
}

/// The model with all experts beside the main function.
fn wanted(source: &ModelArgs, form: WeightForm) -> Result<DesiredDeployment, CliError> {
    let (experts_dtype, dense_dtype, kv_cache_dtype) = form;
    // Some forms are those of CPUs alone.
    let device = Some(CPU.to_owned());
    let arguments = DeploymentArgs { experts_dtype, kv_cache_dtype, device, ..DeploymentArgs::default() };
    let mut wanted = deployment::unplaced_deployment(source, &arguments)?;
    wanted.inspection.dense_dtype = dense_dtype;
    let plain = default_dtype(&wanted.inspection);
    wanted.options.dense_dtype = Some(dense_dtype.map_or(plain, DenseDtype::name));
    Ok(wanted)
}

/// Log-probabilities of the tokens of every window but the first of each.
async fn scores(
    mut client: MainModelClient<Channel>,
    windows: &[&[u32]],
    bar: &ProgressBar,
) -> Result<Vec<f32>, CliError> {
    let mut all = Vec::new();
    bar.reset_elapsed();
    for window in windows {
        let ids = TokenIds { ids: window.to_vec() };
        let request =
            InspectRequest { prompt: Some(inspect_request::Prompt::Ids(ids)), hidden: false, scores: true };
        let reply = timeout(DEADLINE, client.inspect(request)).await;
        let late =
            |_elapsed| CliError::runtime(format!("cannot score a window: no answer within {DEADLINE:?}"));
        let reply = reply.map_err(late)?;
        let scores = reply?.into_inner().scores;
        if scores.len() + 1 != window.len() {
            let (found, expected) = (scores.len(), window.len() - 1);
            let message = format!(
                "cannot score a window: expected {expected} scores, got {found}; update the main function"
            );
            return Err(CliError::runtime(message));
        }
        all.extend(scores);
        bar.inc(1);
    }
    Ok(all)
}
