//! A converted GPT-2 answers as the dense model does in transformers if each token uses all experts. Its bits do not
//! depend on the placement of experts.

use remoe_test_support::binaries::workspace;
use remoe_test_support::command::remoe;
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;

/// Tolerance of the logits: max|difference| / max|reference|.
const LOGITS: f64 = 2e-4;

/// Reference values of the dense model, by transformers.
#[derive(Deserialize)]
struct DenseReference {
    prompts: Vec<ReferencePrompt>,
}

#[derive(Deserialize)]
struct ReferencePrompt {
    ids: Vec<u32>,
    last_logits: Vec<f64>,
    greedy: Vec<u32>,
}

async fn ask(command: &str, folder: &Path, ids: &[u32], flags: &[&str]) -> Value {
    let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
    let ids = ids.join(",");
    let start = [command, "--model", folder.to_str().unwrap(), "--prompt-ids", &ids];
    let (code, answer) = remoe(&[&start, flags].concat()).await;
    assert_eq!(code, Some(0), "{answer}");
    answer
}

fn logits(answer: &Value) -> Vec<f64> {
    answer["last_logits"].as_array().unwrap().iter().map(|logit| logit.as_f64().unwrap()).collect()
}

/// Returns max|difference| / max|reference|.
fn difference(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0_f64, |largest, logit| largest.max(logit.abs()));
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0_f64, f64::max) / largest
}

#[tokio::test(flavor = "multi_thread")]
async fn converted_gpt2_equals_the_dense_gpt2() {
    let dense = workspace().join("tests/fixtures/dense/gpt2");
    let text = std::fs::read_to_string(dense.join("expected.json")).unwrap();
    let expected: DenseReference = serde_json::from_str(&text).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let convert = async |name: &str, top_k: &str| {
        let to = scratch.path().join(name);
        let flags = ["--experts", "8", "--top-k", top_k];
        let places = [dense.to_str().unwrap(), to.to_str().unwrap()];
        let (code, report) = remoe(&[&["convert", "gpt2-moe"][..], &places, &flags].concat()).await;
        assert_eq!(code, Some(0), "{report}");
        assert_eq!((&report["layers"], &report["expert_width"]), (&3.into(), &8.into()), "{report}");
        to
    };
    let whole = convert("whole", "8").await;
    for prompt in &expected.prompts {
        let flags = ["--dtype", "float32", "--remote-ratio", "0.5"];
        let found = logits(&ask("logits", &whole, &prompt.ids, &flags).await);
        let off = difference(&found, &prompt.last_logits);
        assert!(off <= LOGITS, "logits of {:?} differ by {off}", prompt.ids);
    }
    let prompt = expected.prompts.last().unwrap();
    let tokens = prompt.greedy.len().to_string();
    let flags = ["--dtype", "float32", "--remote-ratio", "0.5", "--ignore-eos", "--max-tokens", &tokens];
    let answer = ask("generate", &whole, &prompt.ids, &flags).await;
    assert_eq!(answer["tokens"], serde_json::json!(prompt.greedy));

    // With fewer experts per token it is another model, which does not depend on the placement either.
    let part = convert("part", "2").await;
    for dtype in ["float32", "bfloat16"] {
        for quantised in [&[][..], &["--experts-dtype", "int8"]] {
            let flags = [&["--dtype", dtype], quantised].concat();
            let alone = ask("logits", &part, &prompt.ids, &flags).await;
            let apart =
                ask("logits", &part, &prompt.ids, &[&flags[..], &["--remote-ratio", "0.5"]].concat()).await;
            assert_eq!(alone, apart, "{dtype} {quantised:?}");
            assert!(difference(&logits(&alone), &prompt.last_logits) > 10.0 * LOGITS);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unconvertible_model_is_refused() {
    let dense = workspace().join("tests/fixtures/dense/gpt2");
    let scratch = tempfile::tempdir().unwrap();
    let to = scratch.path().join("to");
    let (from, to) = (dense.to_str().unwrap(), to.to_str().unwrap());
    let served = workspace().join("tests/fixtures/mixtral-basic");
    let served = served.to_str().unwrap();
    for (arguments, code, field) in [
        (&[from, to, "--experts", "5"][..], 2, "--experts"),
        (&[from, to, "--top-k", "9"], 2, "--top-k"),
        (&[from, from], 2, "TO"),
        (&[served, to], 4, "model_type"),
    ] {
        let (found, answer) = remoe(&[&["convert", "gpt2-moe"], arguments].concat()).await;
        assert_eq!((found, &answer["error"]["field"]), (Some(code), &field.into()), "{answer}");
    }
}
