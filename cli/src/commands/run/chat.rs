//! A conversation as a prompt: rendered with the model's chat template, within its context.

use super::settings::SamplingSettings;
use crate::deployment::DesiredDeployment;
use crate::exit::CliError;
use remoe_model::text::{ChatTemplate, Tokenizer};
use remoe_proto::v1::{GenerateRequest, TokenIds, generate_request};
use serde_json::{Value, json};

/// Share of the context that an answer gets at least, where the conversation is long.
const ANSWER_SHARE: usize = 4;

pub(super) struct Chat {
    tokenizer: Tokenizer,
    /// Without one every prompt stands alone, as text to go on with.
    template: Option<ChatTemplate>,
    /// Positions of the model's context.
    context: usize,
    /// Messages so far, a user's message and its answer by turns.
    messages: Vec<Value>,
}

impl Chat {
    pub(super) fn open(wanted: &DesiredDeployment) -> Result<Self, CliError> {
        let checkpoint = &wanted.checkpoint;
        let tokenizer = Tokenizer::open_in(checkpoint.store(), checkpoint.config().vocab_size)?;
        let tokenizer = tokenizer.ok_or_else(|| {
            let message =
                "cannot chat with --model: missing tokenizer.json; use `remoe generate --prompt-ids`";
            CliError::arguments("--model", message)
        })?;
        let template = ChatTemplate::open_in(checkpoint.store())?;
        Ok(Self { tokenizer, template, context: wanted.inspection.served_context(), messages: Vec::new() })
    }

    pub(super) fn forget(&mut self) {
        self.messages.clear();
    }

    /// Remembers what was asked and answered.
    pub(super) fn note(&mut self, prompt: String, answer: String) {
        if self.template.is_some() {
            self.messages.extend([
                json!({"role": "user", "content": prompt}),
                json!({"role": "assistant", "content": answer}),
            ]);
        }
    }

    /// The request for an answer to `prompt`, and how many of the oldest messages it leaves out because they
    /// do not fit the context; those are forgotten.
    pub(super) fn ask(
        &mut self,
        prompt: &str,
        settings: &SamplingSettings,
    ) -> Result<(GenerateRequest, usize), CliError> {
        let wish = settings.max_tokens.map_or(usize::MAX, |most| most as usize);
        let room = wish.min(self.context / ANSWER_SHARE).max(1);
        let mut left_out = 0;
        let ids = loop {
            let ids = self.prompt_ids(&self.messages[left_out..], prompt, settings)?;
            if ids.len() + room <= self.context || left_out == self.messages.len() {
                break ids;
            }
            left_out += 2;
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
        self.messages.drain(..left_out);
        let request = GenerateRequest {
            prompt: Some(generate_request::Prompt::Ids(TokenIds { ids })),
            max_tokens: u32::try_from(wish.min(rest)).unwrap_or(u32::MAX),
            temperature: Some(settings.temperature),
            top_p: settings.top_p,
            top_k: settings.top_k,
            min_p: settings.min_p,
            repetition_penalty: settings.repetition_penalty,
            seed: settings.seed,
            stop: settings.stop.clone(),
            ignore_eos: false,
        };
        Ok((request, left_out))
    }

    fn prompt_ids(
        &self,
        before: &[Value],
        prompt: &str,
        settings: &SamplingSettings,
    ) -> Result<Vec<u32>, CliError> {
        let Some(template) = &self.template else { return Ok(self.tokenizer.encode(prompt, true)?) };
        let system = settings.system.iter().map(|text| json!({"role": "system", "content": text}));
        let now = json!({"role": "user", "content": prompt});
        let messages: Vec<Value> = system.chain(before.iter().cloned()).chain([now]).collect();
        // The template writes special tokens itself.
        Ok(self.tokenizer.encode(&template.render(&messages, true)?, false)?)
    }
}
