//! The map of regimes against the planner's own answers.

use remoe_experiments::map::{Cell, ListRegime, STRATEGIES, Subject, UnitRegime, rental};
use remoe_hardware::{NodeList, Prices};
use remoe_model::{Folder, Outline};
use remoe_planner::{Arrivals, Device, Options, ServingStrategy, compare, rent, solve};
use std::path::PathBuf;

fn workspace(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(workspace(path)).unwrap()
}

fn subject(name: &str) -> Subject {
    Subject::all().into_iter().find(|subject| subject.name == name).unwrap()
}

fn unit(name: &str) -> UnitRegime {
    let prices = Prices::from_yaml(&read("examples/pricing/gke-autopilot.yaml")).unwrap();
    let regimes = UnitRegime::all(prices.separate_pricing().unwrap());
    regimes.into_iter().find(|regime| regime.name == name).unwrap()
}

fn listed(name: &str) -> ListRegime {
    let list = NodeList::from_yaml(&read("examples/nodes/gcp-us-central1.yaml")).unwrap();
    ListRegime::all(&list).into_iter().find(|regime| regime.name == name).unwrap()
}

/// The winner is the cheapest of all that keep the limits, and savings are those of the offers.
fn check(cell: &Cell) {
    assert_eq!(cell.offers.iter().map(|offer| offer.way).collect::<Vec<_>>(), STRATEGIES);
    let dollars = |way: ServingStrategy| cell.offer(way).unwrap().dollars_per_hour;
    let best = cell.best.and_then(dollars);
    for offer in &cell.offers {
        assert_eq!(offer.dollars_per_hour.is_none(), !offer.why.is_empty(), "{offer:?}");
        let Some(other) = offer.dollars_per_hour else { continue };
        assert!(best.unwrap() <= other, "{cell:?}");
    }
    let least = |remote: bool| {
        let ways = STRATEGIES.into_iter().filter(|way| way.has_remote_experts() == remote);
        ways.filter_map(dollars).reduce(f64::min)
    };
    match (least(true), least(false)) {
        (Some(with), Some(without)) => {
            assert!((cell.saving.unwrap() - (1.0 - with / without)).abs() < 1e-12, "{cell:?}");
            assert_eq!(cell.pays(), with < without, "{cell:?}");
        }
        (with, _) => assert_eq!((cell.saving, cell.pays()), (None, with.is_some()), "{cell:?}"),
    }
}

#[test]
fn models_are_those_of_their_configurations() {
    for (name, folder) in [
        ("Mixtral-8x22B", "mixtral-8x22b"),
        ("Qwen3-235B-A22B", "qwen3-235b-a22b"),
        ("DeepSeek-V3", "deepseek-v3"),
    ] {
        let folder = workspace("tests/fixtures/published").join(folder);
        let outline = Outline::open_in(&Folder::new(folder), None).unwrap();
        assert_eq!(subject(name), Subject::new(name, &outline));
    }
    // 6.92 billion parameters (OLMoE paper, arXiv 2409.02060, table 1: 6.9B), in two bytes each.
    assert_eq!(subject("OLMoE-1B-7B").total_bytes, 2 * 6_919_161_856);
    let sizes: Vec<u64> = Subject::all().iter().map(|subject| subject.total_bytes).collect();
    assert!(sizes.is_sorted(), "{sizes:?}");
}

#[test]
fn cells_at_unit_prices_are_what_the_planner_answers() {
    for (regime, model, per_day) in [
        ("unit-large", "Mixtral-8x7B", 1000.0),
        ("unit-rare", "Mixtral-8x7B", 10.0),
        ("unit-modest", "Mixtral-8x7B", 100.0),
    ] {
        let (regime, subject) = (unit(regime), subject(model));
        let cell = regime.cell(&subject, per_day).unwrap();
        check(&cell);
        // Each way at its cheapest over places and windows, by the planner's full answer.
        let mut least = STRATEGIES.map(|way| (way, f64::INFINITY));
        for gpus in regime.gpus() {
            for window in regime.windows {
                let problem = regime.problem(&subject, per_day, gpus, *window).unwrap();
                let Ok(answer) = solve(&problem, None, &Options::default()) else { continue };
                for rival in answer.verdict.rivals.iter().filter(|rival| rival.feasible) {
                    let on_cpus = rival.name == ServingStrategy::Mix && problem.device == Device::Cpu;
                    let way = if on_cpus { ServingStrategy::Cpu } else { rival.name };
                    let known = &mut least.iter_mut().find(|(name, _)| *name == way).unwrap().1;
                    *known = known.min(rival.dollars_per_hour.unwrap());
                }
            }
        }
        for (way, dollars) in least.into_iter().filter(|(_, dollars)| dollars.is_finite()) {
            let shown = cell.offer(way).unwrap().dollars_per_hour.unwrap();
            assert!((shown / dollars - 1.0).abs() < 1e-9, "{} {way:?}: {shown} {dollars}", regime.name);
        }
    }
}

