//! Tokenizer of `tokenizer.json` or `tiktoken.model`, with the checks that a server needs.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use serde_json::Value;

use crate::error::{MESSAGE_BYTES, truncated};
use crate::json;
use crate::store::{Folder, Store};
use crate::text::error::TextError;
use crate::text::tiktoken;
use crate::text::token_bound::bytes_per_token;

const FILE: &str = "tokenizer.json";

/// Longest time for the trial texts, which usually take milliseconds. A slower tokenizer is refused.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(10);
/// Characters in a run of a trial text. A pattern with exponential backtracking does not terminate on
/// far shorter runs.
const TRIAL_RUN_CHARACTERS: usize = 200;

/// Tokenizer of a model, checked against the model's vocabulary.
#[derive(Debug)]
pub struct Tokenizer {
    path: PathBuf,
    inner: Arc<tokenizers::Tokenizer>,
    /// Most bytes of text that one token stands for, if bounded.
    bytes_per_token: Option<usize>,
    /// Rows of the model's embedding.
    vocab_size: usize,
    special_tokens: HashSet<String>,
    /// Writes tokens in the 256 characters of byte-level BPE.
    pub(super) byte_level: bool,
    /// Decodes a run of the tokens `<0x00>` to `<0xFF>` as bytes of one text.
    pub(super) byte_fallback: bool,
    /// Character in tokens that stands for a space.
    space_character: Option<char>,
}

impl Tokenizer {
    /// Opens `tokenizer.json` of a folder, or `tiktoken.model` if there is none; returns `None` if both are missing.
    ///
    /// `vocab_size` is the number of rows of the model's embedding; ids from it on are errors.
    ///
    /// # Errors
    /// [`TextError::Checkpoint`] if a file cannot be read, [`TextError::Tokenizer`] if it is not a supported tokenizer.
    pub fn open(folder: impl AsRef<Path>, vocab_size: usize) -> Result<Option<Self>, TextError> {
        Self::open_in(&Folder::new(folder.as_ref()), vocab_size)
    }

    /// Opens the tokenizer of a store as [`Self::open`] does.
    ///
    /// # Errors
    /// Fails as [`Self::open`] does.
    pub fn open_in(store: &dyn Store, vocab_size: usize) -> Result<Option<Self>, TextError> {
        let found = match json::read_optional(store, FILE)? {
            Some(bytes) => Some((store.root().join(FILE), bytes)),
            None => tiktoken::read(store, vocab_size)?,
        };
        found.map(|(path, bytes)| Self::from_bytes(&path, &bytes, vocab_size)).transpose()
    }

    /// Parses the content of a `tokenizer.json`; `path` is named in errors.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] if it is not a supported tokenizer.
    pub fn from_bytes(path: &Path, bytes: &[u8], vocab_size: usize) -> Result<Self, TextError> {
        let failed = |error: tokenizers::Error| TextError::Tokenizer {
            path: path.to_owned(),
            message: truncated(error.to_string(), MESSAGE_BYTES),
        };
        let mut inner = parse_tokenizer(bytes).map_err(failed)?;
        // Both are settings of a training run, which transformers switches off for each call.
        inner.with_truncation(None).map_err(failed)?;
        inner.with_padding(None);
        let decoder = serde_json::to_value(inner.get_decoder()).unwrap_or_default();
        if strips_ends(&decoder) {
            // The library's decoder reads out of bounds if a token is shorter than what it strips.
            return Err(TextError::Tokenizer {
                path: path.to_owned(),
                message: "unsupported decoder: it strips the ends of tokens (`stop` above 0)".to_owned(),
            });
        }
        let special_tokens = inner
            .get_added_tokens_decoder()
            .into_values()
            .filter(|token| token.special)
            .map(|token| token.content)
            .collect();
        let inner = Arc::new(inner);
        check_terminates(&inner)
            .map_err(|message| TextError::Tokenizer { path: path.to_owned(), message: message.to_owned() })?;
        Ok(Self {
            path: path.to_owned(),
            bytes_per_token: bytes_per_token(&inner),
            vocab_size,
            special_tokens,
            byte_level: has_type(&decoder, "ByteLevel"),
            byte_fallback: has_type(&decoder, "ByteFallback"),
            space_character: space_character(&decoder),
            inner,
        })
    }

