//! Properties that hold between strategies, whatever the figures are.

use remoe_experiments::{
    ClassPlans, ColdStartStage, CpuScaling, Decisions, ExperimentError, INPUT_TOKENS, Machine, Routing,
    Scenario, Setting, Shape, Strategy, cold_starts, costs, expert_time, paper_pricing, phases, ratios,
};
use remoe_planner::Billing;

const CLOSE: f64 = 1e-9;

fn scenario(shape: Shape, scaling: CpuScaling, routing: Routing, count: usize) -> Scenario {
    let requests = routing.requests(&shape, count, INPUT_TOKENS);
    let setting = Setting::of_the_paper(paper_pricing());
    Scenario::assumed(shape, &Machine::reference(scaling), setting, requests)
}

fn scenarios(routing: Routing, count: usize) -> impl Iterator<Item = Scenario> {
    Shape::published_models().into_iter().flat_map(move |shape| {
        CpuScaling::ALL.map(|scaling| scenario(shape.clone(), scaling, routing, count))
    })
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= CLOSE * a.abs().max(b.abs())
}

#[test]
fn planned_remoe_never_costs_more_than_mix() {
    for skew in [0.0, 0.7, 1.4] {
        for scenario in scenarios(Routing { skew, spread: 1.0, seed: 3 }, 1) {
            let plans = ClassPlans::of(&scenario).unwrap();
            let cost = |strategy| plans.expected(strategy).unwrap().cost;
            let (remoe, mix) = (cost(Strategy::Remoe), cost(Strategy::Mix));
            assert!(remoe <= mix * (1.0 + CLOSE), "{}, skew {skew}: {remoe} above {mix}", scenario.name);
            if let Some(always) = plans.expected(Strategy::RemoeAlways) {
                assert!(always.cost >= remoe * (1.0 - CLOSE), "{}, skew {skew}", scenario.name);
            }
        }
    }
}

#[test]
fn a_request_that_is_as_predicted_costs_what_was_planned() {
    for scenario in scenarios(Routing { spread: 1.0, ..Routing::default() }, 2) {
        let plans = ClassPlans::of(&scenario).unwrap();
        let costs = costs(&scenario, &plans).unwrap();
        assert!(costs.impossible.iter().all(|one| *one == Strategy::RemoeAlways), "{}", scenario.name);
        for one in &costs.strategies {
            let expected = one.expected_cost.or_else(|| Some(plans.expected(Strategy::Remoe)?.cost));
            let expected = expected.unwrap();
            for cost in &one.costs {
                assert!(
                    close(*cost, expected),
                    "{} {}: {cost} and {expected}",
                    scenario.name,
                    one.strategy.name()
                );
            }
        }
    }
}

#[test]
fn the_same_holds_where_functions_are_reserved() {
    let mut scenario = scenario(
        Shape::deepseek_v2_lite(),
        CpuScaling::Narrow,
        Routing { spread: 1.0, ..Routing::default() },
        1,
    );
    scenario.setting.pricing.billing = Billing::Reserved;
    let plans = ClassPlans::of(&scenario).unwrap();
    let outcome = scenario.outcome(plans.always.as_ref().unwrap(), &scenario.requests[0]).unwrap();
    let expected = plans.expected(Strategy::RemoeAlways).unwrap();
    assert!(close(outcome.cost, expected.cost), "{} and {}", outcome.cost, expected.cost);
}

#[test]
fn true_routing_decides_what_a_request_costs() {
    let mut scenario = scenario(Shape::deepseek_v2_lite(), CpuScaling::Narrow, Routing::default(), 2);
    let plans = ClassPlans::of(&scenario).unwrap();
    let outcome = |scenario: &Scenario| {
        scenario.outcome(plans.always.as_ref().unwrap(), &scenario.requests[0]).unwrap()
    };
    let before = outcome(&scenario);
    // Everything now goes to experts that are remote: the first of each layer's remote set.
    let remote: Vec<u32> =
        plans.always.as_ref().unwrap().layers.iter().map(|layer| layer.remote[0]).collect();
    for (row, expert) in scenario.requests[0].decode.iter_mut().zip(remote) {
        row.fill(0.0);
        row[expert as usize] = 1.0;
    }
    let after = outcome(&scenario);
    assert_eq!(before.ttft_seconds, after.ttft_seconds, "the prefill is as it was");
    assert!(after.cost > before.cost && after.tpot_seconds > before.tpot_seconds, "{before:?} {after:?}");
}

#[test]
fn moving_experts_makes_fetch_dearer() {
    for scenario in scenarios(Routing::default(), 1) {
        let plans = ClassPlans::of(&scenario).unwrap();
        let ideal = plans.expected(Strategy::FetchWithoutMoves).unwrap();
        let moving = plans.expected(Strategy::Fetch).unwrap();
        assert!(moving.cost >= ideal.cost && moving.tpot_seconds >= ideal.tpot_seconds, "{}", scenario.name);
        let facts = &scenario.shape.facts;
        let bytes = facts.expert_bytes as f64 * (facts.top_k * facts.moe_layers.len()) as f64;
        assert!(moving.tpot_seconds >= bytes / scenario.host_bytes_per_second * (1.0 - CLOSE));
    }
}

