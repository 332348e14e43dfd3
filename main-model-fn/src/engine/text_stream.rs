//! Text of one choice while it is generated: releases only text that no later token can change.

use super::request::Request;
use remoe_model::text::{Detokenizer, TextError, Tokenizer};
use std::sync::Arc;

/// Text released by one token.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ReleasedText {
    /// Text that no later token can change or cut off.
    pub(crate) text: String,
    /// Index in the request of the stop string that is complete. The text before it is released, the stop string is not.
    pub(crate) stopped: Option<usize>,
}

/// Converts tokens to text. Holds back partial characters and possible beginnings of stop strings.
pub(crate) struct TextStream {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    stops: StopStrings,
}

impl TextStream {
    /// Creates the stream of one choice of `request`.
    pub(crate) fn new(tokenizer: &Arc<Tokenizer>, request: &Request) -> Self {
        let detokenizer = if request.special_text { Detokenizer::with_special() } else { Detokenizer::new() };
        let detokenizer = detokenizer.showing(request.shown.clone());
        Self { tokenizer: tokenizer.clone(), detokenizer, stops: StopStrings::new(&request.stop.strings) }
    }

    /// Adds one token. If `may_stop` is false, stop strings that are complete count as ordinary text.
    ///
    /// # Errors
    /// Fails if the tokenizer does.
    pub(crate) fn push(&mut self, token: u32, may_stop: bool) -> Result<ReleasedText, TextError> {
        let text = self.detokenizer.push(&self.tokenizer, token)?;
        Ok(self.stops.push(&text, may_stop))
    }

    /// Releases the remaining text behind the last token.
    ///
    /// # Errors
    /// Fails if the tokenizer does.
    pub(crate) fn finish(&mut self) -> Result<ReleasedText, TextError> {
        let text = self.detokenizer.finish(&self.tokenizer)?;
        let mut released = self.stops.push(&text, true);
        if released.stopped.is_none() {
            released.text.push_str(&self.stops.release_held());
        }
        Ok(released)
    }
}

/// Finds stop strings in a text that arrives in pieces.
struct StopStrings {
    /// Index in the request, and stop string.
    stops: Vec<(usize, String)>,
    held: String,
    /// Bytes at the start of `held` in which a complete stop string does not count, because they came before
    /// `min_tokens`.
    early_bytes: usize,
}

impl StopStrings {
    fn new(stops: &[String]) -> Self {
        let stops = stops.iter().cloned().enumerate().filter(|(_, stop)| !stop.is_empty()).collect();
        Self { stops, held: String::new(), early_bytes: 0 }
    }

    fn push(&mut self, text: &str, may_stop: bool) -> ReleasedText {
        self.held.push_str(text);
        if !may_stop {
            self.early_bytes = self.held.len();
        }
        // The stop string that is complete first wins, however the text is cut into pieces.
        let find = |(index, stop): &(usize, String)| {
            // Before `from`, any stop string would be complete within the early bytes.
            let from = (self.early_bytes + 1).saturating_sub(stop.len());
            let from = (from..=self.held.len()).find(|&offset| self.held.is_char_boundary(offset))?;
            let offset = from + self.held[from..].find(stop.as_str())?;
            Some((offset + stop.len(), offset, *index))
        };
        if let Some((_, offset, index)) = self.stops.iter().filter_map(find).min() {
            self.held.truncate(offset);
            return ReleasedText { text: self.release_held(), stopped: Some(index) };
        }
        // The longest end of the text that may begin a stop string is held back.
        let keep = self
            .held
            .char_indices()
            .map(|(offset, _)| offset)
            .find(|&offset| self.stops.iter().any(|(_, stop)| stop.starts_with(&self.held[offset..])))
            .unwrap_or(self.held.len());
        let kept = self.held.split_off(keep);
        self.early_bytes = self.early_bytes.saturating_sub(keep);
        ReleasedText { text: std::mem::replace(&mut self.held, kept), stopped: None }
    }

    fn release_held(&mut self) -> String {
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
            let released = stream.push(piece, true);
            out.push(released.text);
            if released.stopped.is_some() {
                return (out, true);
            }
        }
        out.push(stream.release_held());
        (out, false)
    }

    #[test]
    fn possible_stop_strings_are_held_back_and_cut_off() {
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
    fn stop_string_is_reported_by_its_index_in_the_request() {
        let stops = ["", "abc", "b"].map(str::to_owned);
        let index = |text: &str| StopStrings::new(&stops).push(text, true).stopped;
        assert_eq!((index("xb"), index("abc"), index("xa")), (Some(2), Some(2), None));
        assert_eq!(StopStrings::new(&stops[..2]).push("abc", true).stopped, Some(1));
    }

    #[test]
    fn early_stop_strings_do_not_stop() {
        let feed = |stops: &[&str], early: &[&str], late: &[&str]| {
            let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
            let mut stream = StopStrings::new(&stops);
            let mut out = String::new();
            let pieces =
                early.iter().map(|piece| (piece, false)).chain(late.iter().map(|piece| (piece, true)));
            for (piece, may_stop) in pieces {
                let released = stream.push(piece, may_stop);
                out.push_str(&released.text);
                if released.stopped.is_some() {
                    return (out, true);
                }
            }
            (out + &stream.release_held(), false)
        };
        assert_eq!(feed(&["END"], &["a END", " b"], &["c"]), ("a END bc".into(), false));
        assert_eq!(feed(&["END"], &["a END", " b"], &["cEND"]), ("a END bc".into(), true));
        // It begins early and is complete in time.
        assert_eq!(feed(&["END"], &["a EN"], &["D b"]), ("a ".into(), true));
        assert_eq!(feed(&["aa"], &["aa"], &["a"]), ("a".into(), true));
        // Text is held back for one stop string, while another in it is early.
        assert_eq!(feed(&["abc", "b"], &["ab"], &["x"]), ("abx".into(), false));
        assert_eq!(feed(&["abc", "b"], &["ab"], &["c"]), ("".into(), true));
        assert_eq!(feed(&["é!"], &["é!é"], &["?é!"]), ("é!é?".into(), true));
    }

    proptest! {
        /// However a text is cut into pieces, the released text ends at the first stop string.
                #[test]
                fn pieces_do_not_change_the_text(text in "[abé]{0,24}", cuts in prop::collection::vec(0_usize..24, 0..8), stops in prop::collection::vec("[abé]{1,3}", 0..3)) {
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
