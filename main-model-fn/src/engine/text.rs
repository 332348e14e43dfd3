//! Text of one choice as it grows: only what is certain leaves.

use remoe_model::text::{Detokenizer, TextError, Tokenizer};
use std::sync::Arc;

/// What one token added.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Step {
    /// Text that no later token can change or cut off.
    pub(crate) text: String,
    /// A stop string is complete; the text before it has left, the string itself never does.
    pub(crate) stopped: bool,
}

/// Turns tokens into text, holding back partial characters and possible beginnings of stop strings.
pub(crate) struct TextStream {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    stops: StopStrings,
}

impl TextStream {
    pub(crate) fn new(tokenizer: &Arc<Tokenizer>, stops: &[String]) -> Self {
        Self { tokenizer: tokenizer.clone(), detokenizer: Detokenizer::new(), stops: StopStrings::new(stops) }
    }

    /// Adds one token.
    ///
    /// # Errors
    /// The tokenizer fails on the token.
    pub(crate) fn push(&mut self, token: u32) -> Result<Step, TextError> {
        let text = self.detokenizer.push(&self.tokenizer, token)?;
        Ok(self.stops.push(&text))
    }

    /// The rest, once no token follows.
    ///
    /// # Errors
    /// The tokenizer fails on the tokens held back.
    pub(crate) fn finish(&mut self) -> Result<Step, TextError> {
        let text = self.detokenizer.finish(&self.tokenizer)?;
        let mut step = self.stops.push(&text);
        if !step.stopped {
            step.text.push_str(&self.stops.release());
        }
        Ok(step)
    }
}

/// Finds stop strings in a text that arrives in pieces.
struct StopStrings {
    stops: Vec<String>,
    held: String,
}

impl StopStrings {
    fn new(stops: &[String]) -> Self {
        Self { stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(), held: String::new() }
    }

    fn push(&mut self, text: &str) -> Step {
        self.held.push_str(text);
        // The stop string that is complete first wins, however the text is cut into pieces.
        let found = |stop: &String| self.held.find(stop.as_str()).map(|at| (at + stop.len(), at));
        if let Some((_, at)) = self.stops.iter().filter_map(found).min() {
            self.held.truncate(at);
            return Step { text: self.release(), stopped: true };
        }
        // The longest end of the text that begins some stop string must wait.
        let keep = self
            .held
            .char_indices()
            .map(|(at, _)| at)
            .find(|&at| self.stops.iter().any(|stop| stop.starts_with(&self.held[at..])))
            .unwrap_or(self.held.len());
        let kept = self.held.split_off(keep);
        Step { text: std::mem::replace(&mut self.held, kept), stopped: false }
    }

    fn release(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::StopStrings;
    use proptest::prelude::*;

    fn feed(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut stream = StopStrings::new(&stops);
        let mut out = Vec::new();
        for piece in pieces {
            let step = stream.push(piece);
            out.push(step.text);
            if step.stopped {
                return (out, true);
            }
        }
        out.push(stream.release());
        (out, false)
    }

    #[test]
    fn holds_back_and_cuts() {
        assert_eq!(
            feed(&["END"], &["a E", "N", "x"]),
            (vec!["a ".into(), "".into(), "ENx".into(), "".into()], false)
        );
        assert_eq!(feed(&["END"], &["a E", "ND b"]), (vec!["a ".into(), "".into()], true));
        assert_eq!(feed(&["bc", "b"], &["abc"]), (vec!["a".into()], true));
        assert_eq!(feed(&[""], &["abc"]), (vec!["abc".into(), "".into()], false));
        assert_eq!(
            feed(&["é!"], &["caf", "é", "?"]),
            (vec!["caf".into(), "".into(), "é?".into(), "".into()], false)
        );
    }

    proptest! {
        /// However a text is cut into pieces, what leaves is the text up to the first stop string.
        #[test]
        fn pieces_do_not_matter(text in "[abé]{0,24}", cuts in prop::collection::vec(0_usize..24, 0..8), stops in prop::collection::vec("[abé]{1,3}", 0..3)) {
            let chars: Vec<char> = text.chars().collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(chars.len())).collect();
            cuts.extend([0, chars.len()]);
            cuts.sort_unstable();
            let pieces: Vec<String> = cuts.windows(2).map(|cut| chars[cut[0]..cut[1]].iter().collect()).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let (out, stopped) = feed(&stops, &pieces.iter().map(String::as_str).collect::<Vec<_>>());
            let whole = out.concat();
            prop_assert!(text.starts_with(&whole));
            prop_assert_eq!(&whole, &feed(&stops, &[&text]).0.concat());
            prop_assert_eq!(stopped, stops.iter().any(|stop| text.contains(stop)));
            prop_assert!(stops.iter().all(|stop| !whole.contains(stop)));
            if !stopped {
                prop_assert_eq!(whole, text);
            }
        }
    }
}
