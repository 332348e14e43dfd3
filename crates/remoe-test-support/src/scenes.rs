//! One table of scenes for processes and for pods: each side brings them about in its own terms and has to decide the
//! same, or what is written down as different, with the reason.
//!
//! Functions are named by their place, `main` or the number of a remote group and that of a replica in it, and an
//! apostrophe for each that came before them there: `0.1'` is the second one that fills place `0.1`. `x` belongs to an
//! earlier placement.

/// Observed state, and the decisions that it requires.
pub struct RolloutScenario {
    /// Name that says what is special about the scene.
    pub name: &'static str,
    /// Replicas of each remote group; each hosts experts of its own.
    pub groups: &'static [usize],
    /// Groups that sleep.
    pub resting: &'static [usize],
    /// Functions that exist, and their states.
    pub there: &'static [(&'static str, FunctionCondition)],
    /// Where the generation leads that `main` has in force.
    pub in_force: InForce,
    /// Places whose last two functions failed, the second one so many seconds ago.
    pub failed: &'static [(&'static str, u32)],
    /// Decisions: functions to `start` and to `stop`, and those to which a generation leads that is to be told (`tell`).
    pub decided: Decided,
}

/// How a function is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FunctionCondition {
    /// It has not been ready yet.
    Starting,
    /// It serves.
    Ready,
    /// It was ready, is not, and is not lost yet.
    Faltering,
    /// It hangs, and will not come back.
    Lost,
    /// It was asked to end.
    Leaving,
}

/// Generation that main functions follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InForce {
    /// Nothing.
    Nothing,
    /// A generation of the placement that is to run.
    This(&'static [&'static str]),
    /// One of another placement.
    Another(&'static [&'static str]),
}

/// Decisions, in any order.
#[derive(Debug, Clone, Copy)]
pub enum Decided {
    /// Both sides decide the same.
    Alike(&'static [&'static str]),
    /// The sides decide differently.
    Apart {
        /// For processes.
        processes: &'static [&'static str],
        /// For pods.
        pods: &'static [&'static str],
        /// The policy that makes the difference.
        because: &'static str,
    },
}

use Decided::{Alike, Apart};
use FunctionCondition::{Faltering, Leaving, Lost, Ready, Starting};
use InForce::{Another, Nothing, This};

const IN_PLACE: &str =
    "two functions of one place may not fit into one machine; on a cluster the next one starts beside it";
const SIGHT: &str = "the launcher asks functions itself, the operator is told of health late";
const SHARED: &str =
    "a process follows a generation of its own; pods of one shape share one, which is there before they are";

/// Two groups with one replica each, and nothing else to say.
const PLAIN: RolloutScenario = RolloutScenario {
    name: "",
    groups: &[1, 1],
    resting: &[],
    there: &[],
    in_force: Nothing,
    failed: &[],
    decided: Alike(&[]),
};

