//! The pages that a request holds, lacks and gives back.

use super::choice::{OpenChoice, token_at};
use super::handle::RequestLimits;
use super::request::{ExpertTally, ExpertTime, Inspection, Request};
use super::sequence::{ActiveRequest, Stage};
use crate::backend::PAGE_POSITIONS;
use crate::pages::{Pages, SequenceCache};
use std::cmp::Reverse;

impl ActiveRequest {
    /// Returns the KV caches of its sequences.
    pub(crate) fn caches(&self) -> impl Iterator<Item = &SequenceCache> {
        let (prompt, choices) = match &self.stage {
            Stage::Prompt(cache) => (Some(cache), [].as_slice()),
            Stage::Choices(choices) => (None, choices.as_slice()),
        };
        prompt.into_iter().chain(choices.iter().map(|choice| &choice.cache))
    }

    /// Pages that the request will need soon beside those that it holds, `headroom` positions beyond its known
    /// tokens.
    pub(crate) fn growth(&self, headroom: usize, limits: &RequestLimits) -> usize {
        let prompt = &self.request().prompt;
        let soon = |known: usize| (known + headroom).min(most_positions(self.request()));
        match &self.stage {
            Stage::Prompt(cache) => {
                expected_pages(self.request(), headroom, limits).saturating_sub(cache.pages())
            }
            Stage::Choices(choices) => {
                let needs = |choice: &OpenChoice| {
                    let known = choice.known(prompt);
                    // All of them after a pause, else the last.
                    let rows = (known - choice.cache.length()).min(limits.prefill_rows);
                    limits.page_needs.pages(soon(known), rows).saturating_sub(choice.cache.pages())
                };
                choices.iter().map(needs).sum()
            }
        }
    }

    /// Blocks whose pages it lacks for `rows`, one for each of its sequences, and for the copies of the prompt's last
    /// page that further choices need.
    pub(crate) fn lacking(&self, rows: &[usize]) -> usize {
        let caches = self.caches().zip(rows).map(|(cache, rows)| cache.lacking(cache.length() + rows));
        caches.sum::<usize>() + self.lacking_copies(rows)
    }

    fn lacking_copies(&self, rows: &[usize]) -> usize {
        let prompt = self.request().prompt.len();
        match &self.stage {
            Stage::Prompt(cache)
                if rows.first().is_some_and(|rows| cache.length() + rows == prompt)
                    && !prompt.is_multiple_of(PAGE_POSITIONS) =>
            {
                self.request().choices - 1 - self.copies.len()
            }
            _ => 0,
        }
    }

    /// Takes the pages that it lacks for `rows`. False where there are not enough.
    pub(crate) fn reserve(&mut self, rows: &[usize], pages: &mut Pages) -> bool {
        for _ in 0..self.lacking_copies(rows) {
            match pages.take() {
                Some(page) => self.copies.push(page),
                None => return false,
            }
        }
        let mut reserve =
            |cache: &mut SequenceCache, rows: usize| cache.reserve(cache.length() + rows, pages);
        match &mut self.stage {
            Stage::Prompt(cache) => reserve(cache, rows.first().copied().unwrap_or(0)),
            Stage::Choices(choices) => {
                choices.iter_mut().zip(rows).all(|(choice, &rows)| reserve(&mut choice.cache, rows))
            }
        }
    }

    /// Looks its prompt up again, before its next rows: others may have computed more of it meanwhile. Returns the
    /// tokens that were found now and not before.
    pub(crate) fn look_up(&mut self, pages: &mut Pages) -> usize {
        let (wants_rows, tenant) = (self.wants_prompt_rows(), self.job.request.tenant);
        let prompt = &self.job.request.prompt;
        let Stage::Prompt(cache) = &mut self.stage else { return 0 };
        if wants_rows {
            return 0;
        }
        let found = pages.begin(tenant, |at| prompt[at], prompt.len());
        let more = found.length().saturating_sub(cache.length());
        if more > 0 {
            *cache = found;
            self.figures.cached_tokens += more;
        }
        more
    }

