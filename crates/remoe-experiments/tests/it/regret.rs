//! Regret against what the planner answers.

use remoe_experiments::{Regret, RegretCase, RegretSubject};
use remoe_planner::{
    Arrivals, ErrorDirection, MisestimatedInput, Options, PlanDraft, Problem, evaluate, solve,
};
use std::path::PathBuf;

fn worked(name: &str) -> RegretSubject {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let path = path.join("../../tests/fixtures/planning").join(format!("{name}-problem.json"));
    let problem = Problem::from_json(&std::fs::read_to_string(path).unwrap()).unwrap();
    RegretSubject { name: name.to_owned(), problem }
}

/// The worked problem with groups and requests that come.
fn with_groups(name: &str) -> RegretSubject {
    let RegretSubject { mut problem, name } = worked(name);
    problem.pricing.billing = remoe_planner::Billing::Reserved;
    problem.limits.max_groups = Some(2);
    problem.arrivals = Some(Arrivals {
        per_second: 1e-3,
        burst: 1.0,
        recorded_seconds: None,
        idle_seconds: None,
        input_variation: 0.0,
        output_variation: 0.0,
    });
    RegretSubject { name: format!("{name}, groups"), problem }
}

#[test]
fn every_case_is_what_the_planner_says_of_the_true_figures() {
    let subjects = [worked("example"), worked("example2"), with_groups("example"), with_groups("example2")];
    let mut done = Vec::new();
    let regret = Regret::of(&subjects, |name| done.push(name.to_owned())).unwrap();
    assert_eq!(done, subjects.iter().map(|subject| subject.name.clone()).collect::<Vec<_>>());
    // Six figures without starts, five without arrivals, in both directions.
    let of = |name: &str| regret.cases.iter().filter(|case| case.subject == name).count();
    for plan in &regret.plans {
        assert_eq!(of(&plan.subject), if plan.subject.contains("groups") { 12 } else { 10 });
        assert!((-1e-9..=0.02 + 1e-9).contains(&plan.above_exact), "{plan:?}");
    }
    assert!(regret.plans.len() >= 3, "{:?}", regret.plans);
    for case in &regret.cases {
        let subject = subjects.iter().find(|subject| subject.name == case.subject).unwrap();
        let is = case.figure.apply(&subject.problem, case.truth).unwrap();
        // The plan of the wrong figures, met by the true ones.
        let exact = solve(&subject.problem, None, &Options::default()).unwrap();
        let met = evaluate(&is, &PlanDraft::from(&exact.plan), false).unwrap();
        assert_eq!(met.total_cost, case.exact.cost);
        assert_eq!(met.violations.len(), case.exact.broken.len());
        // The clairvoyant pays least.
        let clairvoyant = solve(&is, None, &Options::default()).ok();
        if let Some(answer) = &clairvoyant {
            assert!(case.clairvoyant.unwrap() <= answer.evaluation.total_cost);
        }
        for met in [&case.sturdy, &case.exact] {
            assert_eq!(met.regret.is_some(), met.broken.is_empty() && case.clairvoyant.is_some());
            assert!(met.regret.is_none_or(|regret| regret >= -1e-9), "{case:?}");
        }
    }
    // Summaries count what is there.
    let exact: fn(&RegretCase) -> &remoe_experiments::PlanOutcome = |case| &case.exact;
    let all = regret.summary(None, exact);
    let parts = ErrorDirection::ALL
        .into_iter()
        .flat_map(|truth| MisestimatedInput::ALL.map(|figure| (figure, truth)));
    let parts: Vec<_> = parts.map(|which| regret.summary(Some(which), exact)).collect();
    assert_eq!(all.cases, parts.iter().map(|part| part.cases).sum::<usize>());
    assert_eq!(all.broken, parts.iter().map(|part| part.broken).sum::<usize>());
    assert_eq!(all.cases, regret.cases.iter().filter(|case| case.clairvoyant.is_some()).count());
}
