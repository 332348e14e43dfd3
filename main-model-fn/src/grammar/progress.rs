//! A compiled grammar, and the progress of one choice in it.

use llguidance::Matcher;
use llguidance::api::StopReason;
use llguidance::toktrie::SimpleVob;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Grammar that an answer must match. Clones share the compiled state.
#[derive(Clone)]
pub struct Grammar(Arc<Compiled>);

struct Compiled {
    /// Matcher before the first token. Clones share the states of its lexer.
    beginning: Mutex<Matcher>,
    /// True once the library failed on it; it must not be used again.
    has_failed: AtomicBool,
}

/// Failure of the library on a grammar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum GrammarError {
    /// A token takes more work than allowed.
    #[error("grammar too complex for this answer: {0}")]
    Work(String),
    /// The grammar has no end for the answer so far.
    #[error("the grammar allows no next token")]
    NoToken,
}

impl Grammar {
    pub(super) fn new(beginning: Matcher) -> Self {
        Self(Arc::new(Compiled { beginning: Mutex::new(beginning), has_failed: AtomicBool::new(false) }))
    }

    pub(super) fn has_failed(&self) -> bool {
        self.0.has_failed.load(Ordering::Relaxed)
    }

    /// Returns the progress before the first token.
    pub(crate) fn begin(&self) -> GrammarProgress {
        let beginning = self.0.beginning.lock().unwrap_or_else(PoisonError::into_inner);
        GrammarProgress { matcher: beginning.clone(), grammar: self.clone() }
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammar")
    }
}

impl PartialEq for Grammar {
    /// Reports if both are the same compiled grammar.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Set of tokens that may come next.
pub(crate) struct Mask(SimpleVob);

impl Mask {
    /// Reports if `token` may come next.
    #[cfg(test)]
    pub(super) fn allows(&self, token: u32) -> bool {
        self.0.is_allowed(token)
    }

    /// Sets the logits of all other tokens to minus infinity.
    pub(crate) fn apply(&self, logits: &mut [f32]) {
        let words = self.0.as_slice();
        for (chunk, word) in logits.chunks_mut(32).zip(words.iter().copied().chain(std::iter::repeat(0))) {
            match word {
                u32::MAX => (),
                0 => chunk.fill(f32::NEG_INFINITY),
                word => {
                    for (bit, logit) in chunk.iter_mut().enumerate() {
                        if word & (1 << bit) == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }
}

/// Progress of one choice in its grammar.
pub(crate) struct GrammarProgress {
    matcher: Matcher,
    grammar: Grammar,
}

impl GrammarProgress {
    /// Returns the tokens that may come next, at least one. Tokens that end the answer are included only where it may end.
    ///
    /// # Errors
    /// Fails if the computation takes more work than allowed for a token.
    pub(crate) fn mask(&mut self) -> Result<Mask, GrammarError> {
        let mask = self.matcher.compute_mask();
        mask.map(Mask).map_err(|error| self.failed(&error.to_string()))
    }

    /// Advances by `token`, which the last mask allowed. Returns true if nothing can follow it.
    ///
    /// # Errors
    /// Fails if the library does.
    pub(crate) fn step(&mut self, token: u32) -> Result<bool, GrammarError> {
        self.matcher.consume_token(token).map_err(|error| self.failed(&error.to_string()))?;
        Ok(self.matcher.is_stopped())
    }

    fn failed(&self, message: &str) -> GrammarError {
        self.grammar.0.has_failed.store(true, Ordering::Relaxed);
        match has_no_token(&self.matcher, message) {
            true => GrammarError::NoToken,
            false => GrammarError::Work(first_line(message)),
        }
    }
}

/// Reports if `matcher` failed with `message` because no token can come next.
pub(super) fn has_no_token(matcher: &Matcher, message: &str) -> bool {
    matcher.stop_reason() == StopReason::NoExtensionBias || message.contains("NoExtensionBias")
}

/// Returns the first line of the library's message; the others contain its state.
pub(super) fn first_line(message: &str) -> String {
    const CHARACTERS: usize = 300;
    message.lines().next().unwrap_or_default().chars().take(CHARACTERS).collect()
}
