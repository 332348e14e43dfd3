//! Request fields of sampling and stop rules: checks ranges and applies defaults.

use super::request_body::RequestBody;
use crate::engine::RequestLimits;
use crate::engine::request::{Sampling, StopRules};
use remoe_http::random_u64;
use remoe_model::GenerationDefaults;
use remoe_proto::ServiceError;
use std::ops::RangeInclusive;

/// Most stop strings: each is searched for after every token.
const MAX_STOPS: usize = 32;
/// Longest stop string in bytes.
const MAX_STOP_BYTES: usize = 1024;
/// Most stop tokens.
const MAX_STOP_IDS: usize = 1024;

/// Reads the sampling parameters. Without a seed, uses a random one.
///
/// # Errors
/// Fails with the first field that is out of range.
pub(super) fn sampling(
    body: &RequestBody,
    defaults: &GenerationDefaults,
    vocab_size: usize,
) -> Result<Sampling, ServiceError> {
    let temperature = number("temperature", body.temperature, 0.0..=2.0)?;
    let top_p = number("top_p", body.top_p, 0.0..=1.0)?;
    let min_p = number("min_p", body.min_p, 0.0..=1.0)?;
    let repetition = number("repetition_penalty", body.repetition_penalty, 0.01..=100.0)?;
    let presence = number("presence_penalty", body.presence_penalty, -2.0..=2.0)?;
    let frequency = number("frequency_penalty", body.frequency_penalty, -2.0..=2.0)?;
    let top_k = match integer("top_k", body.top_k, -1..=i64::MAX)? {
        None => defaults.top_k.unwrap_or(0),
        Some(top_k) => usize::try_from(top_k).unwrap_or(0),
    };
    let mut logit_bias = Vec::new();
    for (&token, &bias) in body.logit_bias.iter().flat_map(|bias| &bias.0) {
        let name = format!("logit_bias.{token}");
        check_token(&name, token, vocab_size)?;
        let bias = number(&name, Some(bias), -100.0..=100.0)?;
        logit_bias.extend(bias.map(|bias| (token, bias as f32)));
    }
    let first_of =
        |value: Option<f64>, default: Option<f64>, neutral: f64| value.or(default).unwrap_or(neutral) as f32;
    Ok(Sampling {
        repetition_penalty: first_of(repetition, defaults.repetition_penalty, 1.0),
        presence_penalty: first_of(presence, None, 0.0),
        frequency_penalty: first_of(frequency, None, 0.0),
        logit_bias: logit_bias.into(),
        temperature: first_of(temperature, Some(defaults.temperature), 0.0),
        top_k,
        top_p: first_of(top_p, defaults.top_p, 1.0),
        min_p: first_of(min_p, defaults.min_p, 0.0),
        seed: body.seed.map_or_else(random_u64, |seed| seed.0),
    })
}

/// Reads the stop rules.
///
/// # Errors
/// Fails with the first field that is out of range, or if there are stop strings but no tokenizer.
pub(super) fn stop_rules(
    body: &RequestBody,
    has_text: bool,
    vocab_size: usize,
) -> Result<StopRules, ServiceError> {
    let strings: Vec<String> = body.stop.iter().flat_map(|stop| &stop.0).cloned().collect();
    if strings.len() > MAX_STOPS || strings.iter().any(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES)
    {
        return Err(ServiceError::invalid(
            "stop",
            format!("invalid `stop`: expected at most {MAX_STOPS} strings of 1 to {MAX_STOP_BYTES} bytes"),
        ));
    }
    if !strings.is_empty() && !has_text {
        let message = "`stop` needs a tokenizer, which this model lacks; use `stop_token_ids`";
        return Err(ServiceError::invalid("stop", message));
    }
    let token_ids = body.stop_token_ids.clone().unwrap_or_default();
    if token_ids.len() > MAX_STOP_IDS {
        return Err(ServiceError::invalid(
            "stop_token_ids",
            format!("invalid `stop_token_ids`: expected at most {MAX_STOP_IDS} ids, got {}", token_ids.len()),
        ));
    }
    for &token in &token_ids {
        check_token("stop_token_ids", token, vocab_size)?;
    }
    let min_tokens = integer("min_tokens", body.min_tokens, 0..=i64::MAX)?.unwrap_or(0);
    Ok(StopRules {
        strings,
        token_ids,
        ignore_eos: body.ignore_eos.unwrap_or(false),
        min_tokens: usize::try_from(min_tokens).unwrap_or(usize::MAX),
    })
}

