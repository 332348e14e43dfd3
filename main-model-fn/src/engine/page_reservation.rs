//! KV cache pages of a request: reservation, prefix cache lookup, and release.

use super::active_request::{ActiveRequest, RequestStage};
use super::choice::{OpenChoice, token_at};
use super::handle::RequestLimits;
use super::request::{ExpertTally, ExpertTime, Inspection, Request};
use crate::backend::PAGE_POSITIONS;
use crate::pages::{KvPagePool, SequenceCache};
use std::cmp::Reverse;

impl ActiveRequest {
    /// Returns the KV caches of the request's sequences.
    pub(crate) fn caches(&self) -> impl Iterator<Item = &SequenceCache> {
        let (prompt, choices) = match &self.stage {
            RequestStage::Prompt(cache) => (Some(cache), [].as_slice()),
            RequestStage::Choices(choices) => (None, choices.as_slice()),
        };
        prompt.into_iter().chain(choices.iter().map(|choice| &choice.cache))
    }

    /// Returns the pages that the request will soon need in addition to those it holds, for `headroom` positions beyond its known
    /// tokens.
    pub(crate) fn expected_growth(&self, headroom: usize, limits: &RequestLimits) -> usize {
        let prompt = &self.request().prompt;
        let soon = |known: usize| (known + headroom).min(max_positions(self.request()));
        match &self.stage {
            RequestStage::Prompt(cache) => {
                expected_pages(self.request(), headroom, limits).saturating_sub(cache.pages())
            }
            RequestStage::Choices(choices) => {
                let needs = |choice: &OpenChoice| {
                    let known = choice.known_tokens(prompt);
                    // After a preemption all known tokens are forwarded again, otherwise the last.
                    let rows = (known - choice.cache.length()).min(limits.prefill_rows);
                    limits.page_needs.pages(soon(known), rows).saturating_sub(choice.cache.pages())
                };
                choices.iter().map(needs).sum()
            }
        }
    }

    /// Returns the blocks to allocate for `rows`, which has the rows of each sequence, and for the copies of the prompt's
    /// last page that further choices need.
    pub(crate) fn missing_blocks(&self, rows: &[usize]) -> usize {
        let caches = self.caches().zip(rows).map(|(cache, rows)| cache.missing_blocks(cache.length() + rows));
        caches.sum::<usize>() + self.missing_copies(rows)
    }

    fn missing_copies(&self, rows: &[usize]) -> usize {
        let prompt = self.request().prompt.len();
        match &self.stage {
            RequestStage::Prompt(cache)
                if rows.first().is_some_and(|rows| cache.length() + rows == prompt)
                    && !prompt.is_multiple_of(PAGE_POSITIONS) =>
            {
                self.request().choices - 1 - self.copies.len()
            }
            _ => 0,
        }
    }

    /// Allocates the blocks that are missing for `rows`. Returns false if the pool cannot free enough.
    pub(crate) fn reserve(&mut self, rows: &[usize], pages: &mut KvPagePool) -> bool {
        for _ in 0..self.missing_copies(rows) {
            match pages.allocate_block() {
                Some(block) => self.copies.push(block),
                None => return false,
            }
        }
        let mut reserve =
            |cache: &mut SequenceCache, rows: usize| cache.reserve(cache.length() + rows, pages);
        match &mut self.stage {
            RequestStage::Prompt(cache) => reserve(cache, rows.first().copied().unwrap_or(0)),
            RequestStage::Choices(choices) => {
                choices.iter_mut().zip(rows).all(|(choice, &rows)| reserve(&mut choice.cache, rows))
            }
        }
    }

    /// Looks up the prompt in the prefix cache again, because other requests may have computed more of it meanwhile.
    ///
    /// Returns the number of tokens that were found now and not before.
    pub(crate) fn extend_cached_prefix(&mut self, pages: &mut KvPagePool) -> usize {
        let (wants_rows, scope) = (self.wants_prompt_rows(), self.queued.request.tenant);
        let prompt = &self.queued.request.prompt;
        let RequestStage::Prompt(cache) = &mut self.stage else { return 0 };
        if wants_rows {
            return 0;
        }
        let found = pages.begin_sequence(scope, |position| prompt[position], prompt.len());
        let more = found.length().saturating_sub(cache.length());
        if more > 0 {
            *cache = found;
            self.figures.cached_tokens += more;
        }
        more
    }

