//! Log-probabilities in the formats of chats and completions.

use super::text_frontend::TextFrontend;
use crate::engine::request::TokenLogprobs;
use remoe_proto::ServiceError;
use serde::{Serialize, Serializer};

/// Stands for minus infinity, which JSON cannot express.
const MIN_LOGPROB: f32 = -9999.0;

/// A token of an answer, or of a prompt that the answer repeats.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LoggedToken {
    pub(super) token: u32,
    /// Characters of the answer before the token.
    pub(super) offset: usize,
    /// `None` for the first token of a prompt.
    pub(super) scored: Option<TokenLogprobs>,
}

/// Field `logprobs` of a completion's choice.
#[derive(Debug, Serialize)]
pub(super) struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<TopTokens>>,
    /// `None` without a tokenizer, as there is no text.
    text_offset: Option<Vec<usize>>,
}

/// Tokens with their log-probabilities, most likely first, without duplicate texts.
#[derive(Debug)]
struct TopTokens(Vec<(String, f32)>);

impl Serialize for TopTokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

/// Field `logprobs` of a chat's choice.
#[derive(Debug, Serialize)]
pub(super) struct ChatLogprobs {
    content: Vec<ChatToken>,
    refusal: Option<String>,
}

#[derive(Debug, Serialize)]
struct ChatToken {
    #[serde(flatten)]
    token: ChatAlternative,
    top_logprobs: Vec<ChatAlternative>,
}

#[derive(Debug, Serialize)]
struct ChatAlternative {
    token: String,
    logprob: f32,
    bytes: Option<Vec<u8>>,
}

/// Formats `logged` tokens for a completion.
///
/// # Errors
/// Fails if the bytes of a token are unknown.
pub(super) fn for_completion(
    text: Option<&dyn TextFrontend>,
    logged: &[LoggedToken],
) -> Result<CompletionLogprobs, ServiceError> {
    let mut logprobs = CompletionLogprobs {
        tokens: Vec::with_capacity(logged.len()),
        token_logprobs: Vec::with_capacity(logged.len()),
        top_logprobs: Vec::with_capacity(logged.len()),
        text_offset: text.map(|_| logged.iter().map(|logged| logged.offset).collect()),
    };
    for logged in logged {
        let scored = logged.scored.as_ref();
        logprobs.tokens.push(name(text, logged.token)?);
        logprobs.token_logprobs.push(scored.map(|scored| finite(scored.logprob)));
        logprobs.top_logprobs.push(scored.map(|scored| top_tokens(text, scored)).transpose()?);
    }
    Ok(logprobs)
}

/// Returns the alternatives and the token itself.
fn top_tokens(text: Option<&dyn TextFrontend>, scored: &TokenLogprobs) -> Result<TopTokens, ServiceError> {
    let mut top: Vec<(String, f32)> = Vec::with_capacity(scored.top.len() + 1);
    for &(token, logprob) in scored.top.iter().chain([&(scored.token, scored.logprob)]) {
        let name = name(text, token)?;
        if top.iter().all(|(other, _)| *other != name) {
            top.push((name, finite(logprob)));
        }
    }
    Ok(TopTokens(top))
}

/// Formats `logged` tokens for a chat.
///
/// # Errors
/// Fails if the bytes of a token are unknown.
pub(super) fn for_chat(
    text: Option<&dyn TextFrontend>,
    logged: &[LoggedToken],
) -> Result<ChatLogprobs, ServiceError> {
    let alternative = |token: u32, logprob: f32| {
        Ok::<_, ServiceError>(ChatAlternative {
            token: name(text, token)?,
            logprob: finite(logprob),
            bytes: text.map(|text| text.token_bytes(token)).transpose()?,
        })
    };
    let mut content = Vec::with_capacity(logged.len());
    for scored in logged.iter().filter_map(|logged| logged.scored.as_ref()) {
        let top = scored.top.iter().map(|&(token, logprob)| alternative(token, logprob));
        content.push(ChatToken {
            token: alternative(scored.token, scored.logprob)?,
            top_logprobs: top.collect::<Result<_, _>>()?,
        });
    }
    Ok(ChatLogprobs { content, refusal: None })
}

/// Returns a token as text: incomplete characters as `bytes:\xe2\x82`, or `token_id:7` without a tokenizer.
fn name(text: Option<&dyn TextFrontend>, token: u32) -> Result<String, ServiceError> {
    let Some(text) = text else {
        return Ok(format!("token_id:{token}"));
    };
    Ok(String::from_utf8(text.token_bytes(token)?).unwrap_or_else(|error| {
        let escaped: String = error.as_bytes().iter().map(|byte| format!("\\x{byte:02x}")).collect();
        format!("bytes:{escaped}")
    }))
}

/// Returns the number of characters that begin in `bytes`.
pub(super) fn characters(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| byte & 0xc0 != 0x80).count()
}

/// Replaces minus infinity and NaN by [`MIN_LOGPROB`].
fn finite(logprob: f32) -> f32 {
    logprob.max(MIN_LOGPROB)
}