/// Reads the number of choices per prompt.
///
/// # Errors
/// Fails if it is below one or above the engine's limit.
pub(super) fn choices(body: &RequestBody, limits: &RequestLimits) -> Result<usize, ServiceError> {
    let most = i64::try_from(limits.max_choices).unwrap_or(i64::MAX);
    let choices = integer("n", body.n, 1..=most)?.unwrap_or(1);
    Ok(usize::try_from(choices).unwrap_or(1))
}

/// Reads `max_completion_tokens`, or else `max_tokens`.
///
/// # Errors
/// Fails if one of them is below `least`.
pub(super) fn max_tokens(body: &RequestBody, least: i64) -> Result<Option<usize>, ServiceError> {
    let older = integer("max_tokens", body.max_tokens, least..=i64::MAX)?;
    let newer = integer("max_completion_tokens", body.max_completion_tokens, least..=i64::MAX)?;
    Ok(newer.or(older).map(|tokens| usize::try_from(tokens).unwrap_or(usize::MAX)))
}

/// Checks that `min_tokens` does not exceed `max_tokens`.
///
/// # Errors
/// Fails if it does.
pub(super) fn check_min_tokens(stop: &StopRules, max_tokens: usize) -> Result<(), ServiceError> {
    if stop.min_tokens <= max_tokens {
        return Ok(());
    }
    Err(ServiceError::invalid(
        "min_tokens",
        format!("invalid `min_tokens`: expected at most {max_tokens}, got {}", stop.min_tokens),
    ))
}

/// Reads a number of alternatives per token.
///
/// # Errors
/// Fails if it is not between 0 and 20.
pub(super) fn alternatives(name: &str, value: Option<i64>) -> Result<Option<usize>, ServiceError> {
    Ok(integer(name, value, 0..=20)?.and_then(|count| usize::try_from(count).ok()))
}

/// Checks that `token` is in the vocabulary.
fn check_token(name: &str, token: u32, vocab_size: usize) -> Result<(), ServiceError> {
    if (token as usize) < vocab_size {
        return Ok(());
    }
    let last = vocab_size.saturating_sub(1);
    Err(ServiceError::invalid(
        name,
        format!("invalid `{name}`: expected token ids from 0 to {last}, got {token}"),
    ))
}

/// Checks that a number is within `range`.
fn number(name: &str, value: Option<f64>, range: RangeInclusive<f64>) -> Result<Option<f64>, ServiceError> {
    match value {
        Some(value) if !range.contains(&value) => Err(ServiceError::invalid(
            name,
            format!("invalid `{name}`: expected {} to {}, got {value}", range.start(), range.end()),
        )),
        _ => Ok(value),
    }
}

/// Checks that an integer is within `range`.
fn integer(name: &str, value: Option<i64>, range: RangeInclusive<i64>) -> Result<Option<i64>, ServiceError> {
    match value {
        Some(value) if !range.contains(&value) => {
            let message = match *range.end() {
                i64::MAX => {
                    format!("invalid `{name}`: expected at least {}, got {value}", range.start())
                }
                end => format!("invalid `{name}`: expected {} to {end}, got {value}", range.start()),
            };
            Err(ServiceError::invalid(name, message))
        }
        _ => Ok(value),
    }
}