    /// Returns the number of rows of the model's embedding.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the most bytes of text that one token stands for: a text that is longer than `n` times this
    /// has more than `n` tokens. `None` if the tokenizer may drop text or turn any amount into one token.
    #[must_use]
    pub fn bytes_per_token(&self) -> Option<usize> {
        self.bytes_per_token
    }

    /// Tokenises a text to ids.
    ///
    /// With `add_special`, the post-processor adds its special tokens, such as a first token. Text of a
    /// chat template already contains them.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] if the tokenizer fails, [`TextError::Untokenizable`] if it panics,
    /// [`TextError::Vocabulary`] if it produces a token that the model does not have.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        // The library panics when the search for a pattern reaches its step limit.
        let encoding = catch_unwind(AssertUnwindSafe(|| self.inner.encode_fast(text, add_special)))
            .map_err(|_panic| TextError::Untokenizable { bytes: text.len() })?
            .map_err(|error| self.tokenizer_error(&error))?;
        let ids = encoding.get_ids().to_vec();
        match ids.iter().find(|id| **id as usize >= self.vocab_size) {
            Some(id) => {
                Err(TextError::Vocabulary { path: self.path.clone(), id: *id, vocab_size: self.vocab_size })
            }
            None => Ok(ids),
        }
    }

    /// Decodes ids to text without special tokens. Ids in the model's vocabulary that the tokenizer has no
    /// token for are left out.
    ///
    /// # Errors
    /// [`TextError::TokenId`] for an id beyond the model's vocabulary, [`TextError::Tokenizer`] if decoding
    /// fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        for id in ids {
            self.check_id(*id)?;
        }
        self.decode_checked(ids, true)
    }

    /// Decodes ids to text with special tokens written out.
    ///
    /// # Errors
    /// Fails as [`Self::decode`] does.
    pub fn decode_with_special(&self, ids: &[u32]) -> Result<String, TextError> {
        for id in ids {
            self.check_id(*id)?;
        }
        self.decode_checked(ids, false)
    }

    /// Decodes ids that are known to be in the model's vocabulary.
    pub(super) fn decode_checked(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        catch_unwind(AssertUnwindSafe(|| self.inner.decode(ids, skip_special)))
            .unwrap_or_else(|_panic| Err("decoding crashed".into()))
            .map_err(|error| self.tokenizer_error(&error))
    }

    /// Returns the id of a token in the tokenizer's own spelling.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Reports if a token is special, so that decoding leaves it out.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.token(id).is_some_and(|token| self.special_tokens.contains(&token))
    }

    /// Returns the bytes that a single token stands for; those of a part of a character are not UTF-8.
    ///
    /// # Errors
    /// [`TextError::TokenId`] for an id beyond the model's vocabulary.
    pub fn token_bytes(&self, id: u32) -> Result<Vec<u8>, TextError> {
        self.check_id(id)?;
        let Some(token) = self.token(id) else {
            return Ok(Vec::new());
        };
        if self.special_tokens.contains(&token) {
            return Ok(token.into_bytes());
        }
        if self.byte_level
            && let Some(bytes) = token.chars().map(byte_of_character).collect::<Option<_>>()
        {
            return Ok(bytes);
        }
        if self.byte_fallback
            && let Some(byte) = fallback_byte(&token)
        {
            return Ok(vec![byte]);
        }
        Ok(match self.space_character {
            Some(space) => token.replace(space, " ").into_bytes(),
            None => token.into_bytes(),
        })
    }

    /// Returns the text of a single token, with replacement characters for bytes that are not UTF-8.
    ///
    /// # Errors
    /// [`TextError::TokenId`] for an id beyond the model's vocabulary.
    pub fn token_text(&self, id: u32) -> Result<String, TextError> {
        Ok(String::from_utf8_lossy(&self.token_bytes(id)?).into_owned())
    }

    /// Refuses ids beyond the model's vocabulary.
    pub(super) fn check_id(&self, id: u32) -> Result<(), TextError> {
        if id as usize >= self.vocab_size {
            return Err(TextError::TokenId { id, vocab_size: self.vocab_size });
        }
        Ok(())
    }

    /// Returns a token that appears in the text; special tokens appear only if `special` is set.
    pub(super) fn visible_token(&self, id: u32, special: bool) -> Option<String> {
        self.token(id).filter(|token| special || !self.special_tokens.contains(token))
    }

    fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    fn tokenizer_error(&self, error: &tokenizers::Error) -> TextError {
        TextError::Tokenizer { path: self.path.clone(), message: truncated(error.to_string(), MESSAGE_BYTES) }
    }
}

