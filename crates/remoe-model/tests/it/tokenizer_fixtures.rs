//! Tokenizers of the fixtures: encoding, decoding and chat prompts compared with transformers
//! (`tests/fixtures.md`), and the same texts streamed.

#![cfg(feature = "text")]

use remoe_model::text::{ChatTemplate, Detokenizer, Rendering, TextError, Tokenizer};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

const NAMES: [&str; 4] = ["tok-bytelevel", "tok-llama", "tok-unigram", "tok-harmony"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenizerFixture {
    vocab_size: usize,
    special: BTreeMap<String, u32>,
    encode: Vec<Encoded>,
    decode: Vec<Decoded>,
    chat: Vec<Chat>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Encoded {
    text: String,
    ids: Vec<u32>,
    ids_without_special: Vec<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Decoded {
    ids: Vec<u32>,
    text: String,
    text_without_special: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Chat {
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    add_generation_prompt: bool,
    rendered: Option<String>,
    ids: Option<Vec<u32>>,
    error: Option<String>,
}

struct Fixture {
    name: &'static str,
    folder: PathBuf,
    tokenizer: Tokenizer,
    expected: TokenizerFixture,
}

fn fixtures() -> Vec<Fixture> {
    let open = |name| {
        let folder =
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizers").join(name);
        let text = std::fs::read_to_string(folder.join("expected.json")).unwrap();
        let expected: TokenizerFixture = serde_json::from_str(&text).unwrap();
        let tokenizer = Tokenizer::open(&folder, expected.vocab_size).unwrap().unwrap();
        assert!(expected.encode.len() >= 40 && expected.decode.len() >= 200 && expected.chat.len() >= 10);
        Fixture { name, folder, tokenizer, expected }
    };
    NAMES.map(open).into()
}

#[test]
fn texts_encode_as_in_transformers() {
    for Fixture { name, tokenizer, expected, .. } in fixtures() {
        for Encoded { text, ids, ids_without_special } in expected.encode {
            assert_eq!(tokenizer.encode(&text, true).unwrap(), ids, "{name}: {text:?}");
            assert_eq!(tokenizer.encode(&text, false).unwrap(), ids_without_special, "{name}: {text:?}");
        }
        for (token, id) in expected.special {
            assert!(tokenizer.is_special(id), "{name}: {token}");
        }
    }
}

#[test]
fn ids_decode_as_in_transformers() {
    for Fixture { name, tokenizer, expected, .. } in fixtures() {
        for Decoded { ids, text, text_without_special } in expected.decode {
            assert_eq!(tokenizer.decode_with_special(&ids).unwrap(), text, "{name}: {ids:?}");
            assert_eq!(tokenizer.decode(&ids).unwrap(), text_without_special, "{name}: {ids:?}");
        }
    }
}

/// After each token, the text emitted so far is a prefix of the final text and ends with a whole
/// character.
#[test]
fn streams_give_the_decoded_texts() {
    let mut held = 0;
    for Fixture { name, tokenizer, expected, .. } in fixtures() {
        for Decoded { ids, text_without_special: text, .. } in expected.decode {
            let mut detokenizer = Detokenizer::new();
            let mut given = String::new();
            for &id in &ids {
                let added = detokenizer.push(&tokenizer, id).unwrap();
                held += usize::from(added.is_empty() && !tokenizer.is_special(id));
                given += &added;
                assert!(text.starts_with(&given), "{name}: {given:?} is no beginning of {text:?}");
            }
            given += &detokenizer.finish(&tokenizer).unwrap();
            assert_eq!(given, text, "{name}: {ids:?}");
        }
    }
    assert!(held > 100, "partial characters were held back {held} times only");
}

#[test]
fn chats_render_as_in_transformers() {
    let (mut refused, mut called) = (0, 0);
    for Fixture { name, folder, tokenizer, expected } in fixtures() {
        let template = ChatTemplate::open(folder).unwrap().unwrap();
        for Chat { messages, tools, add_generation_prompt, rendered, ids, error } in expected.chat {
            let rendering =
                Rendering { tools: tools.as_deref(), add_generation_prompt, ..Rendering::default() };
            let outcome = template.render_with(&messages, rendering);
            called += usize::from(outcome.is_ok() && tools.is_some());
            match (outcome, rendered, error) {
                (Ok(text), Some(rendered), None) => {
                    assert_eq!(text, rendered, "{name}");
                    assert_eq!(tokenizer.encode(&text, false).unwrap(), ids.unwrap(), "{name}: {text:?}");
                }
                (Err(TextError::Refused(message)), None, Some(error)) => {
                    assert_eq!(message, error, "{name}");
                    refused += 1;
                }
                (outcome, rendered, error) => panic!("{name}: {outcome:?}, not {rendered:?} or {error:?}"),
            }
        }
    }
    assert!(refused > 0 && called > 0, "some chat is refused, some has tools");
}
