//! Checks of batches and of the prefix cache.

use super::expected::{ReferenceModel, reference_model, reference_models, relative_difference};
use super::function::{
    FunctionSettings, MainProcess, RemoteProcess, failure_of, json_object, last_half_of_experts, send_http,
};
use super::parity::FLOAT32_TOLERANCE;
use super::{CheckOutcome, DeviceArgs};
use crate::error::{BenchError, ErrorContext, Result};
use serde_json::{Value, json};

/// Tokens of a cached prefix: several pages.
const PREFIX_TOKENS: usize = 64;
const ANSWER_TOKENS: u32 = 12;
/// Tokens of prompts with a cached prefix: one row is left, and one more than a block of LibTorch's attention has.
const PROMPT_TOKENS: [usize; 2] = [65, 97];

/// Checks that prompts of one batch get the tokens that they get alone, with half of the experts remote.
pub(super) async fn mixed(args: &DeviceArgs) -> Result<CheckOutcome> {
    let mut outcome = CheckOutcome::default();
    let models: Vec<_> = reference_models(args)?
        .into_iter()
        .filter(|reference| reference.name.ends_with("-basic") || args.small)
        .collect();
    for reference in &models {
        let settings = FunctionSettings::with_dtype("float32");
        let experts = last_half_of_experts(&reference.folder)?;
        let mut main = MainProcess::start(args, &reference.folder, &settings).await?;
        let remote = RemoteProcess::start(args, &reference.folder, &experts, &settings)?;
        main.route(&[&remote], &experts).await?;
        let prompts = &reference.expected.prompts;
        let before = main.metric("remoe_iterations_total")?;
        let mut answers = Vec::new();
        for prompt in prompts {
            answers.push(main.begin(&prompt.ids, prompt.greedy.len() as u32).await?);
        }
        for (answer, prompt) in answers.into_iter().zip(prompts) {
            let tokens = answer.finish().await?.tokens;
            outcome.require(tokens == prompt.greedy, || {
                failure_of(
                    &reference.name,
                    format!("a batch changes the tokens after {:?}: {tokens:?}", prompt.ids),
                )
            });
        }
        let iterations = main.metric("remoe_iterations_total")? - before;
        let tokens: usize = prompts.iter().map(|prompt| prompt.greedy.len()).sum();
        outcome.require(iterations < tokens as f64, || {
            failure_of(
                &reference.name,
                format!("{iterations} iterations for {tokens} tokens: requests did not share any"),
            )
        });
    }
    outcome.require(!models.is_empty(), || "no reference model".to_owned());
    outcome.set_figure("models", models.len());
    Ok(outcome)
}

/// Checks that a repeated prompt is not computed again, and that its answer is the same.
pub(super) async fn prefix(args: &DeviceArgs) -> Result<CheckOutcome> {
    let mut outcome = CheckOutcome::default();
    for name in ["olmoe-basic", "dsv2-basic", "gptoss-basic"] {
        let reference = reference_model(args, name)?;
        let mut main =
            MainProcess::start(args, &reference.folder, &FunctionSettings::with_dtype("float32")).await?;
        main.route(&[], &[]).await?;
        let ids = prompt(&reference, 0, PREFIX_TOKENS);
        let first = main.generate(&ids, ANSWER_TOKENS).await?;
        let repeated = main.generate(&ids, ANSWER_TOKENS).await?;
        outcome.require(first.tokens == repeated.tokens, || {
            failure_of(
                name,
                format!("{:?} with a computed prefix, {:?} without", repeated.tokens, first.tokens),
            )
        });
        let reused = first.forwarded_positions.saturating_sub(repeated.forwarded_positions);
        outcome.require(reused >= PREFIX_TOKENS as u64 / 2, || {
            failure_of(name, format!("{reused} of {PREFIX_TOKENS} positions reused"))
        });
        outcome.set_figure(&format!("{name}_reused"), reused);
    }
    Ok(outcome)
}