    /// Reports if the prompt should wait for `leader`, a request that is ahead with a common prefix.
    ///
    /// `rows` is the size of the leader's next prefill. Waiting is worth it if the request is then spared at least half as
    /// many rows.
    pub(crate) fn should_follow(&self, leader: &Self, rows: usize) -> bool {
        let (RequestStage::Prompt(cache), RequestStage::Prompt(leader_cache)) = (&self.stage, &leader.stage)
        else {
            return false;
        };
        let (own, other) = (self.request(), leader.request());
        if own.tenant != other.tenant || own.priority < other.priority || self.wants_prompt_rows() {
            return false;
        }
        let blocks = own.prompt.len().saturating_sub(1) / PAGE_POSITIONS;
        let mut common = cache.length() / PAGE_POSITIONS;
        let is_common = |block: usize| {
            let block = block * PAGE_POSITIONS..(block + 1) * PAGE_POSITIONS;
            other.prompt.get(block.clone()).is_some_and(|tokens| own.prompt.get(block) == Some(tokens))
        };
        // If the cached parts differ, no later block can be shared.
        if own.prompt.get(..cache.length()) != other.prompt.get(..cache.length()) {
            return false;
        }
        while common < blocks && is_common(common) {
            common += 1;
        }
        // Full pages of the leader are in the prefix cache already.
        let available = cache.length().max(leader_cache.length() / PAGE_POSITIONS * PAGE_POSITIONS);
        let gain = (common * PAGE_POSITIONS).saturating_sub(available);
        gain > 0 && 2 * gain >= rows
    }

    /// Reports if the prompt is further than that of `other`: more positions computed, then prefill under way, then older.
    pub(crate) fn is_ahead_of(&self, other: &Self) -> bool {
        let progress = |request: &Self| match &request.stage {
            RequestStage::Prompt(cache) => (cache.length(), request.prefill.is_some(), Reverse(request.id)),
            RequestStage::Choices(_) => (0, false, Reverse(request.id)),
        };
        progress(self) > progress(other)
    }

    /// Starts the request's sequences from the prefix cache, for the first time and after every preemption.
    ///
    /// A prompt starts without cached positions if [every row](Self::wants_prompt_rows) of it is needed.
    pub(crate) fn begin_sequences(&mut self, pages: &mut KvPagePool) {
        let wants_rows = self.wants_prompt_rows();
        let prompt = &self.queued.request.prompt;
        let scope = self.queued.request.tenant;
        match &mut self.stage {
            RequestStage::Prompt(cache) => {
                let tokens = if wants_rows { 0 } else { prompt.len() };
                *cache = pages.begin_sequence(scope, |position| prompt[position], tokens);
                self.figures.cached_tokens = cache.length();
            }
            RequestStage::Choices(choices) => {
                for choice in choices {
                    let known = choice.known_tokens(prompt);
                    let output = &choice.output;
                    choice.cache =
                        pages.begin_sequence(scope, |position| token_at(prompt, output, position), known);
                }
            }
        }
    }

    /// Adds the request's full pages to the prefix cache, for other requests and for itself after a preemption.
    pub(crate) fn cache_full_pages(&mut self, pages: &mut KvPagePool) {
        let prompt = &self.queued.request.prompt;
        match &mut self.stage {
            RequestStage::Prompt(cache) => pages.cache_full_pages(cache, |position| prompt[position]),
            RequestStage::Choices(choices) => {
                for choice in choices {
                    let output = &choice.output;
                    pages.cache_full_pages(&mut choice.cache, |position| token_at(prompt, output, position));
                }
            }
        }
    }

    /// Releases all pages. When the request continues, known tokens that left the prefix cache are forwarded again.
    pub(crate) fn release_pages(&mut self) {
        self.copies.clear();
        if let Some(spans) = &self.spans {
            spans.event("preempted: KV cache full");
        }
        let scope = self.queued.request.tenant;
        match &mut self.stage {
            RequestStage::Prompt(cache) => {
                *cache = SequenceCache::new(scope);
                // No result of the prompt has been reported yet: its records start over.
                self.prompt_logprobs.clear();
                self.states.clear();
                self.inspection = Inspection::default();
                self.figures.forwarded_positions = 0;
                self.figures.experts = ExpertTally::default();
                self.figures.prefill_experts = ExpertTime::default();
                if let Some(recording) = &mut self.recording {
                    recording.restart();
                }
                if let Some(activations) = &mut self.figures.activations {
                    activations.restart();
                }
            }
            RequestStage::Choices(choices) => {
                for choice in choices {
                    choice.cache = SequenceCache::new(scope);
                }
            }
        }
    }
}

/// Returns the most positions that one sequence of `request` can have: the last token is not forwarded.
fn max_positions(request: &Request) -> usize {
    request.prompt.len() + request.max_tokens.saturating_sub(1)
}

/// Returns the pages that `request` needs soon after its start, for `headroom` positions beyond its prompt.
pub(crate) fn expected_pages(request: &Request, headroom: usize, limits: &RequestLimits) -> usize {
    let soon = (request.prompt.len() + headroom).min(max_positions(request));
    limits.page_needs.pages(soon, limits.prefill_rows.min(request.prompt.len())) * request.choices
}
