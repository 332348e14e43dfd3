//! Dollars of 1,000 requests that find no function, at 27 x 64 experts, by what their plan knows:
//!
//! `cargo run --release -p remoe-experiments --example wake_costs [WAKES [TTFT [TPOT]]]`
//!
//! One row for each load and billing basis. Requests come in bursts of four, 12 times an hour, and functions end after
//! a minute without any.

#![allow(clippy::unwrap_used)]

use remoe_experiments::{
    CpuScaling, INPUT_TOKENS, Machine, Routing, Scenario, Setting, Shape, paper_pricing,
};
use remoe_planner::{Arrivals, Billing, Limits, Pricing, Slo};

fn main() {
    let argument = |position: usize| std::env::args().nth(position).and_then(|text| text.parse::<f64>().ok());
    let wakes = argument(1).unwrap_or(24.0) as usize;
    let (ttft, tpot) = (argument(2).unwrap_or(60.0), argument(3).unwrap_or(0.5));
    let arrivals = Arrivals {
        per_second: 48.0 / 3600.0,
        burst: 4.0,
        recorded_seconds: None,
        idle_seconds: Some(60.0),
        input_variation: 0.0,
        output_variation: 0.0,
    };
    println!(
        "{:<11} {:<10} {:>8} {:>8} {:>8} {:>8} {:>10}  missed limits",
        "billing", "load", "oracle", "chain", "last", "uniform", "same main"
    );
    for (billing, groups) in [(Billing::Reserved, Some(16)), (Billing::Invocation, None)] {
        let paper = Setting::of_the_paper(Pricing { billing, ..paper_pricing() });
        let setting = Setting {
            limits: Limits { max_groups: groups, ..paper.limits },
            slo: Slo::new(ttft, tpot),
            ..paper
        };
        let shape = Shape::deepseek_v2_lite();
        let requests = Routing::default().requests(&shape, 1, INPUT_TOKENS);
        let scenario = Scenario::assumed(shape, &Machine::reference(CpuScaling::Wide), setting, requests);
        for row in scenario.wakes(&arrivals, wakes, 7).unwrap() {
            println!(
                "{:<11} {:<10} {:>8.4} {:>8.4} {:>8.4} {:>8.4} {:>9.0} %  {:?}",
                format!("{billing:?}"),
                format!("{:?}", row.load),
                row.oracle,
                row.chain,
                row.last,
                row.uniform,
                row.same_main * 100.0,
                row.missed
            );
        }
    }
}