/// Greedy answer with log-probabilities of its tokens and of the likeliest tokens.
struct ScoredAnswer {
    tokens: Vec<u64>,
    log_probabilities: Vec<f32>,
}

/// Checks that rows behind a cached prefix get the tokens and logits that they get if the whole prompt is computed.
pub(super) async fn prefix_rows(args: &DeviceArgs) -> Result<CheckOutcome> {
    let mut outcome = CheckOutcome::default();
    let mut largest = 0.0_f32;
    for name in ["dsv2-group", "olmoe-clip"] {
        let reference = reference_model(args, name)?;
        let settings = FunctionSettings::with_dtype("float32");
        let mut uncached = MainProcess::start(args, &reference.folder, &settings).await?;
        let mut cached = MainProcess::start(args, &reference.folder, &settings).await?;
        uncached.route(&[], &[]).await?;
        cached.route(&[], &[]).await?;
        for (number, length) in PROMPT_TOKENS.into_iter().enumerate() {
            let ids = prompt(&reference, number, length);
            cached.generate(&ids[..PREFIX_TOKENS], 1).await?;
            let found = cached.metric("remoe_prefix_cache_hits_total")?;
            let alone = generate_scored(&uncached, &ids)?;
            let behind = generate_scored(&cached, &ids)?;
            let found = cached.metric("remoe_prefix_cache_hits_total")? - found;
            let rows = length - PREFIX_TOKENS;
            outcome.require(found == PREFIX_TOKENS as f64, || {
                failure_of(name, format!("{found} tokens of a prefix of {PREFIX_TOKENS} found"))
            });
            outcome.require(behind.tokens == alone.tokens, || {
                failure_of(
                    name,
                    format!("{rows} rows: {:?} cached, {:?} uncached", behind.tokens, alone.tokens),
                )
            });
            let difference = relative_difference(&behind.log_probabilities, &alone.log_probabilities);
            outcome.require(difference <= FLOAT32_TOLERANCE, || {
                failure_of(name, format!("{rows} rows: log-probabilities differ by {difference:.1e}"))
            });
            largest = largest.max(difference);
        }
    }
    outcome.set_figure("largest_relative_difference", f64::from(largest));
    Ok(outcome)
}

/// Returns `length` tokens of the prompts of `reference`. Prompts of different `number` have no common prefix.
fn prompt(reference: &ReferenceModel, number: usize, length: usize) -> Vec<u32> {
    let ids = reference.expected.prompts.iter().flat_map(|prompt| prompt.ids.iter().copied());
    ids.collect::<Vec<_>>().into_iter().cycle().skip(number).take(length).collect()
}

/// Generates a greedy answer of [`ANSWER_TOKENS`] tokens with log-probabilities.
fn generate_scored(main: &MainProcess, ids: &[u32]) -> Result<ScoredAnswer> {
    let body = json!({
        "prompt": ids, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": true, "logprobs": 5, "return_token_ids": true,
    });
    let (status, answer) = send_http(main.http, "POST", "/v1/completions", &body.to_string())?;
    if status != 200 {
        return Err(BenchError::new("asking for log-probabilities", format!("status {status}: {answer}")));
    }
    let reading = || format!("reading {answer}");
    let choice = &json_object(&answer).doing(reading)?["choices"][0];
    let tokens = choice["token_ids"].as_array().doing(reading)?.iter().filter_map(Value::as_u64).collect();
    let chosen = choice["logprobs"]["token_logprobs"].as_array().doing(reading)?;
    let mut log_probabilities: Vec<f64> = chosen.iter().filter_map(Value::as_f64).collect();
    for likeliest in choice["logprobs"]["top_logprobs"].as_array().doing(reading)? {
        let values = likeliest.as_object().doing(reading)?.values().filter_map(Value::as_f64);
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        log_probabilities.extend(values);
    }
    let log_probabilities = log_probabilities.into_iter().map(|value| value as f32).collect();
    Ok(ScoredAnswer { tokens, log_probabilities })
}