/// Moves that take no time are a bound, not a rival; a plan for each request needs predictions of its own.
#[test]
fn only_what_can_be_had_is_ranked() {
    let mut scenario = scenario(Shape::deepseek_v2_lite(), CpuScaling::Wide, Routing::default(), 2);
    let plans = ClassPlans::of(&scenario).unwrap();
    assert!(!Strategy::OF_THE_PAPER.contains(&Strategy::FetchWithoutMoves));
    let costs_now = costs(&scenario, &plans).unwrap();
    assert!(costs_now.of(Strategy::RemoePerRequest).is_none(), "both requests have the same prediction");
    let (fetch, bound) = (costs_now.of(Strategy::Fetch), costs_now.of(Strategy::FetchWithoutMoves));
    assert!(fetch.unwrap().mean_cost > bound.unwrap().mean_cost);
    scenario.requests[1].predicted = scenario.requests[1].prefill.clone();
    let plans = ClassPlans::of(&scenario).unwrap();
    assert!(costs(&scenario, &plans).unwrap().of(Strategy::RemoePerRequest).is_some());
}

#[test]
fn more_vcpus_never_slow_experts_down() {
    for scenario in scenarios(Routing::default(), 1) {
        let plans = ClassPlans::of(&scenario).unwrap();
        let times = expert_time(&scenario, &plans).unwrap();
        let (few, many) = times.split_at(times.len() / 2);
        assert_eq!(few[0].ratio, 0.0);
        assert_eq!(few[few.len() - 1].ratio, 1.0);
        for (few, many) in few.iter().zip(many) {
            assert_eq!((few.cores, many.cores, few.ratio), (5, 10, many.ratio));
            assert!(many.decode_seconds <= few.decode_seconds * (1.0 + CLOSE), "{few:?} {many:?}");
            assert!(many.prefill_seconds <= few.prefill_seconds * (1.0 + CLOSE), "{few:?} {many:?}");
        }
    }
}

#[test]
fn longer_requests_take_longer_and_cost_more() {
    let scenario = scenario(Shape::gpt2_moe(), CpuScaling::Wide, Routing::default(), 1);
    let plans = ClassPlans::of(&scenario).unwrap();
    let phases = phases(&scenario, &plans).unwrap();
    assert!(phases.is_sorted_by(|a, b| {
        a.tokens < b.tokens && a.prefill_seconds <= b.prefill_seconds && a.decode_seconds < b.decode_seconds
    }));
    let ratios = ratios(&scenario).unwrap();
    for strategy in Strategy::OF_THE_PAPER {
        let costs =
            ratios.iter().map(|ratio| ratio.costs.iter().find(|one| one.strategy == strategy).unwrap().cost);
        assert!(costs.is_sorted_by(|a, b| a < b), "{}", strategy.name());
    }
}

#[test]
fn cold_starts_add_up_and_overlap() {
    let decisions =
        Decisions { predict_seconds: Some(0.03125), preallocate_seconds: 0.0625, solve_seconds: 0.03125 };
    for scenario in scenarios(Routing::default(), 1) {
        let plans = ClassPlans::of(&scenario).unwrap();
        let starts = cold_starts(&scenario, &plans, decisions);
        for start in &starts {
            let ends = start.lanes.iter().flat_map(|lane| &lane.spans).map(|span| span.to);
            assert_eq!(ends.fold(0.0, f64::max), start.ready_seconds);
            for lane in &start.lanes {
                assert!(lane.spans.windows(2).all(|pair| pair[0].to <= pair[1].from), "{lane:?}");
            }
            assert!(start.ready_seconds <= start.ready_one_after_another_seconds * (1.0 + CLOSE));
        }
        let of = |strategy| starts.iter().find(|start| start.strategy == strategy);
        let (mix, gpu) = (of(Strategy::Mix).unwrap(), of(Strategy::Gpu).unwrap());
        assert!(mix.ready_seconds < gpu.ready_seconds, "less goes to the GPU");
        let Some(always) = of(Strategy::RemoeAlways) else { continue };
        assert!(always.ready_seconds < mix.ready_seconds, "{}: remote functions load beside", scenario.name);
        let main = always.lanes.iter().find(|lane| lane.who == "main").unwrap();
        assert_eq!(main.spans[0].from, decisions.preallocate_seconds, "it does not wait for the plan");
        let remote = always.lanes.iter().find(|lane| lane.who == "slowest remote").unwrap();
        assert_eq!(remote.spans[0].from, 0.125, "it waits for the plan");
        let order = [ColdStartStage::Container, ColdStartStage::Load];
        assert_eq!(remote.spans.iter().map(|span| span.part).collect::<Vec<_>>(), order);
    }
}

#[test]
fn requests_of_another_form_are_refused() {
    let mut scenario = scenario(Shape::gpt2_moe(), CpuScaling::Wide, Routing::default(), 2);
    scenario.requests[1].decode[3].pop();
    let error = ClassPlans::of(&scenario).unwrap_err();
    assert!(
        matches!(&error, ExperimentError::Shares { request: 1, expected, .. } if expected == "12 x 8"),
        "{error}"
    );
    scenario.requests.clear();
    assert!(matches!(ClassPlans::of(&scenario), Err(ExperimentError::NoRequests { .. })));
}

#[test]
fn every_request_of_a_class_pays_for_the_same_memory() {
    let mut scenario = scenario(Shape::gpt2_moe(), CpuScaling::Wide, Routing::default(), 2);
    scenario.requests[0].input_tokens = 20.0;
    scenario.requests[1].input_tokens = 900.0;
    let plans = ClassPlans::of(&scenario).unwrap();
    let plan = plans.always.as_ref().unwrap();
    let mut local = plan.clone();
    // Nothing remote: the whole cost is one rate, of memory, times seconds.
    for layer in &mut local.layers {
        *layer = remoe_planner::LayerPlan::default();
    }
    let rate = |index: usize| {
        let outcome = scenario.outcome(&local, &scenario.requests[index]).unwrap();
        outcome.cost / (outcome.ttft_seconds + scenario.setting.decode_steps * outcome.tpot_seconds)
    };
    assert!(close(rate(0), rate(1)), "{} and {}", rate(0), rate(1));
}
