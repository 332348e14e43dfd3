//! Cache of the planner's plans, solved once for all tests of a run.

use crate::digest::digest;
use crate::planning::{Planning, PlanningError};
use remoe_api::MoEPlanSpec;
use remoe_planner::Budget;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Maximum solutions in memory, for tests that request a different one every time.
const MAX_SOLUTIONS: usize = 256;

/// Returns [`Planning::solve`]'s solution, from memory or from another process of this run if known.
pub(crate) fn solve(
    planning: &Planning,
    previous: Option<&MoEPlanSpec>,
) -> Result<MoEPlanSpec, PlanningError> {
    type Solutions = BTreeMap<(String, String), Result<MoEPlanSpec, PlanningError>>;
    static SOLUTIONS: Mutex<Solutions> = Mutex::new(BTreeMap::new());
    let asked = (planning.inputs.clone(), digest(&previous).unwrap());
    let known = SOLUTIONS.lock().unwrap().get(&asked).cloned();
    known.unwrap_or_else(|| {
        let solution = match shared(&asked) {
            Some(path) => read_or_solve(&path, || planning.solve(previous, Budget::UNLIMITED)),
            None => planning.solve(previous, Budget::UNLIMITED),
        };
        let mut solutions = SOLUTIONS.lock().unwrap();
        if solutions.len() >= MAX_SOLUTIONS {
            solutions.clear();
        }
        solutions.insert(asked, solution.clone());
        solution
    })
}

/// Returns the file for this solution in a run of cargo-nextest, where each test is a process.
fn shared((inputs, previous): &(String, String)) -> Option<PathBuf> {
    let run = std::env::var("NEXTEST_RUN_ID").ok()?;
    let folder = std::env::temp_dir().join(format!("remoe-tests-{run}/solutions"));
    fs::create_dir_all(&folder).ok()?;
    Some(folder.join(format!("{inputs}-{previous}.json")))
}

fn read_or_solve(
    path: &Path,
    solve: impl FnOnce() -> Result<MoEPlanSpec, PlanningError>,
) -> Result<MoEPlanSpec, PlanningError> {
    if let Ok(json) = fs::read(path) {
        return Ok(serde_json::from_slice(&json).unwrap());
    }
    let solution = solve()?;
    let json = serde_json::to_vec(&solution).unwrap();
    // Only solutions that survive a round trip are shared.
    if serde_json::from_slice::<MoEPlanSpec>(&json).is_ok_and(|read| read == solution) {
        // The rename is atomic, so no process sees half a file.
        let unfinished = path.with_extension(std::process::id().to_string());
        if fs::write(&unfinished, json).is_ok() {
            let _another_may_have_been_first = fs::rename(&unfinished, path);
        }
    }
    Ok(solution)
}
