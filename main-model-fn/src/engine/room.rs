//! The cache positions that a request holds, will need, and gives back.

use super::request::{ExpertTally, ExpertTime, Inspection, Request};
use super::scheduler::grown;
use super::sequence::{Running, Stage, StepError};
use crate::transformer::SequenceCache;

/// Cache positions beyond its known tokens that a sequence is thought to need soon, when it is decided
/// whether another request can start beside it.
const HEADROOM: usize = 128;

impl Running {
    fn caches(&self) -> Vec<&SequenceCache> {
        match &self.stage {
            Stage::Prompt(cache) => vec![cache],
            Stage::Choices(choices) => choices.iter().map(|choice| &choice.cache).collect(),
        }
    }

    /// Bytes of keys and values.
    pub(crate) fn cache_bytes(&self) -> usize {
        self.caches().into_iter().map(SequenceCache::bytes).sum()
    }

    /// Cache positions that the request holds or will need soon.
    pub(crate) fn expected_positions(&self) -> usize {
        let soon = |known: usize| (known + HEADROOM).min(most_positions(self.request()));
        match &self.stage {
            Stage::Prompt(cache) => expected_positions(self.request()).max(cache.capacity()),
            Stage::Choices(choices) => choices
                .iter()
                .map(|choice| soon(choice.known(&self.request().prompt)).max(choice.cache.capacity()))
                .sum(),
        }
    }

    /// Cache positions that the request holds at least once `rows` have been forwarded, copies of the
    /// prompt for further choices included.
    pub(crate) fn least_positions(&self, rows: &[usize]) -> usize {
        let prompt = self.request().prompt.len();
        let mut positions = 0;
        for (cache, rows) in self.caches().into_iter().zip(rows) {
            let length = cache.length() as usize + rows;
            positions += length.max(cache.capacity());
            if matches!(self.stage, Stage::Prompt(_)) && length == prompt {
                positions += (self.request().choices - 1) * prompt;
            }
        }
        positions
    }

    /// Makes room for `rows`, and for later ones as far as `spare` positions allow, which it takes
    /// from.
    pub(crate) fn reserve(&mut self, rows: &[usize], spare: &mut usize) -> Result<(), StepError> {
        let most = most_positions(self.request());
        let mut reserve = |cache: &mut SequenceCache, rows: usize| {
            let needed = cache.length() as usize + rows;
            let capacity = grown(cache.capacity(), needed, most, *spare);
            *spare -= capacity - needed.max(cache.capacity());
            cache.reserve(capacity)
        };
        match &mut self.stage {
            Stage::Prompt(cache) => reserve(cache, rows.first().copied().unwrap_or(0))?,
            Stage::Choices(choices) => {
                for (choice, &rows) in choices.iter_mut().zip(rows) {
                    reserve(&mut choice.cache, rows)?;
                }
            }
        }
        Ok(())
    }

    /// Gives all cache positions back. Known tokens are forwarded again when the request goes on.
    pub(crate) fn pause(&mut self) -> Result<(), StepError> {
        match &mut self.stage {
            Stage::Prompt(cache) => {
                cache.release()?;
                // Nothing of the prompt has been reported yet: it begins anew.
                self.prompt_logprobs.clear();
                self.inspection = Inspection::default();
                self.figures.forwarded_positions = 0;
                self.figures.experts = ExpertTally::default();
                self.figures.prefill_experts = ExpertTime::default();
                if let Some(recording) = &mut self.recording {
                    recording.restart();
                }
            }
            Stage::Choices(choices) => {
                for choice in choices {
                    choice.cache.release()?;
                }
            }
        }
        Ok(())
    }
}

/// Cache positions that one sequence of `request` comes to at most: the last token is not forwarded.
fn most_positions(request: &Request) -> usize {
    request.prompt.len() + request.max_tokens.saturating_sub(1)
}

/// Cache positions that `request` needs soon after its start.
pub(crate) fn expected_positions(request: &Request) -> usize {
    (request.prompt.len() + HEADROOM).min(most_positions(request)) * request.choices
}
