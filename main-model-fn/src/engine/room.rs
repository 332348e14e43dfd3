//! The pages that a request holds, lacks and gives back.

use super::choice::token_at;
use super::request::{ExpertTally, ExpertTime, Inspection, Request};
use super::sequence::{Running, Stage};
use crate::backend::PAGE_POSITIONS;
use crate::pages::{Pages, SequenceCache, pages_of};

impl Running {
    /// What it holds keys and values of.
    pub(crate) fn caches(&self) -> impl Iterator<Item = &SequenceCache> {
        let (prompt, choices) = match &self.stage {
            Stage::Prompt(cache) => (Some(cache), [].as_slice()),
            Stage::Choices(choices) => (None, choices.as_slice()),
        };
        prompt.into_iter().chain(choices.iter().map(|choice| &choice.cache))
    }

    /// Pages that the request will need soon beside those that it holds, `headroom` positions beyond its known
    /// tokens.
    pub(crate) fn growth(&self, headroom: usize) -> usize {
        let prompt = &self.request().prompt;
        let soon = |known: usize| (known + headroom).min(most_positions(self.request()));
        match &self.stage {
            Stage::Prompt(cache) => expected_pages(self.request(), headroom).saturating_sub(cache.pages()),
            Stage::Choices(choices) => {
                choices.iter().map(|choice| choice.cache.lacking(soon(choice.known(prompt)))).sum()
            }
        }
    }

    /// Pages that it lacks for `rows`, one for each of its sequences, and for the copies of the prompt's last page
    /// that further choices need.
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
                // Nothing of the prompt has been reported yet: it begins anew.
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
pub(crate) fn expected_pages(request: &Request, headroom: usize) -> usize {
    pages_of((request.prompt.len() + headroom).min(most_positions(request))) * request.choices
}
