//! Factors from what answers say, and what plans expect with them.

use crate::common;

use common::{measured, model, wishes};
use remoe_hardware::{Profile, TimeFactors, TimeRatio, TimeRatios, problem};
use remoe_planner::{CpuProfile, Options, PlanDraft, solve};
use serde_json::json;

/// Lines of answers that expected the first time and took the second one, of prefills and decode steps.
fn answers(times: impl Iterator<Item = [(f64, f64); 2]>) -> String {
    let line = |[prefill, decode]: [(f64, f64); 2]| {
        let plan = json!({
            "expected": {"ttft_s": prefill.0, "tpot_s": decode.0, "cost": 1e-6},
            "measured": {"ttft_s": prefill.1, "tpot_s": decode.1, "cost": 1e-6},
        });
        format!("{}\n", json!({"usage": {"remoe": {"plan": plan, "queued_s": 0.0}}}))
    };
    times.map(line).collect()
}

/// Everything but experts is a step of so many requests up to 8 tokens, a prompt beyond; experts get from one to the other.
#[test]
fn steps_of_several_requests_go_by_the_factor_of_decode_steps() {
    let factors =
        TimeFactors::of(&TimeRatios::read(&answers((0..10).map(|_| [(1.0, 2.0), (1.0, 0.5)]))).unwrap());
    let table =
        CpuProfile { vcpus: vec![1.0], tokens: vec![1.0, 4.0, 8.0, 16.0], seconds: vec![vec![1.0]; 4] };
    let profile = Profile { expert_seconds: table.clone(), nonexpert_seconds: table, ..measured() };
    let applied = factors.applied(&profile);
    let rest: Vec<f64> = applied.nonexpert_seconds.seconds.concat();
    assert_eq!(rest, [0.5, 0.5, 0.5, 2.0]);
    let experts: Vec<f64> = applied.expert_seconds.seconds.concat();
    assert!(
        experts[0] == 0.5 && experts[1] > 0.5 && experts[1] < 2.0 && experts[2..] == [2.0, 2.0],
        "{experts:?}"
    );
}

#[test]
fn factors_are_bounded_medians_of_enough_answers() {
    let factors = |text: &str| TimeFactors::of(&TimeRatios::read(text).unwrap());
    let alike = |count: usize| answers((0..count).map(|_| [(0.1, 0.13), (0.01, 0.05)]));
    let few = factors(&alike(9));
    assert_eq!((few.prefill.factor, few.prefill.median, few.prefill.pairs), (1.0, None, 9));
    let enough = factors(&alike(10));
    assert!((enough.prefill.factor - 1.3).abs() < 1e-12);
    // No factor is beyond 2, and what it would be is shown.
    assert!(enough.decode.factor == 2.0 && (enough.decode.median.unwrap() - 5.0).abs() < 1e-12);
    let quick = factors(&answers((0..10).map(|_| [(0.1, 0.01), (0.0, 0.0)])));
    assert_eq!((quick.prefill.factor, quick.decode.pairs), (0.5, 0));
    // Nearly half of the answers may be wild.
    let wild = |index: usize| if index % 9 < 4 { 40.0 } else { 0.12 };
    let robust = factors(&answers((0..45).map(|index| [(0.1, wild(index)), (0.01, 0.01)])));
    assert!((robust.prefill.factor - 1.2).abs() < 1e-12 && robust.decode.factor == 1.0);
}

#[test]
fn answers_are_read_as_they_come() {
    let plan = r#"{"expected":{"ttft_s":0.1,"tpot_s":0.01,"cost":1},"measured":{"ttft_s":0.9,"tpot_s":0.02,"cost":1}}"#;
    let text = format!(
        "{plan}\n\n{{\"plan\":{plan},\"prefill_s\":0.2}}\ndata: {{\"choices\":[]}}\n\
         data: {{\"usage\":{{\"remoe\":{{\"plan\":{plan},\"prefill_s\":0.3}}}}}}\ndata: [DONE]\n\
         {{\"usage\":{{\"prompt_tokens_details\":{{\"cached_tokens\":7}},\"remoe\":{{\"plan\":{plan}}}}}}}\n"
    );
    let pairs = TimeRatios::read(&text).unwrap();
    // Waiting for a turn is no computing, and a cached prompt is none that was planned.
    let prefills: Vec<_> = pairs.iter().map(|pair| pair.prefill).collect();
    assert_eq!(
        prefills,
        [TimeRatio::new(0.1, 0.9), TimeRatio::new(0.1, 0.2), TimeRatio::new(0.1, 0.3), None]
    );
    assert!(pairs.iter().all(|pair| pair.decode == TimeRatio::new(0.01, 0.02)));
    for (text, line) in [("{}\nnothing", "line 2"), (r#"{"plan":{"expected":{}}}"#, "line 1")] {
        let error = TimeRatios::read(text).unwrap_err();
        assert!(error.contains(line), "{error}");
    }
}

/// Plans with factors expect times nearer to the measured ones, whatever error the profile has.
#[test]
fn plans_with_factors_expect_what_requests_take() {
    let profile = measured();
    let on = |profile: &Profile| problem(&model(), profile, &wishes()).unwrap();
    let always = Options { remote: remoe_planner::Remote::Always, ..Options::default() };
    let plan = PlanDraft::from(&solve(&on(&profile), None, &always).unwrap().plan);
    let expect = |profile: &Profile, input: usize, steps: usize| {
        remoe_planner::PlanAccount::new(on(profile), &plan).unwrap().expect(input, steps)
    };
    let slower = |experts: f64, rest: f64, calls: f64| {
        let times = |table: &mut CpuProfile, by: f64| {
            table.seconds.iter_mut().flatten().for_each(|seconds| *seconds *= by);
        };
        let mut truth = profile.clone();
        times(&mut truth.expert_seconds, experts);
        truth.remote_expert_seconds.iter_mut().for_each(|table| times(table, experts));
        times(&mut truth.nonexpert_seconds, rest);
        truth.transport.invoke_seconds *= calls;
        truth.transport.send_seconds *= calls;
        truth
    };
    for (truth, within) in [
        (slower(1.3, 1.3, 1.3), 0.02),
        (slower(0.7, 0.7, 0.7), 0.02),
        (slower(1.5, 1.0, 1.0), 0.15),
        (slower(1.0, 1.6, 1.0), 0.15),
    ] {
        let lengths: Vec<(usize, usize)> = (1..=12).map(|index| (16 * index, 10 + index)).collect();
        let both = |profile: &Profile| {
            lengths.iter().map(|(input, steps)| expect(profile, *input, *steps)).collect::<Vec<_>>()
        };
        let (expected, took) = (both(&profile), both(&truth));
        let text = answers(expected.iter().zip(&took).map(|(expected, took)| {
            [(expected.ttft_seconds, took.ttft_seconds), (expected.tpot_seconds, took.tpot_seconds)]
        }));
        let factors = TimeFactors::of(&TimeRatios::read(&text).unwrap());
        let better = both(&factors.applied(&profile));
        for ((before, after), took) in expected.iter().zip(&better).zip(&took) {
            for (before, after, took) in [
                (before.ttft_seconds, after.ttft_seconds, took.ttft_seconds),
                (before.tpot_seconds, after.tpot_seconds, took.tpot_seconds),
            ] {
                let (was, is) = ((before / took - 1.0).abs(), (after / took - 1.0).abs());
                assert!(is <= within && is <= was + 0.02, "{was} {is} {factors:?}");
            }
        }
    }
}
