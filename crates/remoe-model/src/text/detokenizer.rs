//! Streaming conversion of tokens to text.

use crate::text::error::TextError;
use crate::text::tokenizer::{Tokenizer, fallback_byte};

/// Tokens in the window at which its oldest tokens are dropped.
const WINDOW_TOKENS: usize = 32;
/// Tokens that stay in the window then. A decoder may strip the start of a text, which then falls on
/// tokens whose text has already been emitted.
const OVERLAP_TOKENS: usize = 16;

/// Converts tokens to text one at a time, with special tokens left out or written out.
///
/// The texts that [`Detokenizer::push`] and [`Detokenizer::finish`] return, joined, equal
/// [`Tokenizer::decode`] of all tokens, or [`Tokenizer::decode_with_special`].
///
/// Only whole characters are emitted. An incomplete character of byte-level BPE is held back until the
/// next token completes it. A run of byte tokens (`<0xE5>`) is held back until it ends, since one wrong
/// byte turns the whole run into replacement characters.
///
/// A token's text depends on its neighbours (the first space of a text is dropped, bytes join to
/// characters), so a window of at most 32 tokens is decoded again for each token, but only once for a
/// run of byte tokens.
#[derive(Debug, Clone, Default)]
pub struct Detokenizer {
    /// Last tokens that have text, without the special tokens that are left out.
    window: Vec<u32>,
    /// Bytes of the window's text that have been emitted.
    emitted_bytes: usize,
    /// Writes out all special tokens.
    shows_special: bool,
    /// Special tokens that are written out even if the others are not.
    shown_ids: Vec<u32>,
}

impl Detokenizer {
    /// Creates a detokenizer for a new text that leaves out special tokens.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a detokenizer for a new text that writes out special tokens.
    #[must_use]
    pub fn with_special() -> Self {
        Self { shows_special: true, ..Self::default() }
    }

    /// Returns this detokenizer with the special tokens `ids` written out.
    #[must_use]
    pub fn showing(self, ids: Vec<u32>) -> Self {
        Self { shown_ids: ids, ..self }
    }

    /// Adds a token and returns the text that is complete with it: empty while a character is incomplete,
    /// and more than the token's own text when held-back tokens are released.
    ///
    /// # Errors
    /// [`TextError::TokenId`] for an id beyond the model's vocabulary, which leaves the detokenizer as it
    /// was; [`TextError::Tokenizer`] if decoding fails.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String, TextError> {
        tokenizer.check_id(id)?;
        let Some(token) = tokenizer.visible_token(id, self.shows_special || self.shown_ids.contains(&id))
        else {
            return Ok(String::new());
        };
        self.window.push(id);
        if tokenizer.byte_fallback && fallback_byte(&token).is_some() {
            return Ok(String::new());
        }
        let text = tokenizer.decode_checked(&self.window, false)?;
        let settled = if tokenizer.byte_level {
            // Only the last character can still change: it may be the prefix of a longer one.
            text.strip_suffix(char::REPLACEMENT_CHARACTER).unwrap_or(&text)
        } else {
            &text
        };
        let added = settled.get(self.emitted_bytes..).unwrap_or_default().to_owned();
        self.emitted_bytes += added.len();
        if self.window.len() >= WINDOW_TOKENS {
            let held = text.len().saturating_sub(self.emitted_bytes);
            self.window.drain(..self.window.len() - OVERLAP_TOKENS);
            let kept = tokenizer.decode_checked(&self.window, false)?;
            self.emitted_bytes = kept.len().saturating_sub(held);
        }
        Ok(added)
    }

    /// Ends the text and returns what was held back, with a replacement character for an incomplete
    /// character.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] if decoding fails.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, TextError> {
        let text = tokenizer.decode_checked(&self.window, false)?;
        let added = text.get(self.emitted_bytes..).unwrap_or_default().to_owned();
        self.window.clear();
        self.emitted_bytes = 0;
        Ok(added)
    }
}
