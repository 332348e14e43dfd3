//! `tiktoken.model`: ids and texts compared with tiktoken (`tests/fixtures/make_tiktoken.py`), and damaged files.

#![cfg(feature = "text")]

use crate::support::Folder;

use remoe_model::text::{Detokenizer, TextError, Tokenizer};
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::PathBuf;

const CONFIG: &str = "tokenizer_config.json";
const FILE: &str = "tiktoken.model";

#[derive(Deserialize)]
struct TiktokenFixture {
    vocab_size: usize,
    encode: Vec<EncodingCase>,
    decode: Vec<EncodingCase>,
}

#[derive(Deserialize)]
struct EncodingCase {
    text: String,
    ids: Vec<u32>,
}

fn fixture() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizers/tok-tiktoken")
}

fn expected() -> TiktokenFixture {
    serde_json::from_str(&std::fs::read_to_string(fixture().join("expected_tiktoken.json")).unwrap()).unwrap()
}

/// Copies the fixture's files to a folder of their own.
fn copied() -> Folder {
    let folder = Folder::new();
    for name in [FILE, CONFIG] {
        folder.put(name, std::fs::read(fixture().join(name)).unwrap());
    }
    folder
}

fn ranks() -> String {
    std::fs::read_to_string(fixture().join(FILE)).unwrap()
}

#[test]
fn texts_encode_as_in_tiktoken() {
    let TiktokenFixture { vocab_size, encode, .. } = expected();
    let tokenizer = Tokenizer::open(fixture(), vocab_size).unwrap().unwrap();
    assert!(encode.len() > 250, "{}", encode.len());
    for EncodingCase { text, ids } in encode {
        assert_eq!(tokenizer.encode(&text, true).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.encode(&text, false).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode_with_special(&ids).unwrap(), text);
    }
    assert!(tokenizer.bytes_per_token().is_some());
}

#[test]
fn ids_decode_as_in_tiktoken() {
    let TiktokenFixture { vocab_size, decode, .. } = expected();
    let tokenizer = Tokenizer::open(fixture(), vocab_size).unwrap().unwrap();
    for EncodingCase { text, ids } in decode {
        assert_eq!(tokenizer.decode_with_special(&ids).unwrap(), text, "{ids:?}");
        let whole = tokenizer.decode(&ids).unwrap();
        let mut detokenizer = Detokenizer::new();
        let parts: String = ids.iter().map(|id| detokenizer.push(&tokenizer, *id).unwrap()).collect();
        assert_eq!(parts + &detokenizer.finish(&tokenizer).unwrap(), whole, "{ids:?}");
    }
}

#[test]
fn special_tokens_follow_the_ranks() {
    let tokenizer = Tokenizer::open(fixture(), expected().vocab_size).unwrap().unwrap();
    for (token, id, is_special) in [
        ("[BOS]", 700, true),
        ("<|im_end|>", 702, true),
        ("<|reserved_token_704|>", 704, false),
        ("<|tool_calls_section_begin|>", 711, false),
        ("<|reserved_token_957|>", 957, false),
    ] {
        assert_eq!(tokenizer.token_to_id(token), Some(id));
        assert_eq!(tokenizer.is_special(id), is_special, "{token}");
        assert_eq!(tokenizer.token_bytes(id).unwrap(), token.as_bytes());
    }
    // Kimi's vocabulary ends two ids before the last special token.
    let short = Tokenizer::open(fixture(), 956).unwrap().unwrap();
    assert_eq!(
        (short.token_to_id("<|reserved_token_955|>"), short.token_to_id("<|reserved_token_956|>")),
        (Some(955), None)
    );
    assert!(short.encode("<|reserved_token_956|>", false).unwrap().iter().all(|id| *id < 700));
}

#[test]
fn tokenizer_json_takes_precedence() {
    let folder = copied();
    folder.put("tokenizer.json", "{");
    let error = Tokenizer::open(folder.path(), 958).unwrap_err();
    assert!(error.to_string().contains("tokenizer.json"), "{error}");
}