/// Checks in a thread of its own that some short texts are tokenised in time, so that a pattern which does
/// not terminate on ordinary text fails here rather than on the first request.
fn check_terminates(tokenizer: &Arc<tokenizers::Tokenizer>) -> Result<(), &'static str> {
    let tokenizer = tokenizer.clone();
    let (sender, receiver) = mpsc::channel();
    let trial = move || {
        let runs = ["a", "Z", "é", "7", " ", "\n", "!", "_", "語", "ab ", "a1", " \n"];
        // The last end contains every letter that a pattern may look for.
        let all: String = (' '..='~').collect();
        let ends = ["", "a", "!", "\n", &all];
        let texts = runs.iter().flat_map(|run| {
            let run = run.repeat(TRIAL_RUN_CHARACTERS / run.chars().count());
            ends.map(|end| format!("{run}{end}"))
        });
        let texts: Vec<String> = texts.collect();
        let tried = catch_unwind(AssertUnwindSafe(|| {
            texts.iter().for_each(|text| drop(tokenizer.encode_fast(text.as_str(), true)));
        }));
        // The receiver is gone if the time is over.
        let _too_late = sender.send(tried.is_ok());
    };
    let thread = std::thread::Builder::new().name("tokenizer".to_owned()).spawn(trial);
    match thread.map(|_| receiver.recv_timeout(TRIAL_TIMEOUT)) {
        Ok(Ok(true)) => Ok(()),
        Ok(Ok(false)) => Err("fails on ordinary text: a pattern may exceed its step limit"),
        // The thread is left behind: it cannot be stopped and ends with the process.
        Ok(Err(_)) => Err("does not terminate on ordinary text"),
        Err(_) => Err("cannot start a thread to test it"),
    }
}

/// Parses a tokenizer with the library, whose panics on malformed input become errors.
fn parse_tokenizer(bytes: &[u8]) -> tokenizers::Result<tokenizers::Tokenizer> {
    /// Parts that are parsed first, as the library panics if the content is not JSON or a number of the decoder is
    /// out of range.
    #[derive(serde::Deserialize)]
    struct TokenizerParts {
        #[serde(rename = "decoder")]
        _decoder: Option<Value>,
    }
    serde_json::from_slice::<TokenizerParts>(bytes)?;
    catch_unwind(AssertUnwindSafe(|| tokenizers::Tokenizer::from_bytes(bytes)))
        .unwrap_or_else(|_panic| Err("reading it crashed".into()))
}

/// Returns the byte that a token such as `<0xE5>` stands for, by the rule of the library's own decoder.
pub(super) fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// Returns the byte that a character of byte-level BPE stands for: printable Latin-1 characters stand for
/// themselves, the characters from 256 on for the other bytes in order (`bytes_to_unicode` of GPT-2).
pub(super) fn byte_of_character(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ 0..256 => u8::try_from(code).ok().filter(|byte| is_printable(*byte)),
        code => (0..=255_u8).filter(|byte| !is_printable(*byte)).nth(usize::try_from(code - 256).ok()?),
    }
}

/// Reports if byte-level BPE writes a byte as the Latin-1 character with its code.
fn is_printable(byte: u8) -> bool {
    matches!(byte, 33..=126 | 161..=172 | 174..=255)
}

/// Returns the character of byte-level BPE that stands for a byte; the inverse of [`byte_of_character`].
pub(super) fn character_of_byte(byte: u8) -> char {
    match is_printable(byte) {
        true => char::from(byte),
        // At most 68 bytes are not printable, so that the code is always a character.
        false => {
            let before = (0..byte).filter(|byte| !is_printable(*byte)).count() as u32;
            char::from_u32(256 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    }
}

/// Reports if a component of a tokenizer, or a part of it, has the type `name`.
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

/// Reports if a decoder, or a part of it, is a `Strip` that strips the ends of tokens.
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

/// Returns the character that a decoder replaces by a space.
fn space_character(decoder: &Value) -> Option<char> {
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
            found.and_then(|space| space.chars().next()).or_else(|| map.values().find_map(space_character))
        }
        Value::Array(list) => list.iter().find_map(space_character),
        _ => None,
    }
}
