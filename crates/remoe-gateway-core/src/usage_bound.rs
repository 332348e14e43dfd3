//! Upper bound of the tokens that a main function may report for an answer, by its request and its model's context.
//! Pure.

use crate::request_fields::RequestFields;

/// Context length that is assumed while it is not known: that of the largest usual models.
const UNKNOWN_CONTEXT: u64 = 1 << 20;
/// Largest number of prompt tokens per byte of the body: chat templates may write a character as `\uXXXX`.
const TOKENS_PER_BYTE: u64 = 4;
/// Largest number of tokens that a chat template adds to a prompt.
const TEMPLATE_TOKENS: u64 = 16 << 10;
/// Largest number of choices per request that is believed: several times the limit of main functions.
const MAX_CHOICES: u64 = 128;

/// Largest numbers of tokens that may be reported for one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UsageBound {
    prompt: u64,
    completion: u64,
}

impl UsageBound {
    /// Returns the bound of a request at `target` with a body of `bytes`. `context_length` is in tokens; 0: not
    /// known.
    pub(crate) fn new(fields: &RequestFields, target: &str, bytes: usize, context_length: usize) -> Self {
        let context = match context_length {
            0 => UNKNOWN_CONTEXT,
            known => known as u64,
        };
        let prompts = fields.prompts(target);
        // The end-of-sequence token counts as well.
        let per_choice = fields.max_tokens(target).map_or(context, |max| max.saturating_add(1).min(context));
        let choices = fields.choices().clamp(1, MAX_CHOICES);
        Self {
            prompt: prompts
                .saturating_mul(context)
                .min((bytes as u64).saturating_mul(TOKENS_PER_BYTE).saturating_add(TEMPLATE_TOKENS)),
            completion: prompts.saturating_mul(choices).saturating_mul(per_choice),
        }
    }

    /// Returns the numbers of tokens, each limited by its bound.
    pub(crate) fn clamp(&self, prompt: u64, completion: u64) -> (u64, u64) {
        (prompt.min(self.prompt), completion.min(self.completion))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Returns the bound of a request with `body` and a context of 1000 tokens.
    fn bound_of(target: &str, body: &Value) -> (u64, u64) {
        let body = body.to_string();
        let fields: RequestFields = remoe_http::parse_json(body.as_bytes()).unwrap();
        UsageBound::new(&fields, target, body.len(), 1000).clamp(u64::MAX, u64::MAX)
    }

    #[test]
    fn usage_is_bounded_by_request_and_context() {
        let chat = |fields: Value| bound_of("/v1/chat/completions", &fields).1;
        assert_eq!(chat(json!({"messages": []})), 1000);
        assert_eq!(chat(json!({"max_tokens": 7})), 8);
        assert_eq!(chat(json!({"max_tokens": 7, "max_completion_tokens": 9, "n": 4})), 40);
        // Main functions read this field in /v1/responses alone.
        assert_eq!(chat(json!({"max_output_tokens": 0})), 1000);
        assert_eq!(bound_of("/v1/responses", &json!({"max_output_tokens": 0, "max_tokens": 7})).1, 1);
        assert_eq!(bound_of("/v1/responses", &json!({"max_tokens": 7})).1, 1000);
        assert_eq!(bound_of("/v1/messages", &json!({"max_tokens": 7, "max_output_tokens": 0})).1, 8);
        assert_eq!(chat(json!({"max_tokens": u64::MAX, "n": 2})), 2000);
        // Main functions refuse these.
        assert_eq!(chat(json!({"max_tokens": "7", "n": [1]})), 1000);
        assert_eq!(chat(json!({"max_tokens": -7, "n": u64::MAX})), 128_000);
        assert_eq!(chat(json!({"max_tokens": null, "n": null, "prompt": null, "input": {}})), 1000);
    }

    #[test]
    fn each_prompt_has_a_context() {
        let target = "/v1/completions?x=1";
        let prompts = |prompt: Value| bound_of(target, &json!({"prompt": prompt, "max_tokens": 4}));
        assert_eq!(prompts(json!("a")), (1000, 5));
        assert_eq!(prompts(json!([1, 2, 3])), (1000, 5));
        assert_eq!(prompts(json!(["a", "b", "c"])), (3000, 15));
        assert_eq!(prompts(json!([[1, 2], [3]])), (2000, 10));
        assert_eq!(prompts(json!([])), (1000, 5));
        assert_eq!(bound_of("/v1/embeddings", &json!({"input": ["a", "b"]})).0, 2000);
        // Items of one prompt.
        assert_eq!(bound_of("/v1/responses", &json!({"input": [{}, {}, {}]})).0, 1000);
        // Hundreds of prompts in one small body.
        let many = json!({"prompt": vec!["a"; 500]});
        let bytes = many.to_string().len() as u64;
        assert_eq!(bound_of(target, &many).0, bytes * TOKENS_PER_BYTE + TEMPLATE_TOKENS);
    }

    #[test]
    fn unknown_context_is_bounded_too() {
        let bound = UsageBound::new(&RequestFields::default(), "/v1/chat/completions", usize::MAX, 0);
        assert_eq!(bound.clamp(u64::MAX, u64::MAX), (UNKNOWN_CONTEXT, UNKNOWN_CONTEXT));
        assert_eq!(bound.clamp(3, 4), (3, 4));
    }
}
