//! Prediction layer by layer, correlation, and prompt sets.

use crate::support;

use remoe_predictor::correlation::{self, PromptPair};
use remoe_predictor::layerwise::{Affinity, FineTuning, GateLookahead, HitRates, TokenRoutes};
use remoe_predictor::record::RecordHeader;
use remoe_predictor::{GateWeights, History, PredictError, prompts};
use support::{EXPERTS, LAYERS, NumberStream, TOP_K};

fn with_tokens() -> RecordHeader {
    RecordHeader { tokens: true, ..support::header() }
}

#[test]
fn affinities_foresee_more_than_popularity() {
    let (header, train, test) = (with_tokens(), support::records(300, 1), support::records(50, 2));
    let affinity = Affinity::fit(&header, &train, 1).unwrap();
    for layer in 0..LAYERS - 1 {
        assert!((affinity.popularity(layer).iter().sum::<f32>() - 1.0).abs() < 1e-5);
        assert!((affinity.following(layer, 3).iter().sum::<f32>() - 1.0).abs() < 1e-5);
        let mut order: Vec<u16> = (0..EXPERTS as u16).collect();
        let popularity = affinity.popularity(layer + 1);
        order.sort_by(|&a, &b| popularity[usize::from(b)].total_cmp(&popularity[usize::from(a)]));
        order.truncate(TOP_K);
        let (mut foreseen, mut popular) = (Vec::new(), Vec::new());
        let mut actual = Vec::new();
        for record in &test {
            let routes = TokenRoutes::from_record(&header, record).unwrap();
            foreseen.extend(affinity.predict(layer, routes.layer(layer)));
            actual.extend_from_slice(routes.layer(layer + 1));
            popular.extend(routes.tokens(layer + 1).flat_map(|_| order.clone()));
        }
        let rates = HitRates::measure(&foreseen, &actual, TOP_K).unwrap();
        let baseline = HitRates::measure(&popular, &actual, TOP_K).unwrap();
        assert!(rates.mean > baseline.mean + 0.15, "{rates:?} {baseline:?}");
    }
}

#[test]
fn records_without_tokens_teach_no_affinity() {
    let mut records = support::records(3, 1);
    assert!(Affinity::fit(&with_tokens(), &records, 0).is_err());
    assert!(Affinity::fit(&with_tokens(), &records, LAYERS).is_err());
    records[1].experts = None;
    assert!(matches!(Affinity::fit(&with_tokens(), &records, 1), Err(PredictError::Size { .. })));
    records[1].experts = Some(vec![EXPERTS as u16; records[1].prompt.len() * LAYERS * TOP_K]);
    assert!(Affinity::fit(&with_tokens(), &records, 1).is_err());
}

#[test]
fn hits_are_counted_by_hand() {
    let rates = HitRates::measure(&[1, 2, 3, 4, 5, 6], &[1, 2, 3, 5, 0, 7], 2).unwrap();
    assert_eq!(rates, HitRates { mean: 0.5, all: 1.0 / 3.0, any: 2.0 / 3.0 });
    assert!(HitRates::measure(&[1], &[1, 2], 2).is_err());
    assert!(HitRates::measure(&[1, 2, 3], &[1, 2, 3], 2).is_err());
    assert_eq!(HitRates::measure(&[], &[], 2).unwrap().mean, 0.0);
}

/// Creates states, a gate that routes them, and the resulting experts.
fn routed(tokens: usize) -> (GateWeights, Vec<f32>, Vec<u16>) {
    const HIDDEN: usize = 16;
    let mut stream = NumberStream(5);
    let gate: Vec<f32> = (0..EXPERTS * HIDDEN).map(|_| stream.float()).collect();
    let weights = GateWeights { norm: vec![1.0; HIDDEN], gate };
    let states: Vec<f32> = (0..tokens * HIDDEN).map(|_| stream.float()).collect();
    let lookahead = GateLookahead::new(weights.clone(), HIDDEN, EXPERTS, TOP_K, 1e-6).unwrap();
    let actual = lookahead.predict(&states).unwrap();
    (weights, states, actual)
}

#[test]
fn gate_on_its_own_input_is_exact_and_unchanged() {
    let (weights, states, actual) = routed(50);
    let mut lookahead = GateLookahead::new(weights, 16, EXPERTS, TOP_K, 1e-6).unwrap();
    let exact = HitRates { mean: 1.0, all: 1.0, any: 1.0 };
    assert_eq!(lookahead.measure(&states, &actual).unwrap(), exact);
    assert!(!lookahead.fine_tune(&states, &actual, FineTuning::default()).unwrap());
    assert!(lookahead.predict(&states[..7]).is_err());
    assert!(lookahead.measure(&states, &actual[1..]).is_err());
}

#[test]
fn inaccurate_gate_is_fine_tuned() {
    let (weights, states, actual) = routed(1500);
    let mut stream = NumberStream(77);
    let gate = weights.gate.iter().map(|weight| 0.3 * weight + stream.float()).collect();
    let off = GateWeights { gate, ..weights };
    let mut lookahead = GateLookahead::new(off, 16, EXPERTS, TOP_K, 1e-6).unwrap();
    let (fit, check) = (1000 * 16, 1000 * TOP_K);
    let before = lookahead.measure(&states[fit..], &actual[check..]).unwrap().mean;
    assert!(lookahead.fine_tune(&states[..fit], &actual[..check], FineTuning::default()).unwrap());
    let after = lookahead.measure(&states[fit..], &actual[check..]).unwrap().mean;
    assert!(after > before + 0.2, "{before} {after}");
}

