//! Scenarios of a rollout, common to processes (`remoe up`) and pods (the operator). Both must decide the same, or as
//! the scenario states with the reason.
//!
//! A function is named by its place: `main`, or the number of a remote group and of the replica in it. An apostrophe
//! stands for each earlier function in the same place: `0.1'` is the second one in place `0.1`. `x` belongs to an
//! earlier placement.

/// Observed state and the required decisions.
pub struct RolloutScenario {
    /// Name of the scenario.
    pub name: &'static str,
    /// Number of replicas of each remote group. Each group hosts other experts.
    pub groups: &'static [usize],
    /// Groups that are scaled to zero.
    pub resting: &'static [usize],
    /// Existing functions with their conditions.
    pub there: &'static [(&'static str, FunctionCondition)],
    /// Routing generation in force at `main`.
    pub in_force: InForce,
    /// Places whose last two functions failed, with the seconds since the second failure.
    pub failed: &'static [(&'static str, u32)],
    /// Decisions: functions to `start` and to `stop`, and `tell` with the functions of a routing generation to send.
    pub decided: Decided,
}

/// Condition of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FunctionCondition {
    /// Not ready since its start.
    Starting,
    /// Ready.
    Ready,
    /// No longer ready, but not yet given up.
    Faltering,
    /// Given up: it hangs.
    Lost,
    /// Told to terminate.
    Leaving,
}

/// Routing generation that main functions follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InForce {
    /// No generation.
    Nothing,
    /// A generation of the desired placement, with its functions.
    This(&'static [&'static str]),
    /// A generation of another placement, with its functions.
    Another(&'static [&'static str]),
}

/// Required decisions, in any order.
#[derive(Debug, Clone, Copy)]
pub enum Decided {
    /// Processes and pods decide the same.
    Same(&'static [&'static str]),
    /// Processes and pods decide differently.
    Different {
        /// Decisions for processes.
        processes: &'static [&'static str],
        /// Decisions for pods.
        pods: &'static [&'static str],
        /// Reason for the difference.
        because: &'static str,
    },
}

use Decided::{Different, Same};
use FunctionCondition::{Faltering, Leaving, Lost, Ready, Starting};
use InForce::{Another, Nothing, This};

const SAME_PLACE: &str =
    "two functions of one place may not fit into one machine; on a cluster the next one starts beside it";
const HEALTH_LAG: &str = "the launcher asks functions itself, the operator is told of health late";
const SHARED_GENERATION: &str =
    "a process follows a generation of its own; pods of one shape share one, which is there before they are";

/// Base scenario: two groups with one replica each.
const BASE: RolloutScenario = RolloutScenario {
    name: "",
    groups: &[1, 1],
    resting: &[],
    there: &[],
    in_force: Nothing,
    failed: &[],
    decided: Same(&[]),
};

