//! One choice (continuation) of a prompt.

use super::text_stream::TextStream;
use super::thought::Thought;
use crate::grammar::GrammarProgress;
use crate::pages::SequenceCache;
use std::collections::HashMap;

/// A choice that has not ended.
pub(super) struct OpenChoice {
    pub(super) index: usize,
    pub(super) cache: SequenceCache,
    /// Generated tokens. The last is not forwarded yet; after a preemption, the others and the prompt are not either.
    pub(super) output: Vec<u32>,
    /// Number of occurrences of each generated token.
    pub(super) counts: HashMap<u32, u32>,
    pub(super) text: Option<TextStream>,
    pub(super) progress: Option<GrammarProgress>,
    /// Set if the request has a thought budget.
    pub(super) thought: Option<Thought>,
    /// Rows of the choice in the current iteration.
    pub(super) iteration_rows: usize,
}

impl OpenChoice {
    /// Returns the number of known tokens: the prompt and the output.
    pub(super) fn known_tokens(&self, prompt: &[u32]) -> usize {
        prompt.len() + self.output.len()
    }

    /// Returns how many tokens can be forwarded next.
    pub(super) fn pending_rows(&self, prompt: &[u32]) -> usize {
        next_tokens(prompt, &self.output, self.cache.length()).len()
    }

    /// Takes `rows` tokens for the next iteration. Returns the tokens, the cache, and true if every known token is
    /// forwarded then, so that another can be sampled.
    pub(super) fn take_rows<'a>(
        &'a mut self,
        prompt: &'a [u32],
        rows: usize,
    ) -> (&'a [u32], &'a mut SequenceCache, bool) {
        self.iteration_rows = rows;
        let done = self.cache.length();
        let is_complete = done + rows == self.known_tokens(prompt);
        (&next_tokens(prompt, &self.output, done)[..rows], &mut self.cache, is_complete)
    }

    /// Reports if a token can be sampled from the current iteration: its rows were the last known tokens. A preempted
    /// choice that forwards its tokens again may have more to come.
    pub(super) fn is_due(&self, prompt: &[u32]) -> bool {
        self.iteration_rows > 0 && self.cache.length() == self.known_tokens(prompt)
    }
}

/// Returns the token at `position` of a prompt and its output.
pub(super) fn token_at(prompt: &[u32], output: &[u32], position: usize) -> u32 {
    match position.checked_sub(prompt.len()) {
        Some(position) => output[position],
        None => prompt[position],
    }
}

/// Returns the tokens behind the first `done`: the rest of the prompt, or else the rest of the output.
fn next_tokens<'a>(prompt: &'a [u32], output: &'a [u32], done: usize) -> &'a [u32] {
    match done.checked_sub(prompt.len()) {
        Some(done) => &output[done..],
        None => &prompt[done..],
    }
}
