//! Whose turn it is to be made anew, where nobody asked for it: another version of the operator, or another plan for the
//! same resource, changes what the functions of many deployments are made of, at once.
//!
//! Such deployments follow one another, a few at a time, so that nodes have room for both sets of functions and what is
//! wrong with the new ones is met by few. What a person asked for, and what does not serve as it is, never waits.

use super::api::MoEDeployment;
use super::manifests::{Function, Revision};
use super::pods::PodView;
use super::routing::{RoutedPod, RoutingTable};
use jiff::{SignedDuration, Timestamp};
use kube::runtime::reflector::ObjectRef;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One deployment in so many may have its turn at the same time as others, and at least one.
const AT_ONCE: usize = 4;
/// Whose functions are not there after so long holds the others up no longer.
const LONGEST: SignedDuration = SignedDuration::from_mins(10);

/// Whether all main functions, or all remote ones, of `owner` are to be followed by others that nobody asked for, none of
/// which is there yet, while all that main functions were told of by `table` is there and works.
pub(crate) fn is_needed(
    owner: &MoEDeployment,
    pods: &[PodView],
    table: &RoutingTable,
    target: &Revision,
) -> bool {
    let seen = owner.status.as_ref().and_then(|status| status.observed_generation);
    if seen.is_none() || seen != owner.metadata.generation {
        return false;
    }
    let there = || pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none());
    let mut told = table.entries.values().flat_map(|generation| &generation.endpoints);
    let is_there = |endpoint: &RoutedPod| there().any(|pod| pod.name.to_string() == endpoint.pod);
    let is_whole =
        there().filter(|pod| pod.is_main).count() >= target.main.replicas as usize && told.all(is_there);
    if !is_whole || !there().all(|pod| pod.is_sound() && pod.ready) {
        return false;
    }
    let has_begun = |function: &Function| there().any(|pod| pod.identity == function.identity);
    let mains = there().any(|pod| pod.is_main) && !has_begun(&target.main);
    let remotes = there().any(|pod| !pod.is_main) && !target.remote.is_empty();
    mains || (remotes && !target.remote.iter().any(has_begun))
}

/// Who has a turn. A process that starts knows of none, and forgets nothing that matters: who has begun goes on.
#[derive(Default)]
pub(super) struct Turns(Mutex<HashMap<ObjectRef<MoEDeployment>, Timestamp>>);

impl Turns {
    /// Whether `owner`, one of so many `deployments`, may begin now; it has its turn from then on.
    pub(super) fn take(&self, owner: &MoEDeployment, deployments: usize, now: Timestamp) -> bool {
        let mut turns = self.lock();
        turns.retain(|_, since| now.duration_since(*since) < LONGEST);
        let owner = ObjectRef::from_obj(owner);
        if !turns.contains_key(&owner) {
            if turns.len() >= (deployments / AT_ONCE).max(1) {
                return false;
            }
            turns.insert(owner, now);
        }
        true
    }

    /// The turn of `owner` is over, if it had one.
    pub(super) fn end(&self, deployment: &ObjectRef<MoEDeployment>) {
        self.lock().remove(deployment);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ObjectRef<MoEDeployment>, Timestamp>> {
        // Every change is one insertion or removal: a panic elsewhere cannot have left it half-done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn named(name: &str) -> MoEDeployment {
        let spec = json!({"model": {"source": "pvc://models/demo"}});
        MoEDeployment::new(name, serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn a_quarter_of_all_has_its_turn_and_nobody_for_ever() {
        let turns = Turns::default();
        let deployments: Vec<MoEDeployment> = (0..9).map(|number| named(&format!("d{number}"))).collect();
        let begin = Timestamp::UNIX_EPOCH;
        let had = |now| deployments.iter().filter(|owner| turns.take(owner, 9, now)).count();
        assert_eq!(had(begin), 2);
        assert_eq!(had(begin), 2, "the same ones");
        turns.end(&ObjectRef::from_obj(&deployments[0]));
        assert!(turns.take(&deployments[5], 9, begin));
        assert!(!turns.take(&deployments[0], 9, begin));
        assert!(turns.take(&deployments[0], 9, begin + LONGEST));
        // Of few there is one at a time.
        let few = Turns::default();
        assert!(few.take(&deployments[0], 2, begin) && !few.take(&deployments[1], 2, begin));
    }
}
