//! Target: data that gateways receive from main functions: model summaries, activation counts and usage shares.
//!
//! Input: a byte that selects the format, then the bytes of a model summary, or the text of counts or shares.

use crate::{check_error, memory};
use remoe_predictor::record::RecordHeader;
use remoe_predictor::{Activations, Phase, UsageShares};
use remoe_usage::{ModelSummary, PredictorOptions, RequestArrival, Retention, Tenant};
use serde_json::json;

const LAYERS: usize = 2;
const EXPERTS: usize = 3;
const TOP_K: u32 = 2;
/// Fixed part of the memory limit: a tokenizer, and tokenizing two prompts.
const BASE_BYTES: usize = 16 << 20;
/// Memory limit per byte: short JSON values become entries of maps and lists that double.
const BYTES_PER_INPUT_BYTE: usize = 512;

fn header() -> RecordHeader {
    RecordHeader {
        model: "ab".to_owned(),
        layers: (0..LAYERS as u32).collect(),
        experts: EXPERTS as u32,
        top_k: TOP_K,
        dtype: "float32".to_owned(),
        tokens: false,
    }
}

pub fn run(data: &[u8]) {
    let Some((format, rest)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(rest);
    memory::with_limit(BASE_BYTES + BYTES_PER_INPUT_BYTE * data.len(), || match format % 3 {
        0 => match UsageShares::from_text(&text, LAYERS, EXPERTS) {
            Ok(shares) => check_shares(&shares),
            Err(error) => check_error(&error.to_string()),
        },
        1 => match Activations::from_text(&text, &header()) {
            Ok(activations) => {
                for phase in Phase::ALL {
                    activations.shares(phase).expect("there are experts").iter().for_each(check_shares);
                }
            }
            Err(error) => check_error(&error.to_string()),
        },
        _ => match ModelSummary::from_bytes(&rest.to_vec().into())
            .and_then(|summary| summary.open(PredictorOptions::default()))
        {
            Ok(mut predictor) => {
                for (id, body) in
                    [json!({"prompt": [0, 1, 2]}), json!({"prompt": "two words"})].iter().enumerate()
                {
                    let body = body.to_string();
                    predictor.begin_request(RequestArrival {
                        id: id as u64,
                        tenant: Tenant::named("a"),
                        retention: Retention::Records,
                        body: body.as_bytes(),
                    });
                }
                if let Ok(Some(mix)) = predictor.predict_joint_usage() {
                    check_shares(&mix.shares);
                }
            }
            Err(error) => check_error(&error.to_string()),
        },
    });
}

fn check_shares(shares: &UsageShares) {
    for row in shares.rows() {
        assert!(row.iter().all(|share| (0.0..=1.0).contains(share)), "{row:?}");
        assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-3, "{row:?}");
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let shares = UsageShares::from_weights(EXPERTS, vec![1.0, 2.0, 0.0, 5.0, 0.1, 0.1]).expect("two rows");
    let shares = shares.to_text(1000).expect("a short text");
    let mut activations = Activations::new(LAYERS, EXPERTS);
    let selected: [&[(u32, f32)]; LAYERS] = [&[(0, 0.5), (1, 0.5)], &[(1, 0.5), (2, 0.5)]];
    Phase::ALL.into_iter().for_each(|phase| activations.count(phase, selected.into_iter()));
    let counts = activations.to_text().expect("a short text");
    let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"two": 0, "words": 1, "?": 2}, "unk_token": "?"}});
    let tokenizer = tokenizer.to_string();
    let head = json!({"version": 1, "model": "ab".repeat(32), "layers": [0, 1], "experts": EXPERTS, "top_k": TOP_K,
        "dtype": "float32", "vocabulary": 3, "files": [["tokenizer.json", tokenizer.len()]], "predictor": 0,
        "dimensions": 2, "element": "f32"});
    let rows = [1.0_f32, 0.0, 0.0, 1.0, 0.5, 0.5].into_iter().flat_map(f32::to_le_bytes);
    let summary = [2].into_iter().chain(format!("{head}\n{tokenizer}").into_bytes()).chain(rows).collect();
    let input = |format: u8, text: &str| [&[format], text.as_bytes()].concat();
    let approximate = format!("3.5.{shares}.0.");
    vec![input(0, &shares), input(1, &counts), input(1, &approximate), summary]
}
