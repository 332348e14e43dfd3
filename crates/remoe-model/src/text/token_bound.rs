//! Upper bound of the text that one token stands for, from which the least number of tokens of a text
//! follows before the text is tokenised.

use std::collections::HashMap;

use serde_json::Value;
use tokenizers::models::ModelWrapper;

use crate::text::tokenizer::{byte_of_character, fallback_byte, has_type};

/// Returns the largest number of bytes of text that one token can stand for.
///
/// `None` if a part of the tokenizer may drop text, or may turn any amount of text into one token:
/// stripped spaces, unknown words, patterns that remove their matches.
pub(super) fn bytes_per_token(tokenizer: &tokenizers::Tokenizer) -> Option<usize> {
    let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
    let pre_tokenizer = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
    let shrink_factor = shrink_factor(&normalizer)?;
    if !keeps_all_text(&pre_tokenizer) {
        return None;
    }
    let byte_level = has_type(&normalizer, "ByteLevel") || has_type(&pre_tokenizer, "ByteLevel");
    let vocabulary = tokenizer.get_vocab(false);
    let unknown_factor = unknown_factor(tokenizer.get_model(), &vocabulary, byte_level)?;
    let length = |token: &String| match byte_level && token.chars().all(|c| byte_of_character(c).is_some()) {
        true => token.chars().count(),
        false => token.len(),
    };
    let mut longest = vocabulary.keys().map(length).max().unwrap_or(0);
    for token in tokenizer.get_added_tokens_decoder().into_values() {
        if token.lstrip || token.rstrip {
            // Such a token absorbs any amount of white space around it.
            return None;
        }
        longest = longest.max(token.content.len());
    }
    longest.max(1).checked_mul(unknown_factor)?.checked_mul(shrink_factor)
}

/// Returns how many bytes of the original text one byte of the normalised text can come from at most, or
/// `None` if that is unbounded or the normaliser is unknown.
fn shrink_factor(normalizer: &Value) -> Option<usize> {
    if normalizer.is_null() {
        return Some(1);
    }
    match normalizer.get("type")?.as_str()? {
        "Sequence" => {
            let parts = normalizer.get("normalizers")?.as_array()?;
            parts.iter().try_fold(1_usize, |product, part| product.checked_mul(shrink_factor(part)?))
        }
        "Prepend" | "ByteLevel" => Some(1),
        // A character has at most 4 bytes in UTF-8 and becomes one character or several.
        "NFD" | "NFKD" | "Lowercase" => Some(4),
        // A character is composed of at most 4 characters, and a single-byte one of one character.
        "NFC" | "NFKC" => Some(8),
        "Replace" => {
            let pattern = normalizer.get("pattern")?.get("String")?.as_str()?;
            let content = normalizer.get("content")?.as_str()?;
            if pattern.is_empty() || content.is_empty() {
                return None;
            }
            Some(pattern.len().div_ceil(content.len()))
        }
        _ => None,
    }
}

/// Reports if a pre-tokenizer is known to drop no text.
fn keeps_all_text(pre_tokenizer: &Value) -> bool {
    if pre_tokenizer.is_null() {
        return true;
    }
    match pre_tokenizer.get("type").and_then(Value::as_str) {
        Some("Sequence") => pre_tokenizer
            .get("pretokenizers")
            .and_then(Value::as_array)
            .is_some_and(|parts| parts.iter().all(keeps_all_text)),
        Some("ByteLevel" | "Metaspace" | "Digits" | "UnicodeScripts" | "FixedLength") => true,
        Some("Split" | "Punctuation") => pre_tokenizer
            .get("behavior")
            .and_then(Value::as_str)
            .is_some_and(|behavior| behavior != "Removed"),
        _ => false,
    }
}

/// Returns by which factor unknown text may be longer than the token that stands for it: 1 if every byte
/// is in the vocabulary, 4 if each unknown character becomes a token.
///
/// `None` if unknown text is dropped, or becomes a single token however long it is.
fn unknown_factor(
    model: &ModelWrapper,
    vocabulary: &HashMap<String, u32>,
    byte_level: bool,
) -> Option<usize> {
    let all_bytes = || {
        let bytes = vocabulary.keys().filter_map(|token| fallback_byte(token).filter(|_| token.is_ascii()));
        bytes.collect::<std::collections::HashSet<u8>>().len() == 256
    };
    let all_characters = || {
        let single = |token: &String| {
            let mut characters = token.chars();
            characters.next().filter(|_| characters.next().is_none()).and_then(byte_of_character)
        };
        vocabulary.keys().filter_map(single).collect::<std::collections::HashSet<u8>>().len() == 256
    };
    match model {
        ModelWrapper::BPE(bpe) => {
            let plain = bpe.continuing_subword_prefix.is_none() && bpe.end_of_word_suffix.is_none();
            let known = plain && ((byte_level && all_characters()) || (bpe.byte_fallback && all_bytes()));
            match (known, bpe.unk_token.is_some() && !bpe.fuse_unk) {
                (true, _) => Some(1),
                // Each unknown character of up to 4 bytes becomes a token.
                (false, true) => Some(4),
                (false, false) => None,
            }
        }
        ModelWrapper::Unigram(unigram) if unigram.byte_fallback() && all_bytes() => Some(1),
        _ => None,
    }
}
