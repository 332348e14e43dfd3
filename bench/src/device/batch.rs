//! Requests that share iterations, and requests that share a beginning.

use super::expected::{Reference, reference_of, references, relative_difference};
use super::function::{FunctionSettings, Main, RemoteFunction, half, http, of};
use super::parity::FLOAT32;
use super::{DeviceArgs, Outcome};
use crate::error::{BenchError, ErrorContext, Result};
use serde_json::{Value, json};

/// Tokens of a prompt that shares its beginning: several pages.
const SHARED: usize = 64;
const ANSWER: u32 = 12;
/// Lengths of prompts behind [`SHARED`] tokens: one row is left, and one more than a block of LibTorch's attention has.
const LENGTHS: [usize; 2] = [65, 97];

/// All prompts of a model at the same time get the tokens that they get alone, with half of the experts remote.
pub(super) async fn mixed(args: &DeviceArgs) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let few: Vec<_> = references(args)?
        .into_iter()
        .filter(|reference| reference.name.ends_with("-basic") || args.small)
        .collect();
    for reference in &few {
        let settings = FunctionSettings::of("float32");
        let experts = half(&reference.folder)?;
        let mut main = Main::start(args, &reference.folder, &settings).await?;
        let remote = RemoteFunction::start(args, &reference.folder, &experts, &settings)?;
        main.route(&[&remote], &experts).await?;
        let prompts = &reference.expected.prompts;
        let before = main.metric("remoe_iterations_total")?;
        let mut answers = Vec::new();
        for prompt in prompts {
            answers.push(main.begin(&prompt.ids, prompt.greedy.len() as u32).await?);
        }
        for (answer, prompt) in answers.into_iter().zip(prompts) {
            let tokens = answer.finished().await?.tokens;
            outcome.require(tokens == prompt.greedy, || {
                of(&reference.name, format!("a batch changes the tokens after {:?}: {tokens:?}", prompt.ids))
            });
        }
        let iterations = main.metric("remoe_iterations_total")? - before;
        let alone: usize = prompts.iter().map(|prompt| prompt.greedy.len()).sum();
        outcome.require(iterations < alone as f64, || {
            of(
                &reference.name,
                format!("{iterations} iterations for {alone} tokens: requests did not share any"),
            )
        });
    }
    outcome.require(!few.is_empty(), || "no reference model".to_owned());
    outcome.figure("models", few.len());
    Ok(outcome)
}

/// A prompt that was computed before is not computed again, and its answer stays.
pub(super) async fn prefix(args: &DeviceArgs) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for name in ["olmoe-basic", "dsv2-basic", "gptoss-basic"] {
        let reference = reference_of(args, name)?;
        let mut main = Main::start(args, &reference.folder, &FunctionSettings::of("float32")).await?;
        main.route(&[], &[]).await?;
        let seeds = reference.expected.prompts.iter().flat_map(|prompt| prompt.ids.iter().copied());
        let ids: Vec<u32> = seeds.collect::<Vec<_>>().into_iter().cycle().take(SHARED).collect();
        let first = main.generate(&ids, ANSWER).await?;
        let again = main.generate(&ids, ANSWER).await?;
        outcome.require(first.tokens == again.tokens, || {
            of(name, format!("{:?} with a computed prefix, {:?} without", again.tokens, first.tokens))
        });
        let saved = first.forwarded_positions.saturating_sub(again.forwarded_positions);
        outcome.require(saved >= SHARED as u64 / 2, || {
            of(name, format!("{saved} of {SHARED} positions reused"))
        });
        outcome.figure(&format!("{name}_reused"), saved);
    }
    Ok(outcome)
}

/// Greedy tokens of a prompt, and the log-probabilities of each and of the likeliest ones.
struct ScoredAnswer {
    tokens: Vec<u64>,
    log_probabilities: Vec<f32>,
}

/// Rows behind a cached prefix get the tokens and logits that they get where the whole prompt is computed.
pub(super) async fn prefix_rows(args: &DeviceArgs) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut largest = 0.0_f32;
    for name in ["dsv2-group", "olmoe-clip"] {
        let reference = reference_of(args, name)?;
        let settings = FunctionSettings::of("float32");
        let mut uncached = Main::start(args, &reference.folder, &settings).await?;
        let mut cached = Main::start(args, &reference.folder, &settings).await?;
        uncached.route(&[], &[]).await?;
        cached.route(&[], &[]).await?;
        for (number, length) in LENGTHS.into_iter().enumerate() {
            let ids = prompt(&reference, number, length);
            cached.generate(&ids[..SHARED], 1).await?;
            let found = cached.metric("remoe_prefix_cache_hits_total")?;
            let alone = scored(&uncached, &ids)?;
            let behind = scored(&cached, &ids)?;
            let found = cached.metric("remoe_prefix_cache_hits_total")? - found;
            let rows = length - SHARED;
            outcome.require(found == SHARED as f64, || {
                of(name, format!("{found} tokens of a prefix of {SHARED} found"))
            });
            outcome.require(behind.tokens == alone.tokens, || {
                of(name, format!("{rows} rows: {:?} cached, {:?} uncached", behind.tokens, alone.tokens))
            });
            let difference = relative_difference(&behind.log_probabilities, &alone.log_probabilities);
            outcome.require(difference <= FLOAT32, || {
                of(name, format!("{rows} rows: log-probabilities differ by {difference:.1e}"))
            });
            largest = largest.max(difference);
        }
    }
    outcome.figure("largest_relative_difference", f64::from(largest));
    Ok(outcome)
}

/// `length` tokens of the reference's prompts; those of another `number` begin with another token.
fn prompt(reference: &Reference, number: usize, length: usize) -> Vec<u32> {
    let ids = reference.expected.prompts.iter().flat_map(|prompt| prompt.ids.iter().copied());
    ids.collect::<Vec<_>>().into_iter().cycle().skip(number).take(length).collect()
}

/// A greedy answer of [`ANSWER`] tokens with log-probabilities.
fn scored(main: &Main, ids: &[u32]) -> Result<ScoredAnswer> {
    let body = json!({
        "prompt": ids, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": true, "logprobs": 5, "return_token_ids": true,
    });
    let (status, answer) = http(main.http, "POST", "/v1/completions", &body.to_string())?;
    if status != 200 {
        return Err(BenchError::new("asking for log-probabilities", format!("status {status}: {answer}")));
    }
    let reading = || format!("reading {answer}");
    let begin = answer.find('{').doing(reading)?;
    let end = answer.rfind('}').doing(reading)?;
    let whole: Value = serde_json::from_str(&answer[begin..=end]).doing(reading)?;
    let choice = &whole["choices"][0];
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