/// All scenarios.
pub const SCENES: &[RolloutScenario] = &[
    RolloutScenario {
        name: "everything is started at once",
        groups: &[2, 1],
        decided: Same(&["start main", "start 0.0", "start 0.1", "start 1.0"]),
        ..BASE
    },
    RolloutScenario {
        name: "the first generation waits for every remote function",
        there: &[("main", Ready), ("0.0", Ready), ("1.0", Starting)],
        ..BASE
    },
    RolloutScenario {
        name: "then it is told",
        there: &[("main", Ready), ("0.0", Ready), ("1.0", Ready)],
        decided: Same(&["tell 0.0 1.0"]),
        ..BASE
    },
    RolloutScenario {
        name: "and stays",
        there: &[("main", Ready), ("0.0", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        ..BASE
    },
    RolloutScenario {
        name: "a replica that is gone is routed around and started again",
        groups: &[2, 1],
        there: &[("main", Ready), ("0.1", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "0.1", "1.0"]),
        decided: Same(&["start 0.0", "tell 0.1 1.0"]),
        ..BASE
    },
    RolloutScenario {
        name: "its successor is told once it is ready",
        groups: &[2, 1],
        there: &[("main", Ready), ("0.0'", Ready), ("0.1", Ready), ("1.0", Ready)],
        in_force: This(&["0.1", "1.0"]),
        decided: Same(&["tell 0.0' 0.1 1.0"]),
        ..BASE
    },
    RolloutScenario {
        name: "a generation stays where experts have lost all of their functions",
        there: &[("main", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        decided: Same(&["start 0.0"]),
        ..BASE
    },
    RolloutScenario {
        name: "meanwhile another group has a new function",
        there: &[("main", Ready), ("1.0'", Ready)],
        in_force: This(&["0.0", "1.0"]),
        decided: Different {
            processes: &["start 0.0", "tell 1.0'"],
            pods: &["start 0.0"],
            because: HEALTH_LAG,
        },
        ..BASE
    },
    RolloutScenario {
        name: "one that falters",
        groups: &[2, 1],
        there: &[("main", Ready), ("0.0", Faltering), ("0.1", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "0.1", "1.0"]),
        decided: Different { processes: &["tell 0.1 1.0"], pods: &[], because: HEALTH_LAG },
        ..BASE
    },
    RolloutScenario {
        name: "one that hangs is replaced",
        groups: &[2, 1],
        there: &[("main", Ready), ("0.0", Lost), ("0.1", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "0.1", "1.0"]),
        decided: Different {
            processes: &["stop 0.0", "tell 0.1 1.0"],
            pods: &["start 0.0", "stop 0.0", "tell 0.1 1.0"],
            because: SAME_PLACE,
        },
        ..BASE
    },
    RolloutScenario {
        name: "one that was asked to end",
        groups: &[2, 1],
        there: &[("main", Ready), ("0.0", Leaving), ("0.1", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "0.1", "1.0"]),
        decided: Different {
            processes: &["tell 0.1 1.0"],
            pods: &["start 0.0", "tell 0.1 1.0"],
            because: SAME_PLACE,
        },
        ..BASE
    },
    RolloutScenario {
        name: "a place whose functions fail is filled after a pause",
        there: &[("main", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        failed: &[("0.0", 0)],
        ..BASE
    },
    RolloutScenario {
        name: "the pause is over",
        there: &[("main", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        failed: &[("0.0", 10)],
        decided: Different {
            processes: &["start 0.0"],
            pods: &["start 0.0", "stop 0.0'"],
            because: "the pod that failed is how the operator knows of it",
        },
        ..BASE
    },
    RolloutScenario {
        name: "a main function that is gone is started again",
        there: &[("0.0", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        decided: Same(&["start main"]),
        ..BASE
    },
    RolloutScenario {
        name: "its successor",
        there: &[("main'", Ready), ("0.0", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        decided: Different { processes: &["tell 0.0 1.0"], pods: &[], because: SHARED_GENERATION },
        ..BASE
    },
    RolloutScenario {
        name: "a replica too many stays while it is routed to",
        there: &[("main", Ready), ("0.0", Ready), ("0.1", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "0.1", "1.0"]),
        decided: Same(&["tell 0.0 1.0"]),
        ..BASE
    },
    RolloutScenario {
        name: "and leaves after that",
        there: &[("main", Ready), ("0.0", Ready), ("0.1", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        decided: Same(&["stop 0.1"]),
        ..BASE
    },
    RolloutScenario {
        name: "without any main function it leaves at once",
        there: &[("0.0", Ready), ("0.1", Starting), ("1.0", Ready)],
        decided: Different {
            processes: &["start main", "stop 0.1"],
            pods: &["start main", "stop 0.1", "tell 0.0 1.0"],
            because: SHARED_GENERATION,
        },
        ..BASE
    },
    RolloutScenario {
        name: "but not where a generation leads to it that main functions find as they come",
        there: &[("0.0", Ready), ("0.1", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "0.1", "1.0"]),
        decided: Different {
            processes: &["start main", "stop 0.1"],
            pods: &["start main", "tell 0.0 1.0"],
            because: SHARED_GENERATION,
        },
        ..BASE
    },
    RolloutScenario {
        name: "half of a placement is none, and the one before serves on",
        there: &[("main", Ready), ("x", Ready), ("0.0", Ready), ("1.0", Starting)],
        in_force: Another(&["x"]),
        ..BASE
    },
    RolloutScenario {
        name: "a placement begins as a whole",
        there: &[("main", Ready), ("x", Ready), ("0.0", Ready), ("1.0", Ready)],
        in_force: Another(&["x"]),
        decided: Same(&["tell 0.0 1.0"]),
        ..BASE
    },
    RolloutScenario {
        name: "what only the one before used leaves",
        there: &[("main", Ready), ("x", Ready), ("0.0", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        decided: Same(&["stop x"]),
        ..BASE
    },
    RolloutScenario {
        name: "a group that is to sleep is no longer led to",
        resting: &[0],
        there: &[("main", Ready), ("0.0", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        decided: Same(&["tell 1.0"]),
        ..BASE
    },
    RolloutScenario {
        name: "then it ends",
        resting: &[0],
        there: &[("main", Ready), ("0.0", Ready), ("1.0", Ready)],
        in_force: This(&["1.0"]),
        decided: Same(&["stop 0.0"]),
        ..BASE
    },
    RolloutScenario {
        name: "and stays away",
        resting: &[0],
        there: &[("main", Ready), ("1.0", Ready)],
        in_force: This(&["1.0"]),
        ..BASE
    },
    RolloutScenario {
        name: "one that is woken starts",
        there: &[("main", Ready), ("1.0", Ready)],
        in_force: This(&["1.0"]),
        decided: Same(&["start 0.0"]),
        ..BASE
    },
    RolloutScenario {
        name: "one that wakes holds no other one up",
        there: &[("main", Ready), ("0.0", Starting), ("1.0", Ready)],
        in_force: This(&[]),
        decided: Same(&["tell 1.0"]),
        ..BASE
    },
    RolloutScenario {
        name: "and is told once it is ready",
        there: &[("main", Ready), ("0.0", Ready), ("1.0", Ready)],
        in_force: This(&["1.0"]),
        decided: Same(&["tell 0.0 1.0"]),
        ..BASE
    },
    RolloutScenario {
        name: "a deployment without remote functions is told so",
        groups: &[],
        there: &[("main", Ready)],
        decided: Same(&["tell"]),
        ..BASE
    },
];

/// Returns the decisions for processes or for pods in a scenario, in alphabetical order.
pub fn decided(scenario: &RolloutScenario, for_processes: bool) -> Vec<String> {
    let (decided, because) = match scenario.decided {
        Same(decided) => (decided, "-"),
        Different { processes: decided, because, .. } if for_processes => (decided, because),
        Different { pods, because, .. } => (pods, because),
    };
    assert!(!because.is_empty(), "{} has no reason", scenario.name);
    let mut decided: Vec<String> = decided.iter().map(|decision| (*decision).to_owned()).collect();
    decided.sort();
    decided
}

/// Returns the place of `function` and the number of earlier functions in that place.
pub fn place(function: &str) -> (&str, u32) {
    let place = function.trim_end_matches('\'');
    (place, u32::try_from(function.len() - place.len()).unwrap_or(u32::MAX))
}
