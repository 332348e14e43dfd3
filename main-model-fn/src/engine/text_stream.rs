//! Text of one choice as it grows: only what is certain leaves.

use super::request::Request;
use remoe_model::text::{Detokenizer, TextError, Tokenizer};
use std::sync::Arc;

/// Effect of one token on the text.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Step {
    /// Text that no later token can change or cut off.
    pub(crate) text: String,
    /// The stop string that is complete, by its place in the request; the text before it has left, the string itself
    /// never does.
    pub(crate) stopped: Option<usize>,
}

/// Turns tokens into text, holding back partial characters and possible beginnings of stop strings.
pub(crate) struct TextStream {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    stops: StopStrings,
}

impl TextStream {
    /// For one choice of `request`.
    pub(crate) fn new(tokenizer: &Arc<Tokenizer>, request: &Request) -> Self {
        let detokenizer = if request.special_text { Detokenizer::with_special() } else { Detokenizer::new() };
        let detokenizer = detokenizer.showing(request.shown.clone());
        Self { tokenizer: tokenizer.clone(), detokenizer, stops: StopStrings::new(&request.stop.strings) }
    }

    /// Adds one token. Stop strings that are complete while `may_stop` is false are text.
    ///
    /// # Errors
    /// The tokenizer fails on the token.
    pub(crate) fn push(&mut self, token: u32, may_stop: bool) -> Result<Step, TextError> {
        let text = self.detokenizer.push(&self.tokenizer, token)?;
        Ok(self.stops.push(&text, may_stop))
    }

    /// The rest, once no token follows.
    ///
    /// # Errors
    /// The tokenizer fails on the tokens held back.
    pub(crate) fn finish(&mut self) -> Result<Step, TextError> {
        let text = self.detokenizer.finish(&self.tokenizer)?;
        let mut step = self.stops.push(&text, true);
        if step.stopped.is_none() {
            step.text.push_str(&self.stops.release());
        }
        Ok(step)
    }
}

/// Finds stop strings in a text that arrives in pieces.
struct StopStrings {
    /// With their places in the request.
    stops: Vec<(usize, String)>,
    held: String,
    /// Bytes at the start of `held` that came too early: what is complete within them stops nothing.
    early: usize,
}

impl StopStrings {
    fn new(stops: &[String]) -> Self {
        let stops = stops.iter().cloned().enumerate().filter(|(_, stop)| !stop.is_empty()).collect();
        Self { stops, held: String::new(), early: 0 }
    }

    fn push(&mut self, text: &str, may_stop: bool) -> Step {
        self.held.push_str(text);
        if !may_stop {
            self.early = self.held.len();
        }
        // The stop string that is complete first wins, however the text is cut into pieces.
        let found = |(place, stop): &(usize, String)| {
            // What begins before this is complete within the early text.
            let from = (self.early + 1).saturating_sub(stop.len());
            let from = (from..=self.held.len()).find(|&at| self.held.is_char_boundary(at))?;
            self.held[from..].find(stop.as_str()).map(|at| (from + at + stop.len(), from + at, *place))
        };
        if let Some((_, at, place)) = self.stops.iter().filter_map(found).min() {
            self.held.truncate(at);
            return Step { text: self.release(), stopped: Some(place) };
        }
        // The longest end of the text that begins some stop string must wait.
        let keep = self
            .held
            .char_indices()
            .map(|(at, _)| at)
            .find(|&at| self.stops.iter().any(|(_, stop)| stop.starts_with(&self.held[at..])))
            .unwrap_or(self.held.len());
        let kept = self.held.split_off(keep);
        self.early = self.early.saturating_sub(keep);
        Step { text: std::mem::replace(&mut self.held, kept), stopped: None }
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
            let step = stream.push(piece, true);
            out.push(step.text);
            if step.stopped.is_some() {
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

    #[test]
    fn stop_string_is_told_by_its_place_in_the_request() {
        let stops = ["", "abc", "b"].map(str::to_owned);
        let place = |text: &str| StopStrings::new(&stops).push(text, true).stopped;
        assert_eq!((place("xb"), place("abc"), place("xa")), (Some(2), Some(2), None));
        assert_eq!(StopStrings::new(&stops[..2]).push("abc", true).stopped, Some(1));
    }

    #[test]
    fn what_is_complete_too_early_stops_nothing() {
        let feed = |stops: &[&str], early: &[&str], late: &[&str]| {
            let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
            let mut stream = StopStrings::new(&stops);
            let mut out = String::new();
            let pieces =
                early.iter().map(|piece| (piece, false)).chain(late.iter().map(|piece| (piece, true)));
            for (piece, may_stop) in pieces {
                let step = stream.push(piece, may_stop);
                out.push_str(&step.text);
                if step.stopped.is_some() {
                    return (out, true);
                }
            }
            (out + &stream.release(), false)
        };
        assert_eq!(feed(&["END"], &["a END", " b"], &["c"]), ("a END bc".into(), false));
        assert_eq!(feed(&["END"], &["a END", " b"], &["cEND"]), ("a END bc".into(), true));
        // It begins too early and is complete in time.
        assert_eq!(feed(&["END"], &["a EN"], &["D b"]), ("a ".into(), true));
        assert_eq!(feed(&["aa"], &["aa"], &["a"]), ("a".into(), true));
        // Held back for one stop string, while another in it came too early.
        assert_eq!(feed(&["abc", "b"], &["ab"], &["x"]), ("abx".into(), false));
        assert_eq!(feed(&["abc", "b"], &["ab"], &["c"]), ("".into(), true));
        assert_eq!(feed(&["é!"], &["é!é"], &["?é!"]), ("é!é?".into(), true));
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
