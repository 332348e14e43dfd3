//! `tokenizer.json` or `tiktoken.model`, with the checks that a server needs.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use serde_json::Value;

use crate::error::{MESSAGE_BYTES, truncated};
use crate::json;
use crate::store::{Folder, Store};
use crate::text::bound::bytes_per_token;
use crate::text::error::TextError;
use crate::text::tiktoken;

const FILE: &str = "tokenizer.json";

/// A tokenizer that takes longer for a few short texts is refused. Milliseconds are usual.
const TRIAL: Duration = Duration::from_secs(10);
/// Characters of a run in a text of the trial. A pattern that tries every way to cut a run in pieces
/// comes to no end with far fewer.
const RUN: usize = 200;

/// A tokenizer beside the model that it feeds.
#[derive(Debug)]
pub struct Tokenizer {
    path: PathBuf,
    inner: Arc<tokenizers::Tokenizer>,
    /// Most bytes of text per token, where there is such a bound.
    bytes_per_token: Option<usize>,
    /// Rows of the model's embedding.
    vocab_size: usize,
    special: HashSet<String>,
    /// Tokens are written in the 256 characters of byte-level BPE.
    pub(super) byte_level: bool,
    /// Tokens `<0x00>` to `<0xFF>` stand for bytes; a run of them is decoded as one.
    pub(super) byte_fallback: bool,
    /// Character that stands for a space in a token.
    space: Option<char>,
}

impl Tokenizer {
    /// Opens `tokenizer.json` of a folder, else `tiktoken.model`, `None` where there is neither. `vocab_size` is the
    /// model's: ids beyond it are errors.
    ///
    /// # Errors
    /// The file cannot be read or is not a tokenizer.
    pub fn open(folder: impl AsRef<Path>, vocab_size: usize) -> Result<Option<Self>, TextError> {
        Self::open_in(&Folder::new(folder.as_ref()), vocab_size)
    }

