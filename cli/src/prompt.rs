//! Prompt of a command that sends one request.

use crate::exit::CliError;
use clap::Args;
use remoe_model::text::{ChatTemplate, Tokenizer};
use remoe_model::{Checkpoint, Inspection};
use remoe_proto::v1::{TokenIds, generate_request, inspect_request};

/// The prompt, in one of its forms.
#[derive(Debug, Args)]
pub(crate) struct PromptArgs {
    /// Prompt as text
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_ids", conflicts_with = "prompt_ids")]
    pub(crate) prompt: Option<String>,
    /// Prompt as token ids, used as they are
    #[arg(long, value_name = "ID,ID,..", value_delimiter = ',', num_args = 1, value_parser = token_id)]
    pub(crate) prompt_ids: Vec<u32>,
    /// Apply the model's chat template to the prompt, as a user message
    #[arg(long, requires = "prompt", conflicts_with = "prompt_ids")]
    pub(crate) chat: bool,
}

fn token_id(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| "expected token ids as whole numbers".to_owned())
}

/// Tokenises `text`, the value of `flag`. With `special`, adds the special tokens of the tokenizer's post-processor.
pub(crate) fn tokens(
    checkpoint: &Checkpoint,
    text: &str,
    special: bool,
    flag: &str,
) -> Result<Vec<u32>, CliError> {
    let tokenizer = Tokenizer::open_in(checkpoint.store(), checkpoint.config().vocab_size)?;
    let tokenizer = tokenizer.ok_or_else(|| {
        let remedy = if flag == "--prompt" { "; use --prompt-ids" } else { "" };
        let message = format!("cannot tokenise {flag}: the model has no tokenizer.json{remedy}");
        CliError::arguments(flag, message)
    })?;
    Ok(tokenizer.encode(text, special)?)
}

impl PromptArgs {
    /// Returns the prompt's token ids, as the main function will compute them.
    pub(crate) fn tokens(&self, checkpoint: &Checkpoint) -> Result<Vec<u32>, CliError> {
        match &self.prompt {
            None => Ok(self.prompt_ids.clone()),
            Some(text) if self.chat => {
                let template = ChatTemplate::open_in(checkpoint.store())?;
                let template = template.ok_or_else(|| {
                    let message = "cannot apply --chat: the model has no chat template; omit the flag";
                    CliError::arguments("--chat", message)
                })?;
                let message = serde_json::json!({"role": "user", "content": text});
                // The template already contains the special tokens.
                tokens(checkpoint, &template.render(&[message], true)?, false, "--prompt")
            }
            Some(text) => tokens(checkpoint, text, true, "--prompt"),
        }
    }

    /// Checks the token ids against the vocabulary, and the prompt with `max_tokens` against the context length.
    pub(crate) fn check(&self, inspection: &Inspection, max_tokens: u32) -> Result<(), CliError> {
        let unknown = self.prompt_ids.iter().find(|&&id| id as usize >= inspection.vocab_size);
        if let Some(id) = unknown {
            let message = format!(
                "invalid --prompt-ids: expected token ids from 0 to {}, got {id}",
                inspection.vocab_size - 1
            );
            return Err(CliError::arguments("--prompt-ids", message));
        }
        let (prompt, context) = (self.prompt_ids.len(), inspection.served_context());
        if prompt.saturating_add(max_tokens as usize) > context {
            let message = format!(
                "invalid --max-tokens: the prompt ({prompt}) and the answer ({max_tokens}) exceed the context of \
                 {context} tokens"
            );
            return Err(CliError::arguments("--max-tokens", message));
        }
        Ok(())
    }

    pub(crate) fn to_generate_prompt(&self) -> generate_request::Prompt {
        match &self.prompt {
            Some(text) if self.chat => generate_request::Prompt::Chat(text.clone()),
            Some(text) => generate_request::Prompt::Text(text.clone()),
            None => generate_request::Prompt::Ids(self.ids()),
        }
    }

    pub(crate) fn to_inspect_prompt(&self) -> inspect_request::Prompt {
        match &self.prompt {
            Some(text) if self.chat => inspect_request::Prompt::Chat(text.clone()),
            Some(text) => inspect_request::Prompt::Text(text.clone()),
            None => inspect_request::Prompt::Ids(self.ids()),
        }
    }

    fn ids(&self) -> TokenIds {
        TokenIds { ids: self.prompt_ids.clone() }
    }
}
