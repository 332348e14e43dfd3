//! Conversation that is rendered as a prompt with the model's chat template, within its context length.

use super::settings::SamplingSettings;
use crate::deployment::DesiredDeployment;
use crate::exit::CliError;
use remoe_model::text::{ChatTemplate, Tokenizer};
use remoe_proto::v1::{GenerateRequest, TokenIds, generate_request};
use serde_json::{Value, json};

/// Fraction of the context that is reserved for the answer, as a divisor. Older messages are dropped for it.
const ANSWER_DIVISOR: usize = 4;

pub(super) struct Chat {
    tokenizer: Tokenizer,
    /// Chat template. `None`: each prompt is completed as text, without a conversation.
    template: Option<ChatTemplate>,
    /// Context length in tokens.
    context: usize,
    /// Previous messages, alternately of the user and the assistant.
    messages: Vec<Value>,
}

impl Chat {
    pub(super) fn open(desired: &DesiredDeployment) -> Result<Self, CliError> {
        let checkpoint = &desired.checkpoint;
        let tokenizer = Tokenizer::open_in(checkpoint.store(), checkpoint.config().vocab_size)?;
        let tokenizer = tokenizer.ok_or_else(|| {
            let message =
                "cannot chat with --model: missing tokenizer.json; use `remoe generate --prompt-ids`";
            CliError::arguments("--model", message)
        })?;
        let template = ChatTemplate::open_in(checkpoint.store())?;
        Ok(Self { tokenizer, template, context: desired.inspection.served_context(), messages: Vec::new() })
    }

    pub(super) fn clear(&mut self) {
        self.messages.clear();
    }

    /// Adds a prompt and its answer to the conversation.
    pub(super) fn add_turn(&mut self, prompt: String, answer: String) {
        if self.template.is_some() {
            self.messages.extend([
                json!({"role": "user", "content": prompt}),
                json!({"role": "assistant", "content": answer}),
            ]);
        }
    }

    /// Builds the request for `prompt`. Drops the oldest messages if they exceed the context, and returns their number.
    pub(super) fn build_request(
        &mut self,
        prompt: &str,
        settings: &SamplingSettings,
    ) -> Result<(GenerateRequest, usize), CliError> {
        let max_tokens = settings.max_tokens.map_or(usize::MAX, |limit| limit as usize);
        let reserved = max_tokens.min(self.context / ANSWER_DIVISOR).max(1);
        let mut dropped = 0;
        let ids = loop {
            let ids = self.prompt_ids(&self.messages[dropped..], prompt, settings)?;
            if ids.len() + reserved <= self.context || dropped == self.messages.len() {
                break ids;
            }
            dropped += 2;
        };
        let rest = self.context.saturating_sub(ids.len());
        if rest == 0 {
            let message = format!(
                "cannot answer: the prompt has {} tokens, the context holds {}; shorten the prompt",
                ids.len(),
                self.context
            );
            return Err(CliError::arguments("PROMPT", message));
        }
        self.messages.drain(..dropped);
        let request = GenerateRequest {
            prompt: Some(generate_request::Prompt::Ids(TokenIds { ids })),
            max_tokens: u32::try_from(max_tokens.min(rest)).unwrap_or(u32::MAX),
            temperature: Some(settings.temperature),
            top_p: settings.top_p,
            top_k: settings.top_k,
            min_p: settings.min_p,
            repetition_penalty: settings.repetition_penalty,
            seed: settings.seed,
            stop: settings.stop.clone(),
            ignore_eos: false,
        };
        Ok((request, dropped))
    }

    fn prompt_ids(
        &self,
        messages: &[Value],
        prompt: &str,
        settings: &SamplingSettings,
    ) -> Result<Vec<u32>, CliError> {
        let Some(template) = &self.template else { return Ok(self.tokenizer.encode(prompt, true)?) };
        let system = settings.system.iter().map(|text| json!({"role": "system", "content": text}));
        let prompt = json!({"role": "user", "content": prompt});
        let messages: Vec<Value> = system.chain(messages.iter().cloned()).chain([prompt]).collect();
        // The template already contains the special tokens.
        Ok(self.tokenizer.encode(&template.render(&messages, true)?, false)?)
    }
}