    /// As [`Self::open`], from any store.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_in(store: &dyn Store, vocab_size: usize) -> Result<Option<Self>, TextError> {
        let found = match json::read_optional(store, FILE)? {
            Some(bytes) => Some((store.root().join(FILE), bytes)),
            None => tiktoken::read(store, vocab_size)?,
        };
        found.map(|(path, bytes)| Self::from_bytes(&path, &bytes, vocab_size)).transpose()
    }

    /// Parses the text of a `tokenizer.json`; `path` is for messages.
    ///
    /// # Errors
    /// It is not a tokenizer.
    pub fn from_bytes(path: &Path, bytes: &[u8], vocab_size: usize) -> Result<Self, TextError> {
        let failed = |error: tokenizers::Error| TextError::Tokenizer {
            path: path.to_owned(),
            message: truncated(error.to_string(), MESSAGE_BYTES),
        };
        let mut inner = parsed(bytes).map_err(failed)?;
        // Both are settings of a training run; transformers switches them off for every call.
        inner.with_truncation(None).map_err(failed)?;
        inner.with_padding(None);
        let decoder = serde_json::to_value(inner.get_decoder()).unwrap_or_default();
        if strips_ends(&decoder) {
            // The library's decoder reads beyond tokens that are shorter than what it strips.
            return Err(TextError::Tokenizer {
                path: path.to_owned(),
                message: "unsupported decoder: it strips the ends of tokens (`stop` above 0)".to_owned(),
            });
        }
        let special = inner
            .get_added_tokens_decoder()
            .into_values()
            .filter(|token| token.special)
            .map(|token| token.content)
            .collect();
        let inner = Arc::new(inner);
        try_out(&inner)
            .map_err(|message| TextError::Tokenizer { path: path.to_owned(), message: message.to_owned() })?;
        Ok(Self {
            path: path.to_owned(),
            bytes_per_token: bytes_per_token(&inner),
            vocab_size,
            special,
            byte_level: has_type(&decoder, "ByteLevel"),
            byte_fallback: has_type(&decoder, "ByteFallback"),
            space: space_of(&decoder),
            inner,
        })
    }

    /// Rows of the model's embedding.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Most bytes of a text per token that it becomes: a longer text than `n` times this has more than
    /// `n` tokens. None where the tokenizer may drop text or take any amount of it for one token.
    #[must_use]
    pub fn bytes_per_token(&self) -> Option<usize> {
        self.bytes_per_token
    }

    /// Ids of a text. `special`: whether the post-processor adds its tokens (a first token, say);
    /// off for text that came out of a chat template.
    ///
    /// # Errors
    /// The tokenizer failed, also by a panic, or gave a token that the model does not have.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        // Its patterns are searched with a limit, and the library panics where that is reached.
        let encoding = catch_unwind(AssertUnwindSafe(|| self.inner.encode_fast(text, special)))
            .map_err(|_panic| TextError::Untokenizable { bytes: text.len() })?
            .map_err(|error| self.failed(&error))?;
        let ids = encoding.get_ids().to_vec();
        match ids.iter().find(|id| **id as usize >= self.vocab_size) {
            Some(id) => {
                Err(TextError::Vocabulary { path: self.path.clone(), id: *id, vocab_size: self.vocab_size })
            }
            None => Ok(ids),
        }
    }

    /// Text of ids, without special tokens. Ids of the model that the tokenizer has no token for give
    /// no text.
    ///
    /// # Errors
    /// An id outside of the model's vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        for id in ids {
            self.check(*id)?;
        }
        self.decode_checked(ids, true)
    }

    /// Text of ids, special tokens written out.
    ///
    /// # Errors
    /// An id outside of the model's vocabulary.
    pub fn decode_with_special(&self, ids: &[u32]) -> Result<String, TextError> {
        for id in ids {
            self.check(*id)?;
        }
        self.decode_checked(ids, false)
    }

    pub(super) fn decode_checked(&self, ids: &[u32], skip: bool) -> Result<String, TextError> {
        catch_unwind(AssertUnwindSafe(|| self.inner.decode(ids, skip)))
            .unwrap_or_else(|_panic| Err("decoding crashed".into()))
            .map_err(|error| self.failed(&error))
    }

    /// Id of a token as the tokenizer writes it.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Reports if a token is special: it gives no text.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.token(id).is_some_and(|token| self.special.contains(&token))
    }

    /// The bytes that a token stands for, alone; for a part of a character they are no UTF-8.
    ///
    /// # Errors
    /// An id outside of the model's vocabulary.
    pub fn token_bytes(&self, id: u32) -> Result<Vec<u8>, TextError> {
        self.check(id)?;
        let Some(token) = self.token(id) else {
            return Ok(Vec::new());
        };
        if self.special.contains(&token) {
            return Ok(token.into_bytes());
        }
        if self.byte_level
            && let Some(bytes) = token.chars().map(byte_of).collect::<Option<_>>()
        {
            return Ok(bytes);
        }
        if self.byte_fallback
            && let Some(byte) = fallback_byte(&token)
        {
            return Ok(vec![byte]);
        }
        Ok(match self.space {
            Some(space) => token.replace(space, " ").into_bytes(),
            None => token.into_bytes(),
        })
    }

    /// A token as text; bytes that are no UTF-8 appear as replacement characters.
    ///
    /// # Errors
    /// An id outside of the model's vocabulary.
    pub fn token_text(&self, id: u32) -> Result<String, TextError> {
        Ok(String::from_utf8_lossy(&self.token_bytes(id)?).into_owned())
    }

    pub(super) fn check(&self, id: u32) -> Result<(), TextError> {
        if id as usize >= self.vocab_size {
            return Err(TextError::TokenId { id, vocab_size: self.vocab_size });
        }
        Ok(())
    }

    /// The token that gives text, if this one does; `special` ones only where they are asked for.
    pub(super) fn visible(&self, id: u32, special: bool) -> Option<String> {
        self.token(id).filter(|token| special || !self.special.contains(token))
    }

    fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    fn failed(&self, error: &tokenizers::Error) -> TextError {
        TextError::Tokenizer { path: self.path.clone(), message: truncated(error.to_string(), MESSAGE_BYTES) }
    }
}