#[test]
fn gate_that_would_get_worse_is_unchanged() {
    let (weights, states, right) = routed(1000);
    let mut lookahead = GateLookahead::new(weights, 16, EXPERTS, TOP_K, 1e-6).unwrap();
    // Nine tenths of the tokens have wrong experts; the last tenth has the right ones.
    let shifted = |expert: &u16| (expert + 1) % EXPERTS as u16;
    let taught = 900 * TOP_K;
    let actual: Vec<u16> = right[..taught].iter().map(shifted).chain(right[taught..].to_vec()).collect();
    assert!(!lookahead.fine_tune(&states, &actual, FineTuning::default()).unwrap());
    assert_eq!(lookahead.predict(&states).unwrap(), right);
}

#[test]
fn gates_of_no_width_are_refused() {
    let none = GateWeights { norm: Vec::new(), gate: Vec::new() };
    assert!(GateLookahead::new(none, 0, EXPERTS, TOP_K, 1e-6).is_err());
}

#[test]
fn correlations_by_hand() {
    let pairs = |values: &[(f64, f64)]| -> Vec<PromptPair> {
        values
            .iter()
            .map(|&(prompt_similarity, activation_similarity)| PromptPair {
                prompt_similarity,
                activation_similarity,
            })
            .collect()
    };
    let line = pairs(&[(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]);
    assert!((correlation::pearson(&line) - 1.0).abs() < 1e-12);
    let bent = pairs(&[(0.0, 0.0), (1.0, 1.0), (2.0, 8.0), (3.0, 27.0)]);
    assert!((correlation::spearman(&bent) - 1.0).abs() < 1e-12);
    assert!(correlation::pearson(&bent) < 0.95);
    // Ties share their rank: ranks 0.5, 0.5, 2 against 0, 1, 2.
    let tied = pairs(&[(1.0, 1.0), (1.0, 2.0), (2.0, 3.0)]);
    assert!((correlation::spearman(&tied) - 0.75_f64.sqrt()).abs() < 1e-12);
    assert_eq!(correlation::pearson(&pairs(&[(1.0, 1.0), (1.0, 2.0)])), 0.0);
    assert_eq!(correlation::pearson(&[]), 0.0);
}

#[test]
fn similar_prompts_use_similar_experts_here() {
    let embedding = support::embedding();
    let history = History::from_records(&embedding, LAYERS, EXPERTS, &support::records(200, 1)).unwrap();
    let tests = support::records(30, 2);
    let pairs = correlation::pairs(&embedding, &history, &tests, 20, 4).unwrap();
    assert_eq!(pairs.len(), 600);
    assert_eq!(pairs, correlation::pairs(&embedding, &history, &tests, 20, 4).unwrap());
    assert!(correlation::pearson(&pairs) > 0.3);
    // With more than the history has, takes all of them.
    assert_eq!(correlation::pairs(&embedding, &history, &tests[..1], 999, 4).unwrap().len(), 200);
}

#[test]
fn prompts_of_every_data_set() {
    let of = |line: &str| prompts::of_line(line).unwrap().map(|prompt| prompt.text);
    let lmsys = r#"{"conversation_id":"1","model":"m","conversation":[{"content":"hi there","role":"user"},{"content":"x","role":"assistant"}],"turn":1,"language":"English"}"#;
    assert_eq!(of(lmsys).as_deref(), Some("hi there"));
    let share = r#"{"id":"a","conversations":[{"from":"system","value":"s"},{"from":"human","value":"what?"},{"from":"gpt","value":"y"}]}"#;
    assert_eq!(of(share).as_deref(), Some("what?"));
    assert_eq!(of(r#"{"conversations":[{"from":"gpt","value":"y"}]}"#), None);
    assert_eq!(of(r#"{"text":" The game began . \n"}"#).as_deref(), Some("The game began ."));
    assert_eq!(of(r#"{"text":" = Valkyria Chronicles III = \n"}"#), None);
    assert_eq!(of(r#"{"text":""}"#), None);
    assert_eq!(of("   "), None);
    assert_eq!(of(r#"{"text":"c4","timestamp":"2019","url":"http://a"}"#).as_deref(), Some("c4"));
    assert_eq!(of(r#"{"text":"slim","meta":{"redpajama_set_name":"RedPajamaC4"}}"#).as_deref(), Some("slim"));
    let ours = prompts::of_line(r#"{"kind":"sql","prompt":"select"}"#).unwrap().unwrap();
    assert_eq!((ours.text.as_str(), ours.kind.as_deref()), ("select", Some("sql")));
    // The limit counts characters, not bytes.
    let long = of(&format!(r#"{{"text":"{}"}}"#, "é".repeat(700))).unwrap();
    assert_eq!(long.chars().count(), prompts::PROMPT_CHARACTERS);
    for bad in [r#"{"other":1}"#, "[]", "no", r#"{"prompt":5}"#] {
        assert!(prompts::of_line(bad).is_err(), "{bad}");
    }
}
