//! Problems of the planner, and plans for them.
//!
//! Input: two sections, the JSON of a problem and that of a plan.

use crate::{check_error, fixtures, memory, sections};
use remoe_planner::{PlanDraft, Problem, evaluate, preallocate};
use serde_json::Value;
use std::path::Path;

/// Tables over sizes, replicas and experts that a problem within its limits asks for.
const BASE: usize = 64 << 20;
/// `[0,` is a number of eight bytes in a list that doubles, and the text is kept as values first.
const FACTOR: usize = 256;
/// Problems that take longer are for the planner's own tests: layers times experts of the largest.
const CELLS: usize = 4096;

pub fn run(data: &[u8]) {
    let ([problem, plan], _) = sections::split(data);
    let (problem, plan) = (String::from_utf8_lossy(problem), String::from_utf8_lossy(plan));
    memory::within(BASE + FACTOR * data.len(), || plan_for(&problem, &plan));
}

fn plan_for(text: &str, plan: &str) {
    let draft = PlanDraft::from_json(plan).map_err(|error| check_error(&error.to_string())).ok();
    let problem = match Problem::from_json(text) {
        Ok(problem) => problem,
        Err(error) => return check_error(&error.to_string()),
    };
    // Written again, the problem says the same.
    let written = serde_json::to_string(&problem).expect("a problem can be written");
    assert_eq!(Problem::from_json(&written).as_ref(), Ok(&problem));
    let most = problem.layers.iter().map(|layer| layer.experts as usize).max().unwrap_or(0);
    if most * problem.layers.len() > CELLS {
        return;
    }
    match preallocate(&problem) {
        Ok(start) => assert!(start.main_bytes.is_finite() && start.walk.iter().any(|step| step.i == start.i)),
        Err(error) => check_error(&error.to_string()),
    }
    for robust in [false, true] {
        let Some(draft) = &draft else { break };
        match evaluate(&problem, draft, robust) {
            Ok(evaluation) => {
                let figures = [evaluation.ttft_seconds, evaluation.tpot_seconds, evaluation.total_cost];
                assert!(figures.iter().all(|figure| figure.is_finite() && *figure >= 0.0), "{figures:?}");
            }
            Err(error) => check_error(&error.to_string()),
        }
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let folder = fixtures::root().join("tests/fixtures/planning");
    let plans = [
        r#"{"layers":[{"remote":[]},{"remote":[0,1],"memory_bytes":1e9,"replicas":2}]}"#,
        r#"{"main_bytes":4e9,"layers":[{"layer":0,"remote":[3]},{"layer":1,"remote":[0]}]}"#,
        r#"{"plan":{"layers":[]}}"#,
    ];
    let mut seeds = Vec::new();
    for name in ["example", "example2", "example3"] {
        let problem = compact(&folder.join(format!("{name}-problem.json")));
        // The plan that the worked example evaluates stands in its record.
        let record = json(&folder.join(format!("{name}-evaluation.json")));
        seeds.push(sections::join(&[&problem, record["plan"].to_string().as_bytes()]));
        seeds.extend(plans.iter().map(|plan| sections::join(&[&problem, plan.as_bytes()])));
    }
    let long = fixtures::long();
    let wrong = format!(r#"{{"version":1,"device":"{long}","{long}":0}}"#);
    seeds.push(sections::join(&[wrong.as_bytes(), wrong.as_bytes()]));
    seeds
}

/// A JSON file without white space: short inputs are the ones that get far.
fn compact(path: &Path) -> Vec<u8> {
    json(path).to_string().into_bytes()
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fixtures::read(path.to_owned())).expect("a fixture is right")
}