    /// Reports if it is worth waiting for `leader`, which is ahead of it with a prompt that begins alike and takes
    /// `rows` of it through the layers next: the request is then spared at least half as many rows.
    pub(crate) fn follows(&self, leader: &Self, rows: usize) -> bool {
        let (Stage::Prompt(cache), Stage::Prompt(ahead)) = (&self.stage, &leader.stage) else { return false };
        let (own, other) = (self.request(), leader.request());
        if own.tenant != other.tenant || own.priority < other.priority || self.wants_prompt_rows() {
            return false;
        }
        let pages = own.prompt.len().saturating_sub(1) / PAGE_POSITIONS;
        let mut page = cache.length() / PAGE_POSITIONS;
        let is_alike = |page: usize| {
            let page = page * PAGE_POSITIONS..(page + 1) * PAGE_POSITIONS;
            other.prompt.get(page.clone()).is_some_and(|others| own.prompt.get(page) == Some(others))
        };
        // What comes before is compared first: pages that differ there have nothing in common.
        if own.prompt.get(..cache.length()) != other.prompt.get(..cache.length()) {
            return false;
        }
        while page < pages && is_alike(page) {
            page += 1;
        }
        // The pages that the leader has filled are found already.
        let there = cache.length().max(ahead.length() / PAGE_POSITIONS * PAGE_POSITIONS);
        let gain = (page * PAGE_POSITIONS).saturating_sub(there);
        gain > 0 && 2 * gain >= rows
    }

    /// Reports if its prompt is further than that of `other`: computed further, or, if both are as far, under way or
    /// older.
    pub(crate) fn is_ahead_of(&self, other: &Self) -> bool {
        let done = |running: &Self| match &running.stage {
            Stage::Prompt(cache) => (cache.length(), running.pass.is_some(), Reverse(running.id)),
            Stage::Choices(_) => (0, false, Reverse(running.id)),
        };
        done(self) > done(other)
    }

    /// Takes what is kept of its known tokens: of the prompt, unless every row of it is wanted for something else
    /// than what follows; of choices that go on, all. To be called before it runs, for the first time and after
    /// every pause.
    pub(crate) fn begin(&mut self, pages: &mut Pages) {
        let wants_rows = self.wants_prompt_rows();
        let prompt = &self.job.request.prompt;
        let tenant = self.job.request.tenant;
        match &mut self.stage {
            Stage::Prompt(cache) => {
                let tokens = if wants_rows { 0 } else { prompt.len() };
                *cache = pages.begin(tenant, |at| prompt[at], tokens);
                self.figures.cached_tokens = cache.length();
            }
            Stage::Choices(choices) => {
                for choice in choices {
                    let known = choice.known(prompt);
                    let output = &choice.output;
                    choice.cache = pages.begin(tenant, |at| token_at(prompt, output, at), known);
                }
            }
        }
    }

    /// Keeps what has become full of its pages, for itself after a pause and for others.
    pub(crate) fn keep(&mut self, pages: &mut Pages) {
        let prompt = &self.job.request.prompt;
        match &mut self.stage {
            Stage::Prompt(cache) => pages.keep(cache, |at| prompt[at]),
            Stage::Choices(choices) => {
                for choice in choices {
                    let output = &choice.output;
                    pages.keep(&mut choice.cache, |at| token_at(prompt, output, at));
                }
            }
        }
    }

    /// Lets go of all pages. Known tokens that are not kept until then are forwarded again when the request goes on.
    pub(crate) fn pause(&mut self) {
        self.copies.clear();
        if let Some(spans) = &self.spans {
            spans.event("preempted: KV cache full");
        }
        let tenant = self.job.request.tenant;
        match &mut self.stage {
            Stage::Prompt(cache) => {
                *cache = SequenceCache::new(tenant);
                // Nothing of the prompt has been reported yet: it starts over.
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
            Stage::Choices(choices) => {
                for choice in choices {
                    choice.cache = SequenceCache::new(tenant);
                }
            }
        }
    }
}

/// Positions that one sequence of `request` comes to at most: the last token is not forwarded.
fn most_positions(request: &Request) -> usize {
    request.prompt.len() + request.max_tokens.saturating_sub(1)
}

/// Pages that `request` needs soon after its start, `headroom` positions beyond its prompt.
pub(crate) fn expected_pages(request: &Request, headroom: usize, limits: &RequestLimits) -> usize {
    let soon = (request.prompt.len() + headroom).min(most_positions(request));
    limits.page_needs.pages(soon, limits.prefill_rows.min(request.prompt.len())) * request.choices
}
