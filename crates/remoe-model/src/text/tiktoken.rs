//! Conversion of `tiktoken.model`, the vocabulary of Kimi's tokenizer, to an equivalent `tokenizer.json`.
//!
//! A line holds a token in base64 and its rank, which is its id. tiktoken merges the two neighbours whose union has the
//! lowest rank. Byte-level BPE merges by a list of pairs, so each token is listed once for each split into two other tokens,
//! as transformers does (`TikTokenConverter` of `convert_slow_tokenizer.py`). The special tokens follow the ranks
//! (`tokenization_kimi.py` of moonshotai/Kimi-K2-Instruct).

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::error::CheckpointError;
use crate::fields::Fields;
use crate::json;
use crate::store::{Store, read_fully_at};
use crate::text::error::TextError;
use crate::text::tokenizer::character_of_byte;

const FILE: &str = "tiktoken.model";
const CONFIG_FILE: &str = "tokenizer_config.json";

/// Largest size of the file in bytes; Kimi's has 2.8 MB.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// Most tokens of a vocabulary; published ones have a few hundred thousand.
const MAX_TOKENS: usize = 1 << 20;
/// Longest token in bytes; each of its splits in two is looked up.
const MAX_TOKEN_BYTES: usize = 256;
/// Most special tokens after the ranks (`num_reserved_special_tokens`, and two more).
const MAX_SPECIAL_TOKENS: usize = 256 + 2;

/// Tokenizer class that uses [`PATTERN`], without the repository that may precede it.
const TOKENIZER_CLASS: &str = "tokenization_kimi.TikTokenTokenizer";
/// Pre-tokenisation pattern of the class (`pat_str`): runs of Han, words of other scripts split by case, numbers of at most
/// three digits, punctuation, white space.
const PATTERN: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

/// Ids of the tokens, by their bytes.
type Ranks = HashMap<Vec<u8>, u32>;

/// Reads `tiktoken.model` of a model with `vocab_size` tokens; returns the path of the file and an equivalent
/// `tokenizer.json`, or `None` if the store has no such file.
///
/// # Errors
/// [`TextError::Tokenizer`] if the file is malformed or too large, [`TextError::Checkpoint`] if it cannot be read or the
/// tokenizer's class is unknown.
pub(super) fn read(store: &dyn Store, vocab_size: usize) -> Result<Option<(PathBuf, Vec<u8>)>, TextError> {
    let path = store.root().join(FILE);
    let malformed = |message: String| TextError::Tokenizer { path: path.clone(), message };
    let failed = |error| TextError::Checkpoint(CheckpointError::io(&path, error));
    let Some(file) = store.open(FILE).map_err(failed)? else { return Ok(None) };
    if file.size() > MAX_FILE_BYTES {
        return Err(malformed(format!("has {} bytes, expected at most {MAX_FILE_BYTES}", file.size())));
    }
    let mut text = vec![0; file.size() as usize];
    let read = read_fully_at(&*file, &mut text, 0).map_err(failed)?;
    text.truncate(read);
    let ranks = parse(&text).map_err(malformed)?;
    let special_tokens = special_tokens(store, ranks.len(), vocab_size)?;
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": special_tokens,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "ignore_merges": true, "vocab": vocabulary(&ranks), "merges": merges(&ranks)},
    });
    Ok(Some((path, tokenizer.to_string().into_bytes())))
}

/// Parses the lines of the file. The ranks are the numbers from 0 to the count of lines, in any order.
fn parse(text: &[u8]) -> Result<Ranks, String> {
    let lines =
        (1_usize..).zip(text.split(|byte| *byte == b'\n')).filter(|(_, line)| !line.trim_ascii().is_empty());
    let count = lines.clone().count();
    if count > MAX_TOKENS {
        return Err(format!("has {count} lines, expected at most {MAX_TOKENS}"));
    }
    let mut is_taken = vec![false; count];
    let mut ranks = Ranks::with_capacity(count);
    for (number, line) in lines {
        let line_error = |what: String| format!("line {number}: {what}");
        let line = str::from_utf8(line).map_err(|_| line_error("is no UTF-8".to_owned()))?;
        let Some((token, rank)) = line.trim().split_once(' ') else {
            return Err(line_error("expected a token in base64, a space and a rank".to_owned()));
        };
        let token = STANDARD.decode(token).map_err(|error| line_error(format!("invalid base64: {error}")))?;
        if token.is_empty() || token.len() > MAX_TOKEN_BYTES {
            return Err(line_error(format!(
                "token of {} bytes, expected 1 to {MAX_TOKEN_BYTES}",
                token.len()
            )));
        }
        let parsed: Option<u32> = rank.parse().ok();
        let slot = match parsed {
            Some(rank) => is_taken.get_mut(rank as usize),
            None => None,
        };
        match (parsed, slot) {
            (Some(rank), Some(taken)) if !*taken => {
                *taken = true;
                if ranks.insert(token, rank).is_some() {
                    return Err(line_error("token is in an earlier line, too".to_owned()));
                }
            }
            (Some(rank), Some(_)) => {
                return Err(line_error(format!("rank {rank} is in an earlier line, too")));
            }
            _ => {
                let most = count.saturating_sub(1);
                return Err(line_error(format!("invalid rank {rank:?}: expected 0 to {most}, each once")));
            }
        }
    }
    match (0..=255_u8).find(|byte| !ranks.contains_key([*byte].as_slice())) {
        Some(byte) => Err(format!("missing token of the byte {byte}")),
        None => Ok(ranks),
    }
}