#[test]
fn damaged_ranks_are_refused_by_line() {
    let without_last = ranks().lines().take(699).map(|line| format!("{line}\n")).collect::<String>();
    for (text, words) in [
        (String::new(), "missing token of the byte 0"),
        (ranks().replace("AA== 0\n", ""), "line 699: invalid rank \"699\": expected 0 to 698"),
        (ranks().replace("AA== 0\n", "AA== -1\n"), "line 1: invalid rank \"-1\""),
        (ranks().replace("AQ== 1\n", "AQ== 0\n"), "line 2: rank 0 is in an earlier line"),
        (format!("{without_last}AQ== 699\n"), "line 700: token is in an earlier line"),
        (ranks().replace("AA== 0\n", "AA== 4294967296\n"), "line 1: invalid rank"),
        (ranks().replace("AA== 0\n", "A*== 0\n"), "line 1: invalid base64"),
        (ranks().replace("AA== 0\n", "AA==\n"), "line 1: expected a token in base64"),
        (ranks().replace("AA== 0\n", &format!("{} 0\n", "AAAA".repeat(100))), "line 1: token of 300 bytes"),
        (ranks().replace("AA== 0\n", " 0\n"), "line 1: "),
        (ranks() + &"\n".repeat(17 << 20), "expected at most 16777216"),
        ("=\n".repeat(1 << 21), "has 2097152 lines, expected at most 1048576"),
    ] {
        let folder = copied();
        folder.put(FILE, text);
        let error = Tokenizer::open(folder.path(), 958).unwrap_err();
        assert!(matches!(&error, TextError::Tokenizer { path, .. } if path.ends_with(FILE)), "{error}");
        assert!(error.to_string().contains(words), "{words}: {error}");
    }
    // The order of lines and Windows line ends do not matter.
    let mut lines: Vec<String> = ranks().lines().map(str::to_owned).collect();
    lines.reverse();
    let folder = copied();
    folder.put(FILE, lines.join("\r\n"));
    let tokenizer = Tokenizer::open(folder.path(), 958).unwrap().unwrap();
    let EncodingCase { text, ids } = &expected().encode[20];
    assert_eq!(tokenizer.encode(text, false).unwrap(), *ids);
}

#[test]
fn unknown_classes_and_names_are_refused_by_field() {
    let original: Value = serde_json::from_slice(&std::fs::read(fixture().join(CONFIG)).unwrap()).unwrap();
    let changed = |pointer: &str, value: Value| {
        let mut config = original.clone();
        *config.pointer_mut(pointer).unwrap() = value;
        let folder = copied();
        folder.put(CONFIG, config.to_string());
        Tokenizer::open(folder.path(), 958)
    };
    for (pointer, value, field) in [
        ("/auto_map", json!({}), "auto_map.AutoTokenizer"),
        (
            "/auto_map/AutoTokenizer",
            json!(["tokenization_qwen.QWenTokenizer", null]),
            "auto_map.AutoTokenizer",
        ),
        ("/added_tokens_decoder/700/content", json!(7), "700.content"),
        ("/added_tokens_decoder/700/content", json!(""), "added_tokens_decoder.700.content"),
        ("/added_tokens_decoder/700/content", json!("[EOS]"), "added_tokens_decoder"),
        ("/added_tokens_decoder", json!(["[BOS]"]), "added_tokens_decoder"),
    ] {
        let TextError::Checkpoint(error) = changed(pointer, value).unwrap_err() else { panic!("{pointer}") };
        assert_eq!(error.field(), Some(field), "{error}");
    }
    let elsewhere = json!(["moonshotai/Kimi-K2-Instruct--tokenization_kimi.TikTokenTokenizer", null]);
    assert!(changed("/auto_map/AutoTokenizer", elsewhere).is_ok());
    let folder = copied();
    std::fs::remove_file(folder.file(CONFIG)).unwrap();
    assert!(Tokenizer::open(folder.path(), 958).unwrap_err().to_string().contains("no class"));
}
