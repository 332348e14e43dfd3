//! How much text one token can stand for: what a text of so many bytes costs at least is known before
//! it is tokenised.

use std::collections::HashMap;

use serde_json::Value;
use tokenizers::models::ModelWrapper;

use crate::text::tokenizer::{byte_of, fallback_byte, has_type};

/// Most bytes of a text per token that it becomes. None where a part of the tokenizer may drop text, or
/// take any amount of it for one token: spaces that are stripped, unknown words, patterns that remove.
pub(super) fn bytes_per_token(tokenizer: &tokenizers::Tokenizer) -> Option<usize> {
    let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
    let pre_tokenizer = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
    let shrinks = shrinks(&normalizer)?;
    if !keeps_all(&pre_tokenizer) {
        return None;
    }
    let byte_level = has_type(&normalizer, "ByteLevel") || has_type(&pre_tokenizer, "ByteLevel");
    let vocabulary = tokenizer.get_vocab(false);
    let unknown = unknown(tokenizer.get_model(), &vocabulary, byte_level)?;
    let length = |token: &String| match byte_level && token.chars().all(|c| byte_of(c).is_some()) {
        true => token.chars().count(),
        false => token.len(),
    };
    let mut longest = vocabulary.keys().map(length).max().unwrap_or(0);
    for token in tokenizer.get_added_tokens_decoder().into_values() {
        if token.lstrip || token.rstrip {
            // It takes all the space around it.
            return None;
        }
        longest = longest.max(token.content.len());
    }
    longest.max(1).checked_mul(unknown)?.checked_mul(shrinks)
}

/// How many bytes one byte of normalised text was at most; none where there is no such number.
fn shrinks(normalizer: &Value) -> Option<usize> {
    if normalizer.is_null() {
        return Some(1);
    }
    match normalizer.get("type")?.as_str()? {
        "Sequence" => {
            let parts = normalizer.get("normalizers")?.as_array()?;
            parts.iter().try_fold(1_usize, |product, part| product.checked_mul(shrinks(part)?))
        }
        "Prepend" | "ByteLevel" => Some(1),
        // A character of at most 4 bytes becomes one or more.
        "NFD" | "NFKD" | "Lowercase" => Some(4),
        // A character is composed of at most 4, and of one where it is a single byte.
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

/// Reports if all text comes out of a pre-tokenizer.
fn keeps_all(pre_tokenizer: &Value) -> bool {
    if pre_tokenizer.is_null() {
        return true;
    }
    match pre_tokenizer.get("type").and_then(Value::as_str) {
        Some("Sequence") => pre_tokenizer
            .get("pretokenizers")
            .and_then(Value::as_array)
            .is_some_and(|parts| parts.iter().all(keeps_all)),
        Some("ByteLevel" | "Metaspace" | "Digits" | "UnicodeScripts" | "FixedLength") => true,
        Some("Split" | "Punctuation") => pre_tokenizer
            .get("behavior")
            .and_then(Value::as_str)
            .is_some_and(|behavior| behavior != "Removed"),
        _ => false,
    }
}

/// How many times longer than a token the text may be that it stands for, because it is unknown; none
/// where unknown text is dropped, or becomes one token however long it is.
fn unknown(model: &ModelWrapper, vocabulary: &HashMap<String, u32>, byte_level: bool) -> Option<usize> {
    let all_bytes = || {
        let bytes = vocabulary.keys().filter_map(|token| fallback_byte(token).filter(|_| token.is_ascii()));
        bytes.collect::<std::collections::HashSet<u8>>().len() == 256
    };
    let all_characters = || {
        let single = |token: &String| {
            let mut characters = token.chars();
            characters.next().filter(|_| characters.next().is_none()).and_then(byte_of)
        };
        vocabulary.keys().filter_map(single).collect::<std::collections::HashSet<u8>>().len() == 256
    };
    match model {
        ModelWrapper::BPE(bpe) => {
            let plain = bpe.continuing_subword_prefix.is_none() && bpe.end_of_word_suffix.is_none();
            let known = plain && ((byte_level && all_characters()) || (bpe.byte_fallback && all_bytes()));
            match (known, bpe.unk_token.is_some() && !bpe.fuse_unk) {
                (true, _) => Some(1),
                // One token for each character.
                (false, true) => Some(4),
                (false, false) => None,
            }
        }
        ModelWrapper::Unigram(unigram) if unigram.byte_fallback() && all_bytes() => Some(1),
        _ => None,
    }
}