#[test]
fn cells_on_nodes_are_what_the_planner_answers() {
    let regime = listed("nodes-all");
    for subject in Subject::all() {
        let cell = regime.cell(&subject, 10.0).unwrap();
        check(&cell);
        let arrivals = Arrivals {
            per_second: 10.0 / 86_400.0,
            burst: 1.0,
            recorded_seconds: None,
            idle_seconds: None,
            input_variation: 0.0,
            output_variation: 0.0,
        };
        let answer = rent(&rental(&subject, &regime.list, regime.slo, Some(arrivals))).unwrap();
        let best = cell.best.and_then(|best| cell.offer(best)?.dollars_per_hour);
        assert_eq!(best, answer.dollars_per_hour, "{}", subject.name);
        for offer in &cell.offers {
            let rivals = answer.verdict.rivals.iter().filter(|rival| rival.name.strategy() == offer.way);
            let least = rivals.filter_map(|rival| rival.dollars_per_hour).reduce(f64::min);
            assert_eq!(offer.dollars_per_hour, least, "{} {:?}", subject.name, offer.way);
        }
    }
}

#[test]
fn more_requests_than_a_way_serves_keep_it_out() {
    let regime = listed("nodes-all");
    let subject = subject("OLMoE-1B-7B");
    let mut feasible = usize::MAX;
    for per_day in [1.0, 5_000.0, 1e12] {
        let cell = regime.cell(&subject, per_day).unwrap();
        check(&cell);
        let count = cell.offers.iter().filter(|offer| offer.dollars_per_hour.is_some()).count();
        assert!(count <= feasible, "{cell:?}");
        feasible = count;
    }
    assert_eq!(feasible, 0);
}

/// Where the planner searches coarsely, ways without remote experts are what they are, and others no cheaper.
#[test]
fn coarse_answers_do_not_flatter_remote_experts() {
    let regime = unit("unit-modest");
    let problem = regime.problem(&subject("OLMoE-1B-7B"), 100.0, 0, None).unwrap();
    let coarse = compare(&problem).unwrap();
    let full = solve(&problem, None, &Options::default()).unwrap().verdict;
    for (coarse, full) in coarse.rivals.iter().zip(&full.rivals) {
        if full.name.has_remote_experts() {
            let least = full.dollars_per_hour.unwrap() * (1.0 - 1e-9);
            assert!(coarse.dollars_per_hour.is_none_or(|dollars| dollars >= least), "{coarse:?} {full:?}");
        } else {
            assert_eq!(coarse, full);
        }
    }
}

/// When the planner, a price list or an assumption changes on purpose, the failure prints the new figures.
#[test]
fn one_cell_to_the_last_digit_that_matters() {
    let cell = listed("nodes-patient").cell(&subject("Mixtral-8x7B"), 100.0).unwrap();
    let shown: Vec<String> = cell
        .offers
        .iter()
        .map(|offer| format!("{:?} {:.4} {}", offer.way, offer.dollars_per_hour.unwrap_or(0.0), offer.on))
        .collect();
    assert_eq!(
        shown,
        [
            "Sliced 1.8140 1 x n4-standard-32 with 1 x n4-standard-8",
            "Layers 9.4328 1 x n4-standard-32 with 1 x n4-standard-16 and 5 x n4-standard-32",
            "Mix 2.9200 1 x n1-standard-32-4x-t4",
            "Cpu 1.4512 1 x n4-standard-32",
            "Gpu 5.8400 2 x n1-standard-32-4x-t4",
            "Fetch 2.9200 1 x n1-standard-32-4x-t4",
        ],
        "{shown:#?}"
    );
}

/// Limits that only functions that end would break, a first token after a start or memory that loads in time, do not
/// count against a way that may always be there.
#[test]
fn no_way_is_kept_out_by_its_sleep() {
    let rare = unit("unit-rare");
    let awake = UnitRegime { windows: &[None], ..rare.clone() };
    let mut compared = 0;
    for name in ["Mixtral-8x22B", "DeepSeek-V3"] {
        let subject = subject(name);
        let (cell, always) = (rare.cell(&subject, 1000.0).unwrap(), awake.cell(&subject, 1000.0).unwrap());
        for offer in cell.offers.iter().filter(|offer| offer.dollars_per_hour.is_none()) {
            assert_eq!(offer.why, always.offer(offer.way).unwrap().why, "{name} {:?}", offer.way);
            compared += 1;
        }
    }
    assert!(compared > 0);
}
