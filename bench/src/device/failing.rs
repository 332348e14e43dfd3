//! Functions and requests that fail.

use super::expected::reference_of;
use super::function::{FunctionSettings, Main, RemoteFunction, error_code, half, http, of};
use super::{DeviceArgs, Outcome};
use crate::error::{ErrorContext, Result};
use remoe_model::Checkpoint;
use remoe_proto::v1::generate_event::Event;
use serde_json::json;

const MODEL: &str = "olmoe-basic";
/// Tokens of an answer in which a remote function dies.
const LONG: u32 = 80;
/// Positions of a KV cache: more than a short request has, fewer than a long one.
const LITTLE_CACHE: u64 = 64;
/// Bytes that no device has.
const TOO_MUCH: u64 = 1 << 46;
const REQUESTS: usize = 64;

/// An answer goes on, with the same tokens, when the only remote function is killed.
pub(super) async fn killed(args: &DeviceArgs) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let reference = reference_of(args, MODEL)?;
    let settings = FunctionSettings::of("float32");
    let experts = half(&reference.folder)?;
    let mut main = Main::start(args, &reference.folder, &settings).await?;
    let mut remote = RemoteFunction::start(args, &reference.folder, &experts, &settings)?;
    main.route(&[&remote], &experts).await?;
    let Some(ids) = reference.expected.prompts.last().map(|prompt| prompt.ids.clone()) else {
        return Ok(outcome);
    };
    let whole = main.generate(&ids, LONG).await?;
    let mut answer = main.begin(&ids, LONG).await?;
    let first = answer.piece().await?;
    outcome
        .require(matches!(first, Event::Piece(_)), || "the answer ended before it was disturbed".to_owned());
    remote.process.kill()?;
    let disturbed = answer.finished().await?;
    outcome.require(disturbed.tokens == whole.tokens, || {
        of(MODEL, format!("{:?} beside a killed function, {:?} without", disturbed.tokens, whole.tokens))
    });
    let fallback = disturbed.experts.map_or(0, |experts| experts.fallback);
    outcome.require(fallback > 0, || "no expert was loaded locally".to_owned());
    outcome.figure("fallback", fallback);
    Ok(outcome)
}

/// Requests that do not fit are refused by name while the others are answered, and so is a cache that does not fit.
pub(super) async fn memory(args: &DeviceArgs) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let reference = reference_of(args, MODEL)?;
    let reading = || format!("reading {}", reference.folder.display());
    let facts = Checkpoint::open(&reference.folder).doing(reading)?.inspect().doing(reading)?;
    let cache_bytes = LITTLE_CACHE * facts.resident_bytes(facts.kv_bytes_per_token, "float32");
    let little = FunctionSettings { cache_bytes, ..FunctionSettings::of("float32") };
    let mut main = Main::start(args, &reference.folder, &little).await?;
    main.route(&[], &[]).await?;
    let Some(prompt) = reference.expected.prompts.last() else { return Ok(outcome) };
    let (address, ids) = (main.http, prompt.ids.clone());
    let mut asked = tokio::task::JoinSet::new();
    for number in 0..REQUESTS {
        // Some would need the whole context of the model.
        let tokens = if number % 8 == 0 { 100 } else { prompt.greedy.len() };
        let body =
            json!({"prompt": ids.as_slice(), "max_tokens": tokens, "temperature": 0, "ignore_eos": true});
        asked.spawn_blocking(move || http(address, "POST", "/v1/completions", &body.to_string()));
    }
    let (mut answered, mut refused) = (0, 0);
    while let Some(joined) = asked.join_next().await {
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
    outcome.figure("answered", answered);
    outcome.figure("refused", refused);
    drop(main);
    let much = FunctionSettings { cache_bytes: TOO_MUCH, ..FunctionSettings::of("float32") };
    let started = Main::start(args, &reference.folder, &much).await;
    match started {
        // Started with a smaller cache, or with one that grows as it is used: it answers.
        Ok(mut main) => {
            main.route(&[], &[]).await?;
            let tokens = main.generate(&prompt.ids, prompt.greedy.len() as u32).await?.tokens;
            outcome.require(tokens == prompt.greedy, || format!("{tokens:?} with a cache that does not fit"));
            outcome.figure("cache_that_does_not_fit", "bounded by the device");
        }
        Err(error) => outcome.figure("cache_that_does_not_fit", error.to_string()),
    }
    Ok(outcome)
}
