//! Switch to a new routing generation, between two iterations.

use crate::dispatch::{Link, LinkState, LocalExperts, Placement};
use crate::routing_check::{EndpointSets, RemoteSets};
use remoe_proto::v1::EndpointProblem;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Time for which a switch waits for remote functions. Then it continues without the missing ones.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Most endpoints whose problems are reported: the reply must stay below [`remoe_proto::MAX_DESCRIPTION`], and remote
/// functions write part of the texts.
const MAX_PROBLEMS: usize = 1024;
/// Longest reported text of a problem, in characters.
const MAX_PROBLEM_CHARS: usize = 200;

/// Routing generation that becomes active next.
pub(crate) struct Switch {
    pub(crate) generation: u64,
    /// Local experts, loaded or loading.
    pub(crate) local: LocalExperts,
    pub(crate) remote: RemoteSets,
    pub(crate) endpoints: EndpointSets,
    /// Receives the unusable endpoints once the generation is in force.
    pub(crate) done: oneshot::Sender<Vec<EndpointProblem>>,
}

/// A switch whose links are connecting.
pub(crate) struct PendingSwitch {
    placement: Placement,
    /// Number of remote experts.
    remote_experts: usize,
    deadline: Instant,
    done: oneshot::Sender<Vec<EndpointProblem>>,
}

impl PendingSwitch {
    pub(crate) fn new(switch: Switch, links: Vec<Link>) -> Self {
        Self {
            remote_experts: switch.remote.values().map(BTreeSet::len).sum(),
            placement: Placement::new(switch.generation, switch.local, &switch.remote, links),
            deadline: Instant::now() + CONNECT_TIMEOUT,
            done: switch.done,
        }
    }

    /// Returns the number of remote experts.
    pub(crate) fn remote_experts(&self) -> usize {
        self.remote_experts
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Reports if every link has connected or failed, or the deadline has passed.
    pub(crate) fn is_settled(&self) -> bool {
        let is_connecting = |link: &Link| matches!(link.state(), LinkState::Connecting);
        Instant::now() >= self.deadline || !self.placement.links.iter().any(is_connecting)
    }

    /// Returns the placement to put in force, and a function that then reports the unusable endpoints to the caller.
    pub(crate) fn settle(self) -> (Placement, impl FnOnce()) {
        let problems = self
            .placement
            .links
            .iter()
            .filter_map(|link| {
                let message = match link.state() {
                    LinkState::Ready(_) => return None,
                    LinkState::Connecting => "connect timeout".to_owned(),
                    LinkState::Draining => "draining".to_owned(),
                    LinkState::CircuitOpen { message } => message,
                };
                Some(problem(link.address(), &message))
            })
            .take(MAX_PROBLEMS)
            .collect();
        let done = self.done;
        (self.placement, move || {
            // The receiver is gone if the process ends.
            let _receiver_gone = done.send(problems);
        })
    }
}

/// Returns the problem of the endpoint at `address`, with its text cut to [`MAX_PROBLEM_CHARS`].
fn problem(address: &str, message: &str) -> EndpointProblem {
    let message = message.chars().take(MAX_PROBLEM_CHARS).collect();
    EndpointProblem { address: address.to_owned(), message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoe_proto::MAX_DESCRIPTION;

    #[test]
    fn problems_of_all_endpoints_fit_into_a_reply() {
        let address = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535";
        let longest = problem(address, &"\u{10ffff}".repeat(20_000));
        assert_eq!(longest.message.chars().count(), MAX_PROBLEM_CHARS);
        // Tags and lengths take less than 16 bytes.
        let bytes = longest.address.len() + longest.message.len() + 16;
        assert!(MAX_PROBLEMS * bytes < MAX_DESCRIPTION, "{bytes} bytes each");
    }
}
