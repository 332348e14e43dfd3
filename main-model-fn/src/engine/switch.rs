//! From one routing generation to the next, between iterations.

use crate::dispatch::{Link, LinkState, LocalExperts, Placement};
use crate::routing_check::{EndpointSets, RemoteSets};
use remoe_proto::v1::EndpointProblem;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// How long a switch waits for remote functions before it goes on without the missing ones.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Endpoints whose problems are told, and characters of each problem: the answer has to stay below
/// [`remoe_proto::MAX_DESCRIPTION`], and remote functions have a say in the texts.
const MOST_PROBLEMS: usize = 1024;
const LONGEST_PROBLEM: usize = 200;

/// A routing generation that is to come into force.
pub(crate) struct Switch {
    pub(crate) generation: u64,
    /// Packed, or on their way.
    pub(crate) local: LocalExperts,
    pub(crate) remote: RemoteSets,
    pub(crate) endpoints: EndpointSets,
    /// Told the endpoints that cannot be used, once the generation is in force.
    pub(crate) done: oneshot::Sender<Vec<EndpointProblem>>,
}

/// A switch whose links are connecting.
pub(crate) struct PendingSwitch {
    placement: Placement,
    /// Experts that others have.
    remote: usize,
    deadline: Instant,
    done: oneshot::Sender<Vec<EndpointProblem>>,
}

impl PendingSwitch {
    pub(crate) fn new(switch: Switch, links: Vec<Link>) -> Self {
        Self {
            remote: switch.remote.values().map(BTreeSet::len).sum(),
            placement: Placement::new(switch.generation, switch.local, &switch.remote, links),
            deadline: Instant::now() + CONNECT_LIMIT,
            done: switch.done,
        }
    }

    /// Experts that are not beside the engine.
    pub(crate) fn remote(&self) -> usize {
        self.remote
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Reports if every link has answered or failed, or the time is up.
    pub(crate) fn is_settled(&self) -> bool {
        let connecting = |link: &Link| matches!(link.state(), LinkState::Connecting);
        Instant::now() >= self.deadline || !self.placement.links.iter().any(connecting)
    }

    /// The placement to put in force, and what the caller is told about it.
    pub(crate) fn settle(self) -> (Placement, impl FnOnce()) {
        let problems = self
            .placement
            .links
            .iter()
            .filter_map(|link| {
                let message = match link.state() {
                    LinkState::Ready(_) => return None,
                    LinkState::Connecting => "connect timeout".to_owned(),
                    LinkState::Resting => "draining".to_owned(),
                    LinkState::Sick { message } => message,
                };
                Some(problem(link.address(), &message))
            })
            .take(MOST_PROBLEMS)
            .collect();
        let done = self.done;
        (self.placement, move || {
            // The receiver is gone in a function that ends.
            let _placer_gone = done.send(problems);
        })
    }
}

/// Returns why the endpoint at `address` cannot be used, cut to its maximum.
fn problem(address: &str, message: &str) -> EndpointProblem {
    let message = message.chars().take(LONGEST_PROBLEM).collect();
    EndpointProblem { address: address.to_owned(), message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoe_proto::MAX_DESCRIPTION;

    #[test]
    fn problems_of_all_endpoints_fit_into_an_answer() {
        let address = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535";
        let longest = problem(address, &"\u{10ffff}".repeat(20_000));
        assert_eq!(longest.message.chars().count(), LONGEST_PROBLEM);
        // Tags and lengths take less than 16 bytes.
        let bytes = longest.address.len() + longest.message.len() + 16;
        assert!(MOST_PROBLEMS * bytes < MAX_DESCRIPTION, "{bytes} bytes each");
    }
}