/// Tokenises some short texts, in a thread of its own: a pattern that takes for ever on ordinary text is
/// found here and not by the first user.
fn try_out(tokenizer: &Arc<tokenizers::Tokenizer>) -> Result<(), &'static str> {
    let tokenizer = tokenizer.clone();
    let (sender, receiver) = mpsc::channel();
    let trial = move || {
        let runs = ["a", "Z", "é", "7", " ", "\n", "!", "_", "語", "ab ", "a1", " \n"];
        // In the last one stands every letter that a pattern may wait for.
        let all: String = (' '..='~').collect();
        let ends = ["", "a", "!", "\n", &all];
        let texts = runs.iter().flat_map(|run| {
            let run = run.repeat(RUN / run.chars().count());
            ends.map(|end| format!("{run}{end}"))
        });
        let texts: Vec<String> = texts.collect();
        let tried = catch_unwind(AssertUnwindSafe(|| {
            texts.iter().for_each(|text| drop(tokenizer.encode_fast(text.as_str(), true)));
        }));
        // If it took too long, the receiver no longer waits.
        let _too_late = sender.send(tried.is_ok());
    };
    let thread = std::thread::Builder::new().name("tokenizer".to_owned()).spawn(trial);
    match thread.map(|_| receiver.recv_timeout(TRIAL)) {
        Ok(Ok(true)) => Ok(()),
        Ok(Ok(false)) => Err("fails on ordinary text: a pattern may exceed its step limit"),
        // The thread ends with the process, which has no use for this tokenizer.
        Ok(Err(_)) => Err("does not terminate on ordinary text"),
        Err(_) => Err("cannot start a thread to test it"),
    }
}

/// Parses a tokenizer with the library, which panics where it does not expect to fail.
fn parsed(bytes: &[u8]) -> tokenizers::Result<tokenizers::Tokenizer> {
    /// Reading it says whether all of it is JSON, and a decoder's numbers are numbers: the library takes that for
    /// granted.
    #[derive(serde::Deserialize)]
    struct TokenizerParts {
        #[serde(rename = "decoder")]
        _decoder: Option<Value>,
    }
    serde_json::from_slice::<TokenizerParts>(bytes)?;
    catch_unwind(AssertUnwindSafe(|| tokenizers::Tokenizer::from_bytes(bytes)))
        .unwrap_or_else(|_panic| Err("reading it crashed".into()))
}

/// The byte that `<0xE5>` stands for; the rule of the library's own decoder.
pub(super) fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// The byte that a character of byte-level BPE stands for: printable Latin-1 is itself, the others
/// follow from 256 on (`bytes_to_unicode` of GPT-2).
pub(super) fn byte_of(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ 0..256 => u8::try_from(code).ok().filter(|byte| is_printable(*byte)),
        code => (0..=255_u8).filter(|byte| !is_printable(*byte)).nth(usize::try_from(code - 256).ok()?),
    }
}

fn is_printable(byte: u8) -> bool {
    matches!(byte, 33..=126 | 161..=172 | 174..=255)
}

/// The character of byte-level BPE that stands for a byte; the inverse of [`byte_of`].
pub(super) fn character_of(byte: u8) -> char {
    match is_printable(byte) {
        true => char::from(byte),
        // 68 bytes at most: far from what is no character.
        false => {
            let before = (0..byte).filter(|byte| !is_printable(*byte)).count() as u32;
            char::from_u32(256 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    }
}

/// Reports if a decoder, or a part of it, is of a type.
pub(super) fn has_type(decoder: &Value, name: &str) -> bool {
    match decoder {
        Value::Object(map) => {
            map.get("type").and_then(Value::as_str) == Some(name)
                || map.values().any(|value| has_type(value, name))
        }
        Value::Array(list) => list.iter().any(|value| has_type(value, name)),
        _ => false,
    }
}

/// Reports if a decoder, or a part of it, is a `Strip` that cuts ends.
fn strips_ends(decoder: &Value) -> bool {
    match decoder {
        Value::Object(map) => {
            let strip = map.get("type").and_then(Value::as_str) == Some("Strip");
            let stop = map.get("stop").and_then(Value::as_u64).unwrap_or(0);
            (strip && stop > 0) || map.values().any(strips_ends)
        }
        Value::Array(list) => list.iter().any(strips_ends),
        _ => false,
    }
}

/// Returns the character that a decoder turns into spaces.
fn space_of(decoder: &Value) -> Option<char> {
    match decoder {
        Value::Object(map) => {
            let text = |name: &str| map.get(name).and_then(Value::as_str);
            let found = match text("type") {
                Some("Metaspace") => text("replacement"),
                Some("Replace") if text("content") == Some(" ") => {
                    map.get("pattern").and_then(|pattern| pattern.get("String")).and_then(Value::as_str)
                }
                _ => None,
            };
            found.and_then(|space| space.chars().next()).or_else(|| map.values().find_map(space_of))
        }
        Value::Array(list) => list.iter().find_map(space_of),
        _ => None,
    }
}
