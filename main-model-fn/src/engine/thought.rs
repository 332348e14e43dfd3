//! Budget of a thought: after so many tokens the text that ends it is put in place of what the model draws.

use std::sync::Arc;

/// Most tokens of the thought that an answer begins with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThoughtBudget {
    /// Tokens of the answer before the end of its thought is put in.
    pub tokens: usize,
    /// Text that opens a thought; `None`: the prompt has opened it.
    pub open: Option<&'static str>,
    /// Text that ends a thought.
    pub close: &'static str,
    /// The tokens of [`close`](Self::close), at least one.
    pub close_ids: Arc<[u32]>,
}

/// How far the thought of one choice has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ThoughtState {
    /// The answer has begun; whether with a thought is not known yet.
    Beginning,
    Thinking,
    Over,
}

/// The thought of one choice.
#[derive(Debug)]
pub(super) struct Thought {
    budget: ThoughtBudget,
    state: ThoughtState,
    drawn: usize,
    /// Text of the answer, as far as it may still be part of what opens or ends a thought.
    text: String,
    /// Tokens of the end that have been put in.
    ending: usize,
}

impl Thought {
    pub(super) fn new(budget: &ThoughtBudget) -> Self {
        let state = if budget.open.is_some() { ThoughtState::Beginning } else { ThoughtState::Thinking };
        Self { budget: budget.clone(), state, drawn: 0, text: String::new(), ending: 0 }
    }

    /// Token that has to come next, if any.
    pub(super) fn next(&self) -> Option<u32> {
        let is_over = self.state != ThoughtState::Thinking || self.drawn < self.budget.tokens;
        (!is_over).then(|| self.budget.close_ids.get(self.ending).copied()).flatten()
    }

    /// Takes the next `token` of the answer and the `text` that it adds.
    pub(super) fn take(&mut self, token: u32, text: &str) {
        if self.state == ThoughtState::Over {
            return;
        }
        self.ending += usize::from(self.next() == Some(token));
        self.drawn += 1;
        self.text.push_str(text);
        if let Some(open) = self.budget.open.filter(|_| self.state == ThoughtState::Beginning) {
            let begun = self.text.trim_start();
            if let Some(rest) = begun.strip_prefix(open) {
                self.state = ThoughtState::Thinking;
                self.text = rest.to_owned();
            } else if !open.starts_with(begun) {
                self.state = ThoughtState::Over;
            }
        }
        let close = self.budget.close;
        // A single token is known by its id: a special token may have no text.
        let is_closed = self.text.contains(close) || *self.budget.close_ids == [token];
        if self.state == ThoughtState::Thinking && (is_closed || self.ending == self.budget.close_ids.len()) {
            self.state = ThoughtState::Over;
        }
        // The end may be cut anywhere; before its last characters nothing of it can begin.
        let mut from = self.text.len().saturating_sub(close.len());
        while !self.text.is_char_boundary(from) {
            from -= 1;
        }
        if self.state != ThoughtState::Beginning {
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

    /// Tokens that are put in while `texts` are drawn, each as token 7.
    fn put_in(budget: &ThoughtBudget, texts: &[&str]) -> Vec<u32> {
        let mut thought = Thought::new(budget);
        let mut put_in = Vec::new();
        for text in texts {
            match thought.next() {
                Some(token) => {
                    put_in.push(token);
                    thought.take(token, "?");
                }
                None => thought.take(7, text),
            }
        }
        put_in
    }

    #[test]
    fn a_thought_ends_at_its_budget() {
        let long = ["a"; 9];
        assert_eq!(put_in(&budget(3, None, &[1]), &long), [1]);
        assert_eq!(put_in(&budget(3, None, &[1, 2, 3]), &long), [1, 2, 3]);
        assert_eq!(put_in(&budget(9, None, &[1]), &long), [0_u32; 0]);
        assert_eq!(put_in(&budget(3, Some("<t>"), &[1]), &["\n<", "t>", "a", "a", "a"]), [1]);
    }

    #[test]
    fn an_answer_that_does_not_think_goes_on() {
        let none: [u32; 0] = [];
        assert_eq!(put_in(&budget(3, None, &[1]), &["a", "</", "t>b", "c", "d", "e"]), none);
        assert_eq!(put_in(&budget(2, Some("<t>"), &[1]), &["<", "b", "c", "d"]), none);
        // Known by its id.
        assert_eq!(put_in(&budget(3, None, &[7]), &["", "a", "b", "c", "d"]), none);
    }
}
