//! The prompt of a one-shot command in the forms of the wire.

use crate::args::PromptArgs;
use crate::exit::CliError;
use remoe_wire::v1::{TokenIds, generate_request, inspect_request};

impl PromptArgs {
    /// Refuses token ids that the model does not have, before anything is started.
    pub(crate) fn check(&self, vocab_size: usize) -> Result<(), CliError> {
        let unknown = self.prompt_ids.iter().find(|&&id| id as usize >= vocab_size);
        unknown.map_or(Ok(()), |id| {
            let message = format!("there is no token {id}, the model has tokens 0 to {}", vocab_size - 1);
            Err(CliError::arguments("--prompt-ids", message))
        })
    }

    pub(crate) fn for_generation(&self) -> generate_request::Prompt {
        match &self.prompt {
            Some(text) if self.chat => generate_request::Prompt::Chat(text.clone()),
            Some(text) => generate_request::Prompt::Text(text.clone()),
            None => generate_request::Prompt::Ids(self.ids()),
        }
    }

    pub(crate) fn for_inspection(&self) -> inspect_request::Prompt {
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
