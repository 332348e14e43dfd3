//! A compiled grammar, and how far one choice has come in it.

use llguidance::Matcher;
use llguidance::api::StopReason;
use llguidance::toktrie::SimpleVob;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Grammar that an answer must match. Clones share what was compiled.
#[derive(Clone)]
pub struct Grammar(Arc<Compiled>);

struct Compiled {
    /// At its beginning. What its lexer has learnt is shared with all that is cloned from it.
    beginning: Mutex<Matcher>,
    /// The library has given up on it; it must not serve again.
    has_failed: AtomicBool,
}

/// The library cannot go on with a grammar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum GrammarError {
    /// A token takes more than is allowed for one.
    #[error("grammar too complex for this answer: {0}")]
    Work(String),
    /// The answer so far has no end in the grammar.
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

    /// The beginning of an answer.
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

/// Which tokens may come next.
pub(crate) struct Mask(SimpleVob);

impl Mask {
    /// Reports if `token` may come next.
    #[cfg(test)]
    pub(super) fn allows(&self, token: u32) -> bool {
        self.0.is_allowed(token)
    }

    /// Makes all others impossible.
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

/// How far a choice has come in its grammar.
pub(crate) struct GrammarProgress {
    matcher: Matcher,
    grammar: Grammar,
}

impl GrammarProgress {
    /// Which tokens may come next: at least one, tokens that end the answer only where it may end.
    ///
    /// # Errors
    /// Finding them takes more work than is allowed for a token.
    pub(crate) fn mask(&mut self) -> Result<Mask, GrammarError> {
        let mask = self.matcher.compute_mask();
        mask.map(Mask).map_err(|error| self.failed(&error.to_string()))
    }

    /// Goes on by `token`, which the last mask allowed. True when nothing can follow it.
    ///
    /// # Errors
    /// The library cannot go on.
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

/// Reports if `matcher` gave up with `message` because no token can come next.
pub(super) fn has_no_token(matcher: &Matcher, message: &str) -> bool {
    matcher.stop_reason() == StopReason::NoExtensionBias || message.contains("NoExtensionBias")
}

/// Returns the part of the library's message that is for people: its state follows on further lines.
pub(super) fn first_line(message: &str) -> String {
    const CHARACTERS: usize = 300;
    message.lines().next().unwrap_or_default().chars().take(CHARACTERS).collect()
}
