//! Short forms of the pure step's input.

#![allow(dead_code)] // Each test program uses some of it.

use remoe_process::Role;
use remoe_proto::v1::LayerExperts;
use remoe_rollout::decide::{Desired, Instance, RolloutTimeouts};
use remoe_rollout::time::Time;
use remoe_rollout::{Ending, FunctionId, FunctionPhase, FunctionSpec, ObservedFunction};
use std::collections::BTreeSet;
use std::time::Duration;

pub(crate) fn seconds(seconds: f64) -> Time {
    Duration::from_secs_f64(seconds)
}

pub(crate) fn wanted(remotes: usize) -> Desired {
    let set = || vec![LayerExperts { layer: 1, experts: vec![3] }];
    let spec = |name: String, role| FunctionSpec {
        name,
        role,
        arguments: Vec::new(),
        environment: Vec::new(),
        http: None,
        hosted: if role == Role::Remote { set() } else { Vec::new() },
        limits: None,
    };
    let mut functions = vec![spec("main".to_owned(), Role::Main)];
    functions.extend((0..remotes).map(|number| spec(format!("group-0-{number}"), Role::Remote)));
    Desired {
        revision: 0,
        functions,
        asleep: false,
        resting: BTreeSet::new(),
        placed: true,
        account: String::new(),
        starts_at_once: None,
        remote: if remotes == 0 { Vec::new() } else { set() },
        drain: seconds(30.0),
        timeouts: RolloutTimeouts::with_ready(seconds(120.0)),
    }
}

pub(crate) fn instance(id: &str, name: &str, phase: FunctionPhase) -> Instance {
    Instance {
        observed: ObservedFunction {
            id: FunctionId(id.to_owned()),
            name: name.to_owned(),
            role: if name == "main" { Role::Main } else { Role::Remote },
            pid: None,
            phase,
        },
        answered: Time::ZERO,
        unready_since: None,
    }
}

pub(crate) fn listening() -> FunctionPhase {
    FunctionPhase::Listening { grpc: "127.0.0.1:1".parse().unwrap(), http: None, metrics: None }
}

pub(crate) fn ended(code: Option<i32>) -> FunctionPhase {
    FunctionPhase::Ended(Ending { code, ..Ending::default() })
}
