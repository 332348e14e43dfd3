//! One continuation of a prompt.

use super::text_stream::TextStream;
use super::thought::Thought;
use crate::grammar::GrammarProgress;
use crate::pages::SequenceCache;
use std::collections::HashMap;

/// A continuation that has not ended.
pub(super) struct OpenChoice {
    pub(super) index: usize,
    pub(super) cache: SequenceCache,
    /// Drawn tokens. The last is not forwarded yet; after a pause the prompt and the others are not
    /// either.
    pub(super) output: Vec<u32>,
    pub(super) counts: HashMap<u32, u32>,
    pub(super) text: Option<TextStream>,
    pub(super) progress: Option<GrammarProgress>,
    /// Where thoughts have a budget.
    pub(super) thought: Option<Thought>,
    /// Rows in the iteration that goes on.
    pub(super) taken: usize,
}

impl OpenChoice {
    /// Known tokens, the prompt's included.
    pub(super) fn known(&self, prompt: &[u32]) -> usize {
        prompt.len() + self.output.len()
    }

    /// How many tokens can be forwarded next.
    pub(super) fn pending(&self, prompt: &[u32]) -> usize {
        next_tokens(prompt, &self.output, self.cache.length()).len()
    }

    /// Takes `rows` tokens for the next iteration: the tokens, their cache, and whether every known
    /// token has been forwarded then, so that another can be drawn.
    pub(super) fn take<'a>(
        &'a mut self,
        prompt: &'a [u32],
        rows: usize,
    ) -> (&'a [u32], &'a mut SequenceCache, bool) {
        self.taken = rows;
        let done = self.cache.length();
        let complete = done + rows == self.known(prompt);
        (&next_tokens(prompt, &self.output, done)[..rows], &mut self.cache, complete)
    }

    /// Reports if the iteration's rows were its last known tokens, so that its next token can be drawn. A choice that
    /// forwards again what it had before a preemption is not due yet.
    pub(super) fn is_due(&self, prompt: &[u32]) -> bool {
        self.taken > 0 && self.cache.length() == self.known(prompt)
    }
}

/// Token `position` of a prompt and its output.
pub(super) fn token_at(prompt: &[u32], output: &[u32], position: usize) -> u32 {
    match position.checked_sub(prompt.len()) {
        Some(position) => output[position],
        None => prompt[position],
    }
}

/// The tokens after the first `done` ones, as far as they lie together.
fn next_tokens<'a>(prompt: &'a [u32], output: &'a [u32], done: usize) -> &'a [u32] {
    match done.checked_sub(prompt.len()) {
        Some(done) => &output[done..],
        None => &prompt[done..],
    }
}