/// Returns bytes in the alphabet of byte-level BPE.
fn byte_level_text(token: &[u8]) -> String {
    token.iter().map(|byte| character_of_byte(*byte)).collect()
}

/// Returns the ids of the tokens, by their byte-level text.
fn vocabulary(ranks: &Ranks) -> BTreeMap<String, u32> {
    ranks.iter().map(|(token, rank)| (byte_level_text(token), *rank)).collect()
}

/// Lists each split of a token into two other tokens, in order of the token's rank and of theirs.
fn merges(ranks: &Ranks) -> Vec<[String; 2]> {
    let mut merges = Vec::new();
    for (token, rank) in ranks {
        for (left, right) in (1..token.len()).map(|cut| token.split_at(cut)) {
            if let (Some(first), Some(second)) = (ranks.get(left), ranks.get(right)) {
                merges.push(([*rank, *first, *second], left, right));
            }
        }
    }
    merges.sort_unstable_by_key(|(order, ..)| *order);
    merges.into_iter().map(|(_, left, right)| [byte_level_text(left), byte_level_text(right)]).collect()
}

/// Returns the special tokens with ids from `ranks` on, below `vocab_size`: named by `added_tokens_decoder` of the
/// tokenizer's config, or reserved.
fn special_tokens(store: &dyn Store, ranks: usize, vocab_size: usize) -> Result<Vec<Value>, TextError> {
    let path = store.root().join(CONFIG_FILE);
    let object = json::object_if_present(store, CONFIG_FILE)?.unwrap_or_default();
    let fields = Fields::new(&path, &object);
    check_class(&path, fields)?;
    let decoder = fields.object("added_tokens_decoder")?;
    let mut ids: HashMap<String, usize> = HashMap::new();
    let mut tokens = Vec::new();
    for id in ranks..vocab_size.min(ranks + MAX_SPECIAL_TOKENS) {
        let name = id.to_string();
        let entry = match &decoder {
            Some(decoder) => decoder.object(&name)?,
            None => None,
        };
        let (content, is_special) = match &entry {
            None => (format!("<|reserved_token_{id}|>"), false),
            Some(entry) => match entry.text("content")? {
                Some(content) if !content.is_empty() => (content.to_owned(), entry.flag("special", false)?),
                _ => {
                    let field = format!("added_tokens_decoder.{id}.content");
                    return Err(fields
                        .error(&field, "is missing or empty, expected the token's text")
                        .into());
                }
            },
        };
        if let Some(other) = ids.insert(content.clone(), id) {
            let message = format!("token {content:?} has two ids, {other} and {id}");
            return Err(fields.error("added_tokens_decoder", message).into());
        }
        tokens.push(json!({
            "id": id, "content": content, "special": is_special,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        }));
    }
    Ok(tokens)
}

/// Refuses classes of tokenizers other than [`TOKENIZER_CLASS`]: the pattern is not in the file but in code of the checkpoint.
fn check_class(path: &Path, fields: Fields<'_>) -> Result<(), TextError> {
    let classes = fields.object("auto_map")?.and_then(|map| map.get("AutoTokenizer"));
    let class = match classes {
        Some(Value::Array(list)) => list.first().and_then(Value::as_str),
        Some(Value::String(class)) => Some(class.as_str()),
        _ => None,
    };
    let class = class.map(|class| class.rsplit("--").next().unwrap_or(class));
    match class {
        Some(TOKENIZER_CLASS) => Ok(()),
        other => {
            let found = other.map_or_else(|| "no class".to_owned(), |class| format!("`{class}`"));
            Err(CheckpointError::unsupported(
                path,
                "auto_map.AutoTokenizer",
                format!("{found} beside {FILE}; supported is {TOKENIZER_CLASS}, otherwise add the tokenizer as tokenizer.json"),
            )
            .into())
        }
    }
}
