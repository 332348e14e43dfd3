//! Tokens to text while they come.

use crate::text::error::TextError;
use crate::text::tokenizer::{Tokenizer, fallback_byte};

/// Tokens after which the window is cut.
const WINDOW: usize = 32;
/// Tokens that stay: enough that whatever a decoder strips at the start of a text is stripped from
/// tokens whose text is out already.
const KEPT: usize = 16;

/// Turns tokens into text as they come, special tokens left out or written out. What it has given, with
/// what [`Detokenizer::finish`] gives, is exactly [`Tokenizer::decode`] of all tokens, or
/// [`Tokenizer::decode_with_special`].
///
/// It gives whole characters only. An incomplete character of byte-level BPE is held back until the
/// next token settles it. A run of byte tokens (`<0xE5>`) is held back until it ends, since one wrong
/// byte turns the whole run into replacement characters.
///
/// A decoder is not a function of single tokens (the first space of a text goes away, bytes join to
/// characters), so a window of the last tokens is decoded again for each: at most 32, or once for a
/// run of bytes.
#[derive(Debug, Clone, Default)]
pub struct Detokenizer {
    /// The last tokens that have text; none that is left out.
    window: Vec<u32>,
    /// Bytes of the window's text that have been given out.
    given: usize,
    /// Special tokens are written out.
    special: bool,
    /// These are, whatever becomes of the others.
    shown: Vec<u32>,
}

impl Detokenizer {
    /// For a new text.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// For a new text in which special tokens are written out.
    #[must_use]
    pub fn with_special() -> Self {
        Self { special: true, ..Self::default() }
    }

    /// Returns this detokenizer with the special tokens `ids` written out.
    #[must_use]
    pub fn showing(self, ids: Vec<u32>) -> Self {
        Self { shown: ids, ..self }
    }

    /// The text that a token adds, often empty or more than its own.
    ///
    /// # Errors
    /// An id outside of the model's vocabulary, which changes nothing here.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String, TextError> {
        tokenizer.check(id)?;
        let Some(token) = tokenizer.visible(id, self.special || self.shown.contains(&id)) else {
            return Ok(String::new());
        };
        self.window.push(id);
        if tokenizer.byte_fallback && fallback_byte(&token).is_some() {
            return Ok(String::new());
        }
        let text = tokenizer.decode_checked(&self.window, false)?;
        let settled = if tokenizer.byte_level {
            // Only the last character can change: it may be a prefix of one.
            text.strip_suffix(char::REPLACEMENT_CHARACTER).unwrap_or(&text)
        } else {
            &text
        };
        let added = settled.get(self.given..).unwrap_or_default().to_owned();
        self.given += added.len();
        if self.window.len() >= WINDOW {
            let held = text.len().saturating_sub(self.given);
            self.window.drain(..self.window.len() - KEPT);
            let kept = tokenizer.decode_checked(&self.window, false)?;
            self.given = kept.len().saturating_sub(held);
        }
        Ok(added)
    }

    /// The text that was held back, at the end; a character that never became whole is a replacement
    /// character.
    ///
    /// # Errors
    /// The tokenizer failed.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, TextError> {
        let text = tokenizer.decode_checked(&self.window, false)?;
        let added = text.get(self.given..).unwrap_or_default().to_owned();
        self.window.clear();
        self.given = 0;
        Ok(added)
    }
}