/// All scenes.
pub const SCENES: &[RolloutScenario] = &[
    RolloutScenario {
        name: "everything is started at once",
        groups: &[2, 1],
        decided: Alike(&["start main", "start 0.0", "start 0.1", "start 1.0"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "the first generation waits for every remote function",
        there: &[("main", Ready), ("0.0", Ready), ("1.0", Starting)],
        ..PLAIN
    },
    RolloutScenario {
        name: "then it is told",
        there: &[("main", Ready), ("0.0", Ready), ("1.0", Ready)],
        decided: Alike(&["tell 0.0 1.0"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "and stays",
        there: &[("main", Ready), ("0.0", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "a replica that is gone is routed around and started again",
        groups: &[2, 1],
        there: &[("main", Ready), ("0.1", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "0.1", "1.0"]),
        decided: Alike(&["start 0.0", "tell 0.1 1.0"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "its successor is told once it is ready",
        groups: &[2, 1],
        there: &[("main", Ready), ("0.0'", Ready), ("0.1", Ready), ("1.0", Ready)],
        in_force: This(&["0.1", "1.0"]),
        decided: Alike(&["tell 0.0' 0.1 1.0"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "a generation stays where experts have lost all of their functions",
        there: &[("main", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        decided: Alike(&["start 0.0"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "meanwhile another group has a new function",
        there: &[("main", Ready), ("1.0'", Ready)],
        in_force: This(&["0.0", "1.0"]),
        decided: Apart { processes: &["start 0.0", "tell 1.0'"], pods: &["start 0.0"], because: SIGHT },
        ..PLAIN
    },
    RolloutScenario {
        name: "one that falters",
        groups: &[2, 1],
        there: &[("main", Ready), ("0.0", Faltering), ("0.1", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "0.1", "1.0"]),
        decided: Apart { processes: &["tell 0.1 1.0"], pods: &[], because: SIGHT },
        ..PLAIN
    },
    RolloutScenario {
        name: "one that hangs is replaced",
        groups: &[2, 1],
        there: &[("main", Ready), ("0.0", Lost), ("0.1", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "0.1", "1.0"]),
        decided: Apart {
            processes: &["stop 0.0", "tell 0.1 1.0"],
            pods: &["start 0.0", "stop 0.0", "tell 0.1 1.0"],
            because: IN_PLACE,
        },
        ..PLAIN
    },
    RolloutScenario {
        name: "one that was asked to end",
        groups: &[2, 1],
        there: &[("main", Ready), ("0.0", Leaving), ("0.1", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "0.1", "1.0"]),
        decided: Apart {
            processes: &["tell 0.1 1.0"],
            pods: &["start 0.0", "tell 0.1 1.0"],
            because: IN_PLACE,
        },
        ..PLAIN
    },
    RolloutScenario {
        name: "a place whose functions fail is filled after a pause",
        there: &[("main", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        failed: &[("0.0", 0)],
        ..PLAIN
    },
    RolloutScenario {
        name: "the pause is over",
        there: &[("main", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        failed: &[("0.0", 10)],
        decided: Apart {
            processes: &["start 0.0"],
            pods: &["start 0.0", "stop 0.0'"],
            because: "the pod that failed is how the operator knows of it",
        },
        ..PLAIN
    },
    RolloutScenario {
        name: "a main function that is gone is started again",
        there: &[("0.0", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        decided: Alike(&["start main"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "its successor",
        there: &[("main'", Ready), ("0.0", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        decided: Apart { processes: &["tell 0.0 1.0"], pods: &[], because: SHARED },
        ..PLAIN
    },
    RolloutScenario {
        name: "a replica too many stays while it is routed to",
        there: &[("main", Ready), ("0.0", Ready), ("0.1", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "0.1", "1.0"]),
        decided: Alike(&["tell 0.0 1.0"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "and leaves after that",
        there: &[("main", Ready), ("0.0", Ready), ("0.1", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        decided: Alike(&["stop 0.1"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "without any main function it leaves at once",
        there: &[("0.0", Ready), ("0.1", Starting), ("1.0", Ready)],
        decided: Apart {
            processes: &["start main", "stop 0.1"],
            pods: &["start main", "stop 0.1", "tell 0.0 1.0"],
            because: SHARED,
        },
        ..PLAIN
    },
    RolloutScenario {
        name: "but not where a generation leads to it that main functions find as they come",
        there: &[("0.0", Ready), ("0.1", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "0.1", "1.0"]),
        decided: Apart {
            processes: &["start main", "stop 0.1"],
            pods: &["start main", "tell 0.0 1.0"],
            because: SHARED,
        },
        ..PLAIN
    },
    RolloutScenario {
        name: "half of a placement is none, and the one before serves on",
        there: &[("main", Ready), ("x", Ready), ("0.0", Ready), ("1.0", Starting)],
        in_force: Another(&["x"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "a placement begins as a whole",
        there: &[("main", Ready), ("x", Ready), ("0.0", Ready), ("1.0", Ready)],
        in_force: Another(&["x"]),
        decided: Alike(&["tell 0.0 1.0"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "what only the one before used leaves",
        there: &[("main", Ready), ("x", Ready), ("0.0", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        decided: Alike(&["stop x"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "a group that is to sleep is no longer led to",
        resting: &[0],
        there: &[("main", Ready), ("0.0", Ready), ("1.0", Ready)],
        in_force: This(&["0.0", "1.0"]),
        decided: Alike(&["tell 1.0"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "then it ends",
        resting: &[0],
        there: &[("main", Ready), ("0.0", Ready), ("1.0", Ready)],
        in_force: This(&["1.0"]),
        decided: Alike(&["stop 0.0"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "and stays away",
        resting: &[0],
        there: &[("main", Ready), ("1.0", Ready)],
        in_force: This(&["1.0"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "one that is woken starts",
        there: &[("main", Ready), ("1.0", Ready)],
        in_force: This(&["1.0"]),
        decided: Alike(&["start 0.0"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "one that wakes holds no other one up",
        there: &[("main", Ready), ("0.0", Starting), ("1.0", Ready)],
        in_force: This(&[]),
        decided: Alike(&["tell 1.0"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "and is told once it is ready",
        there: &[("main", Ready), ("0.0", Ready), ("1.0", Ready)],
        in_force: This(&["1.0"]),
        decided: Alike(&["tell 0.0 1.0"]),
        ..PLAIN
    },
    RolloutScenario {
        name: "a deployment without remote functions is told so",
        groups: &[],
        there: &[("main", Ready)],
        decided: Alike(&["tell"]),
        ..PLAIN
    },
];

/// Returns the decisions for `processes`, or else for pods, in `scene`, in alphabetical order.
pub fn decided(scene: &RolloutScenario, processes: bool) -> Vec<String> {
    let (decided, because) = match scene.decided {
        Alike(decided) => (decided, "-"),
        Apart { processes: decided, because, .. } if processes => (decided, because),
        Apart { pods, because, .. } => (pods, because),
    };
    assert!(!because.is_empty(), "{} has no reason", scene.name);
    let mut decided: Vec<String> = decided.iter().map(|decision| (*decision).to_owned()).collect();
    decided.sort();
    decided
}

/// The place of `function`, and how many came before it.
pub fn place(function: &str) -> (&str, u32) {
    let place = function.trim_end_matches('\'');
    (place, u32::try_from(function.len() - place.len()).unwrap_or(u32::MAX))
}
