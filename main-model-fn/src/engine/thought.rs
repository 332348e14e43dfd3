//! Budget of a thought (reasoning): after so many tokens, the text that ends it is forced.

use std::sync::Arc;

/// Limit of the thought at the beginning of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThoughtBudget {
    /// Most tokens of the answer before the end of the thought is forced.
    pub tokens: usize,
    /// Text that opens a thought; `None` if the prompt has opened it.
    pub open: Option<&'static str>,
    /// Text that closes a thought.
    pub close: &'static str,
    /// Tokens of [`close`](Self::close), at least one.
    pub close_ids: Arc<[u32]>,
}

/// State of one choice's thought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ThoughtState {
    /// The answer may still open a thought.
    Undecided,
    Thinking,
    Over,
}

/// The thought of one choice.
#[derive(Debug)]
pub(super) struct Thought {
    budget: ThoughtBudget,
    state: ThoughtState,
    /// Number of tokens so far.
    tokens: usize,
    /// End of the text, as far as it may be part of the opening or closing text.
    text: String,
    /// Number of closing tokens that were forced.
    forced_tokens: usize,
}

impl Thought {
    pub(super) fn new(budget: &ThoughtBudget) -> Self {
        let state = if budget.open.is_some() { ThoughtState::Undecided } else { ThoughtState::Thinking };
        Self { budget: budget.clone(), state, tokens: 0, text: String::new(), forced_tokens: 0 }
    }

    /// Returns the token that must come next, if the budget is spent.
    pub(super) fn forced_token(&self) -> Option<u32> {
        let is_over = self.state != ThoughtState::Thinking || self.tokens < self.budget.tokens;
        (!is_over).then(|| self.budget.close_ids.get(self.forced_tokens).copied()).flatten()
    }

    /// Adds the next `token` of the answer and its `text`.
    pub(super) fn push(&mut self, token: u32, text: &str) {
        if self.state == ThoughtState::Over {
            return;
        }
        self.forced_tokens += usize::from(self.forced_token() == Some(token));
        self.tokens += 1;
        self.text.push_str(text);
        if let Some(open) = self.budget.open.filter(|_| self.state == ThoughtState::Undecided) {
            let begun = self.text.trim_start();
            if let Some(rest) = begun.strip_prefix(open) {
                self.state = ThoughtState::Thinking;
                self.text = rest.to_owned();
            } else if !open.starts_with(begun) {
                self.state = ThoughtState::Over;
            }
        }
        let close = self.budget.close;
        // A single closing token is recognised by its id, as a special token may have no text.
        let is_closed = self.text.contains(close) || *self.budget.close_ids == [token];
        let is_forced = self.forced_tokens == self.budget.close_ids.len();
        if self.state == ThoughtState::Thinking && (is_closed || is_forced) {
            self.state = ThoughtState::Over;
        }
        // The closing text may be cut anywhere; it cannot begin before its own length from the end.
        let mut from = self.text.len().saturating_sub(close.len());
        while !self.text.is_char_boundary(from) {
            from -= 1;
        }
        if self.state != ThoughtState::Undecided {
            self.text.drain(..from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(tokens: usize, open: Option<&'static str>, close_ids: &[u32]) -> ThoughtBudget {
        ThoughtBudget { tokens, open, close: "</t>", close_ids: close_ids.into() }
    }

    /// Returns the tokens that are forced while `texts` are sampled, each as token 7.
    fn forced_tokens(budget: &ThoughtBudget, texts: &[&str]) -> Vec<u32> {
        let mut thought = Thought::new(budget);
        let mut forced = Vec::new();
        for text in texts {
            match thought.forced_token() {
                Some(token) => {
                    forced.push(token);
                    thought.push(token, "?");
                }
                None => thought.push(7, text),
            }
        }
        forced
    }

    #[test]
    fn thought_ends_at_its_budget() {
        let long = ["a"; 9];
        assert_eq!(forced_tokens(&budget(3, None, &[1]), &long), [1]);
        assert_eq!(forced_tokens(&budget(3, None, &[1, 2, 3]), &long), [1, 2, 3]);
        assert_eq!(forced_tokens(&budget(9, None, &[1]), &long), [0_u32; 0]);
        assert_eq!(forced_tokens(&budget(3, Some("<t>"), &[1]), &["\n<", "t>", "a", "a", "a"]), [1]);
    }

    #[test]
    fn answer_without_a_thought_continues() {
        let none: [u32; 0] = [];
        assert_eq!(forced_tokens(&budget(3, None, &[1]), &["a", "</", "t>b", "c", "d", "e"]), none);
        assert_eq!(forced_tokens(&budget(2, Some("<t>"), &[1]), &["<", "b", "c", "d"]), none);
        // A closing token that is recognised by its id.
        assert_eq!(forced_tokens(&budget(3, None, &[7]), &["", "a", "b", "c", "d"]), none);
    }
}
