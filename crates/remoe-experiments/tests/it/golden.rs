//! One small run to the last digit that matters, and one strategy computed by hand.

use remoe_experiments::{
    ClassPlans, CpuScaling, INPUT_TOKENS, Machine, Routing, Scenario, Setting, Shape, Strategy, costs,
    paper_pricing,
};
use std::collections::BTreeMap;

fn scenario(scaling: CpuScaling) -> Scenario {
    let shape = Shape::gpt2_moe();
    let requests = Routing::default().requests(&shape, 3, INPUT_TOKENS);
    let setting = Setting::of_the_paper(paper_pricing());
    Scenario::assumed(shape, &Machine::reference(scaling), setting, requests)
}

/// When the planner or an assumption changes on purpose, the new file is what the failure prints.
#[test]
fn three_requests_of_gpt2_moe() {
    let golden: BTreeMap<String, Vec<f64>> = serde_json::from_str(include_str!("golden.json")).unwrap();
    let mut found = BTreeMap::new();
    for scaling in CpuScaling::ALL {
        let scenario = scenario(scaling);
        let costs = costs(&scenario, &ClassPlans::of(&scenario).unwrap()).unwrap();
        for one in costs.strategies {
            found.insert(format!("{}, {}", scenario.name, one.strategy.name()), one.costs);
        }
    }
    let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-9 * a.abs();
    let same = golden.keys().eq(found.keys())
        && golden.iter().all(|(name, costs)| costs.len() == 3 && costs.iter().zip(&found[name]).all(close));
    assert!(same, "{}", serde_json::to_string_pretty(&found).unwrap());
}

/// GPU: one rate for all seconds, both from the data sheet and the sizes alone.
#[test]
fn the_gpu_costs_what_its_data_sheet_says() {
    let plans = ClassPlans::of(&scenario(CpuScaling::Wide)).unwrap();
    let (layers, experts, read) = (12.0, 8.0, 0.7 * 1935e9);
    let expert_bytes = f64::from(4 * (2 * 768 * 3072 + 3072 + 768));
    let layer_bytes = f64::from(4 * (4 * 768 + 768 * 2304 + 2304 + 768 * 768 + 768 + 768 * 8));
    let head_bytes = f64::from(4 * 768 * 50_257);
    let outside = f64::from(4 * 768 * (50_257 + 1024 + 2));
    let fixed = layers * 250e-6 + (layers * layer_bytes + head_bytes) / read;
    let expert = 50e-6 + expert_bytes / read;
    let step = fixed + layers * 2.0 * expert;
    // 125 tokens cost the GPU less to compute than the weights to read, for experts; not for the rest.
    let computing = 2.0 * (layers * layer_bytes + head_bytes) / 4.0 * 125.0 / (0.4 * 312e12);
    let prefill = fixed + computing + layers * experts * expert;
    let tokens = 125.0 + 199.0;
    let token_bytes = 4.0 * 768.0;
    let resident = tokens * token_bytes * (1.0 + 2.0 * layers) + layers * layer_bytes + outside;
    let gigabytes = (resident + layers * experts * expert_bytes) / 1e9;
    // 300 MB and the tokens' hidden states are rounded up to the next size.
    let rate = 0.000_016_666_7 * (3.0 * gigabytes + 0.4);
    let cost = rate * (prefill + 199.0 * step);
    let planned = plans.expected(Strategy::Gpu).unwrap();
    assert!((planned.tpot_seconds - step).abs() < 1e-9 * step, "{} and {step}", planned.tpot_seconds);
    assert!(
        (planned.ttft_seconds - prefill).abs() < 1e-9 * prefill,
        "{} and {prefill}",
        planned.ttft_seconds
    );
    assert!((planned.cost - cost).abs() < 1e-9 * cost, "{} and {cost}", planned.cost);
}
