//! Checks of killed functions and of memory limits.

use super::expected::reference_model;
use super::function::{
    FunctionSettings, MainProcess, RemoteProcess, error_code, failure_of, last_half_of_experts, send_http,
};
use super::{CheckOutcome, DeviceArgs};
use crate::error::{ErrorContext, Result};
use remoe_model::Checkpoint;
use remoe_proto::v1::generate_event::Event;
use serde_json::json;

const MODEL: &str = "olmoe-basic";
/// Tokens of an answer during which a remote function is killed.
const LONG_ANSWER_TOKENS: u32 = 80;
/// Positions of a KV cache that fits short requests and no long one.
const SMALL_CACHE_POSITIONS: u64 = 64;
/// Bytes of a KV cache that fits no device.
const OVERSIZED_CACHE_BYTES: u64 = 1 << 46;
const REQUESTS: usize = 64;

/// Checks that an answer keeps its tokens when the only remote function is killed.
pub(super) async fn killed(args: &DeviceArgs) -> Result<CheckOutcome> {
    let mut outcome = CheckOutcome::default();
    let reference = reference_model(args, MODEL)?;
    let settings = FunctionSettings::with_dtype("float32");
    let experts = last_half_of_experts(&reference.folder)?;
    let mut main = MainProcess::start(args, &reference.folder, &settings).await?;
    let mut remote = RemoteProcess::start(args, &reference.folder, &experts, &settings)?;
    main.route(&[&remote], &experts).await?;
    let Some(ids) = reference.expected.prompts.last().map(|prompt| prompt.ids.clone()) else {
        return Ok(outcome);
    };
    let undisturbed = main.generate(&ids, LONG_ANSWER_TOKENS).await?;
    let mut answer = main.begin(&ids, LONG_ANSWER_TOKENS).await?;
    let first = answer.next_event().await?;
    outcome
        .require(matches!(first, Event::Piece(_)), || "the answer ended before it was disturbed".to_owned());
    remote.process.kill()?;
    let disturbed = answer.finish().await?;
    outcome.require(disturbed.tokens == undisturbed.tokens, || {
        failure_of(
            MODEL,
            format!("{:?} beside a killed function, {:?} without", disturbed.tokens, undisturbed.tokens),
        )
    });
    let fallback = disturbed.experts.map_or(0, |experts| experts.fallback);
    outcome.require(fallback > 0, || "no expert was loaded locally".to_owned());
    outcome.set_figure("fallback", fallback);
    Ok(outcome)
}

/// Checks that requests that do not fit are refused with an error code, and the others answered; and that a main function
/// bounds a cache that does not fit, or refuses it.
pub(super) async fn memory(args: &DeviceArgs) -> Result<CheckOutcome> {
    let mut outcome = CheckOutcome::default();
    let reference = reference_model(args, MODEL)?;
    let reading = || format!("reading {}", reference.folder.display());
    let facts = Checkpoint::open(&reference.folder).doing(reading)?.inspect().doing(reading)?;
    let cache_bytes = SMALL_CACHE_POSITIONS * facts.resident_bytes(facts.kv_bytes_per_token, "float32");
    let small_cache = FunctionSettings { cache_bytes, ..FunctionSettings::with_dtype("float32") };
    let mut main = MainProcess::start(args, &reference.folder, &small_cache).await?;
    main.route(&[], &[]).await?;
    let Some(prompt) = reference.expected.prompts.last() else { return Ok(outcome) };
    let (address, ids) = (main.http, prompt.ids.clone());
    let mut requests = tokio::task::JoinSet::new();
    for number in 0..REQUESTS {
        // One of eight needs more positions than the cache has.
        let tokens = if number % 8 == 0 { 100 } else { prompt.greedy.len() };
        let body =
            json!({"prompt": ids.as_slice(), "max_tokens": tokens, "temperature": 0, "ignore_eos": true});
        requests.spawn_blocking(move || send_http(address, "POST", "/v1/completions", &body.to_string()));
    }
    let (mut answered, mut refused) = (0, 0);
    while let Some(joined) = requests.join_next().await {
        match joined {
            Ok(Ok((200, _))) => answered += 1,
            Ok(Ok((status, body))) => {
                refused += 1;
                let is_typed = matches!(status, 400 | 413 | 429 | 503) && error_code(&body).is_some();
                outcome
                    .require(is_typed, || format!("status {status} for a request that does not fit: {body}"));
            }
            Ok(Err(error)) => outcome.failures.push(error.to_string()),
            Err(error) => outcome.failures.push(error.to_string()),
        }
    }
    outcome.require(answered >= REQUESTS - REQUESTS / 8, || {
        format!("only {answered} of {REQUESTS} requests were answered")
    });
    outcome.require(refused > 0, || "no request was refused, although some do not fit".to_owned());
    let after = main.generate(&prompt.ids, prompt.greedy.len() as u32).await?.tokens;
    outcome.require(after == prompt.greedy, || format!("{after:?} after requests that do not fit"));
    outcome.set_figure("answered", answered);
    outcome.set_figure("refused", refused);
    drop(main);
    let oversized_cache =
        FunctionSettings { cache_bytes: OVERSIZED_CACHE_BYTES, ..FunctionSettings::with_dtype("float32") };
    let started = MainProcess::start(args, &reference.folder, &oversized_cache).await;
    match started {
        // The cache is smaller, or grows as it is used.
        Ok(mut main) => {
            main.route(&[], &[]).await?;
            let tokens = main.generate(&prompt.ids, prompt.greedy.len() as u32).await?.tokens;
            outcome.require(tokens == prompt.greedy, || format!("{tokens:?} with a cache that does not fit"));
            outcome.set_figure("cache_that_does_not_fit", "bounded by the device");
        }
        Err(error) => outcome.set_figure("cache_that_does_not_fit", error.to_string()),
    }
    Ok(outcome)
}
