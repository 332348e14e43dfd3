//! Measures the cost of masks: `cargo test --release -p main-model-fn --lib grammar::cost -- --ignored --nocapture`.

use super::{Compiler, Source, Tokens, Whitespace};
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;

/// Tokens of a typical vocabulary.
const TOKENS: usize = 50_000;

/// Vocabulary of all bytes, then words of letters with a leading space in most cases, punctuation and digits; lengths as in
/// vocabularies of byte-level BPE.
struct Words(Vec<Vec<u8>>);

impl Words {
    fn new() -> Self {
        let mut words: Vec<Vec<u8>> = (0..=255_u8).map(|byte| vec![byte]).collect();
        let mut state = 1_u64;
        let mut below = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % bound
        };
        while words.len() < TOKENS {
            let letters: &[u8] = match below(12) {
                0 => b"0123456789",
                1 => b"{}[]\":,. \n-_/",
                _ => b"etaoinshrdlucmfwypvbgkqjxz",
            };
            let mut word = if below(5) < 3 { b" ".to_vec() } else { Vec::new() };
            let length = 2 + below(4) + below(5);
            word.extend((0..length).map(|_| letters[below(letters.len() as u64) as usize]));
            words.push(word);
        }
        Self(words)
    }
}

impl Tokens for Words {
    fn bytes(&self, id: u32) -> Vec<u8> {
        self.0[id as usize].clone()
    }

    fn is_special(&self, _: u32) -> bool {
        false
    }
}

#[tokio::test]
#[ignore = "a measurement"]
async fn of_a_token() {
    let compiler = Compiler::new(Arc::new(Words::new()), TOKENS, Vec::new());
    let person = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 200},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 20},
            "notes": {"type": "array", "items": {"type": "string", "pattern": "^[a-z ]{3,40}$"}, "minItems": 20},
        },
        "required": ["name", "age", "tags", "notes"],
        "additionalProperties": false,
    });
    for (name, source) in [
        ("a JSON Schema", Source::json(Some(person), Whitespace::default())),
        ("any JSON object", Source::json(None, Whitespace::default())),
        ("a regular expression", Source::regex("([a-z]+ ){5,200}[0-9]+")),
        (
            "Lark rules",
            Source::lark("start: sum\nsum: NUMBER (\"+\" NUMBER){500}\nNUMBER: /[0-9]+/".to_owned()),
        ),
    ] {
        let begun = Instant::now();
        let grammar = compiler.compile(source.unwrap(), "f").await.unwrap();
        let compiled = begun.elapsed();
        let mut micros = Vec::new();
        let mut logits = vec![0.0_f32; TOKENS];
        for seed in 0..20_usize {
            let mut progress = grammar.begin();
            for position in 0..100_usize {
                let begun = Instant::now();
                let mask = progress.mask().unwrap();
                logits.fill(0.0);
                mask.apply(&mut logits);
                micros.push(begun.elapsed().as_secs_f64() * 1e6);
                let allowed: Vec<u32> =
                    (0..).zip(&logits).filter(|(_, logit)| logit.is_finite()).map(|(id, _)| id).collect();
                let token = allowed[(seed * 7919 + position * 104_729) % allowed.len()];
                if progress.step(token).unwrap() {
                    break;
                }
            }
        }
        micros.sort_by(f64::total_cmp);
        let at = |part: f64| micros[((micros.len() - 1) as f64 * part) as usize];
        println!(
            "{name}: compiled in {compiled:.1?}; a mask of {TOKENS} tokens takes {:.0} us at p50, {:.0} at p90, {:.0} at p99, of {}",
            at(0.5),
            at(0.9),
            at(0.99),
            micros.len()
        );
    }
}
