//! Target: planning problems, and plans for them.
//!
//! Input: the JSON of a problem and the JSON of a plan, separated by a zero byte.

use crate::{check_error, fixtures, memory, sections};
use remoe_planner::{PlanDraft, Problem, evaluate, preallocate};
use serde_json::Value;
use std::path::Path;

/// Fixed part of the memory limit: tables over sizes, replicas and experts of the largest valid problem.
const BASE_BYTES: usize = 64 << 20;
/// Memory limit per byte: `[0,` becomes a number of eight bytes in a list that doubles, and the JSON values are kept.
const BYTES_PER_INPUT_BYTE: usize = 256;
/// Limit of layers times experts per layer of the problems that are planned. Larger ones take too long here.
const CELL_LIMIT: usize = 4096;

pub fn run(data: &[u8]) {
    let ([problem, plan], _) = sections::split(data);
    let (problem, plan) = (String::from_utf8_lossy(problem), String::from_utf8_lossy(plan));
    memory::with_limit(BASE_BYTES + BYTES_PER_INPUT_BYTE * data.len(), || {
        check_problem_and_plan(&problem, &plan)
    });
}

fn check_problem_and_plan(text: &str, plan: &str) {
    let draft = PlanDraft::from_json(plan).map_err(|error| check_error(&error.to_string())).ok();
    let problem = match Problem::from_json(text) {
        Ok(problem) => problem,
        Err(error) => return check_error(&error.to_string()),
    };
    // Writing and reading the problem again gives an equal problem.
    let written = serde_json::to_string(&problem).expect("a problem can be written");
    assert_eq!(Problem::from_json(&written).as_ref(), Ok(&problem));
    let most_experts = problem.layers.iter().map(|layer| layer.experts as usize).max().unwrap_or(0);
    if most_experts * problem.layers.len() > CELL_LIMIT {
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
        // The recorded evaluation of the example contains its plan.
        let record = read_json(&folder.join(format!("{name}-evaluation.json")));
        seeds.push(sections::join(&[&problem, record["plan"].to_string().as_bytes()]));
        seeds.extend(plans.iter().map(|plan| sections::join(&[&problem, plan.as_bytes()])));
    }
    let long_text = fixtures::long_text();
    let wrong = format!(r#"{{"version":1,"device":"{long_text}","{long_text}":0}}"#);
    seeds.push(sections::join(&[wrong.as_bytes(), wrong.as_bytes()]));
    seeds
}

/// Reads a JSON file without white space, because short inputs are fuzzed more deeply.
fn compact(path: &Path) -> Vec<u8> {
    read_json(path).to_string().into_bytes()
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fixtures::read(path.to_owned())).expect("a fixture is right")
}
