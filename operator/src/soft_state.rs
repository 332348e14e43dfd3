//! Soft state: what the operator remembers of deployments from one reconcile to the next.
//!
//! It decides in four places: how many replicas a load asks for, when another plan is looked for, how many functions are
//! replaced at once, and which deployments may begin a rollout that no user asked for. Losing it is safe: an operator that
//! starts scales up again from what gateways report, looks for a plan once more, and lets rollouts that have begun go on.
//! A reconcile takes it as one value ([`SoftStateView`]) and returns one ([`SoftStateUpdate`]).

use super::cooldown::Cooldown;
use super::fleet::{FunctionCounts, OtherDeployments};
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use remoe_api::MoEDeployment;
use remoe_autoscale::replicas::History;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One deployment in so many has a turn at a time, and at least one.
const AT_ONCE: usize = 4;
/// Longest turn: a rollout that takes longer delays those of other deployments no more.
const LONGEST: SignedDuration = SignedDuration::from_mins(10);

/// Soft state that a reconcile of one deployment begins with.
#[derive(Debug, Clone, Default)]
pub(crate) struct SoftStateView {
    /// Load in the scaling window.
    pub load: History,
    /// Times before which no other plan is looked for.
    pub cooldown: Cooldown,
    /// Functions of all other deployments.
    pub others: OtherDeployments,
    /// The deployment has a turn for a rollout that no user asked for, or may take one.
    pub has_rollout_turn: bool,
}

/// Soft state that a reconcile of one deployment ends with.
#[derive(Debug, Clone, Default)]
pub(crate) struct SoftStateUpdate {
    /// Load in the scaling window.
    pub load: History,
    /// Times before which no other plan is looked for.
    pub cooldown: Cooldown,
    /// Functions of the deployment that are not ready.
    pub function_counts: FunctionCounts,
    /// The deployment takes its turn for a rollout that no user asked for, or keeps it.
    pub takes_rollout_turn: bool,
    /// Nothing is left to roll out: the turn is over.
    pub settled: bool,
}

/// Another deployment took the last turn since the soft state was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RolloutTurnTaken;

/// Soft state of all deployments.
#[derive(Default)]
pub(super) struct SoftStateStore(Mutex<HashMap<ObjectRef<MoEDeployment>, DeploymentSoftState>>);

/// Soft state of one deployment.
#[derive(Default)]
struct DeploymentSoftState {
    load: History,
    cooldown: Cooldown,
    function_counts: FunctionCounts,
    /// Time since which it has its turn.
    turn: Option<Timestamp>,
}

impl DeploymentSoftState {
    fn turn(&self, now: Timestamp) -> Option<Timestamp> {
        self.turn.filter(|since| now.duration_since(*since) < LONGEST)
    }
}

impl SoftStateStore {
    /// Returns the soft state of `owner`.
    pub(super) fn view(&self, owner: &MoEDeployment, now: Timestamp) -> SoftStateView {
        let key = ObjectRef::from_obj(owner);
        let namespace = owner.namespace().unwrap_or_default();
        let all = self.lock();
        let others = all.iter().filter(|(other, _)| **other != key);
        let others = others
            .map(|(other, kept)| (other.namespace.as_deref().unwrap_or_default(), kept.function_counts));
        let own = all.get(&key);
        SoftStateView {
            load: own.map(|own| own.load.clone()).unwrap_or_default(),
            cooldown: own.map(|own| own.cooldown).unwrap_or_default(),
            others: OtherDeployments::of(&namespace, others),
            has_rollout_turn: has_rollout_turn(&all, &key, now),
        }
    }

    /// Keeps the soft state of `owner`.
    ///
    /// # Errors
    /// It takes a turn that another deployment took first. Then nothing is kept.
    pub(super) fn learn(
        &self,
        owner: &MoEDeployment,
        soft_state_update: SoftStateUpdate,
        now: Timestamp,
    ) -> Result<(), RolloutTurnTaken> {
        let key = ObjectRef::from_obj(owner);
        let mut all = self.lock();
        if soft_state_update.takes_rollout_turn && !has_rollout_turn(&all, &key, now) {
            return Err(RolloutTurnTaken);
        }
        let SoftStateUpdate { load, cooldown, function_counts, takes_rollout_turn, settled } =
            soft_state_update;
        let before = all.get(&key).and_then(|kept| kept.turn(now));
        let turn = before.or(takes_rollout_turn.then_some(now)).filter(|_| !settled);
        all.insert(key, DeploymentSoftState { load, cooldown, function_counts, turn });
        Ok(())
    }

    /// Forgets a deployment.
    pub(super) fn forget(&self, deployment: &ObjectRef<MoEDeployment>) {
        self.lock().remove(deployment);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ObjectRef<MoEDeployment>, DeploymentSoftState>> {
        // Every change is one insertion or removal: a panic elsewhere cannot have left it half-done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns whether the deployment `key` has its turn, or may take one.
fn has_rollout_turn(
    all: &HashMap<ObjectRef<MoEDeployment>, DeploymentSoftState>,
    key: &ObjectRef<MoEDeployment>,
    now: Timestamp,
) -> bool {
    let deployments = all.len() + usize::from(!all.contains_key(key));
    let taken = all.iter().filter(|(other, kept)| *other != key && kept.turn(now).is_some()).count();
    all.get(key).is_some_and(|own| own.turn(now).is_some()) || taken < (deployments / AT_ONCE).max(1)
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

    fn known(deployments: &[MoEDeployment]) -> SoftStateStore {
        let memory = SoftStateStore::default();
        for owner in deployments {
            memory.learn(owner, SoftStateUpdate::default(), Timestamp::UNIX_EPOCH).unwrap();
        }
        memory
    }

    fn takes_rollout_turn(memory: &SoftStateStore, owner: &MoEDeployment, now: Timestamp) -> bool {
        let may = memory.view(owner, now).has_rollout_turn;
        let soft_state_update = SoftStateUpdate { takes_rollout_turn: true, ..SoftStateUpdate::default() };
        assert_eq!(memory.learn(owner, soft_state_update, now).is_ok(), may);
        may
    }

    #[test]
    fn a_quarter_takes_its_turn_and_none_forever() {
        let deployments: Vec<MoEDeployment> = (0..9).map(|number| named(&format!("d{number}"))).collect();
        let memory = known(&deployments);
        let begin = Timestamp::UNIX_EPOCH;
        let taking = |now| -> Vec<bool> {
            deployments.iter().map(|owner| takes_rollout_turn(&memory, owner, now)).collect()
        };
        let had = taking(begin);
        assert_eq!(had.iter().filter(|had| **had).count(), 2);
        assert_eq!(taking(begin), had, "the same ones");
        let over = SoftStateUpdate { settled: true, ..SoftStateUpdate::default() };
        memory.learn(&deployments[0], over, begin).unwrap();
        assert!(takes_rollout_turn(&memory, &deployments[5], begin));
        assert!(!takes_rollout_turn(&memory, &deployments[0], begin));
        assert!(takes_rollout_turn(&memory, &deployments[0], begin + LONGEST));
        // Of few there is one at a time.
        let few = known(&deployments[..2]);
        assert!(
            takes_rollout_turn(&few, &deployments[0], begin)
                && !takes_rollout_turn(&few, &deployments[1], begin)
        );
    }

    #[test]
    fn turn_taken_since_the_read_is_refused() {
        let (one, other) = (named("one"), named("other"));
        let memory = known(&[one.clone(), other.clone()]);
        let now = Timestamp::UNIX_EPOCH;
        assert!(memory.view(&one, now).has_rollout_turn && memory.view(&other, now).has_rollout_turn);
        assert!(takes_rollout_turn(&memory, &one, now));
        let function_counts = FunctionCounts { functions: 7, ..FunctionCounts::default() };
        let late =
            SoftStateUpdate { takes_rollout_turn: true, function_counts, ..SoftStateUpdate::default() };
        assert_eq!(memory.learn(&other, late.clone(), now), Err(RolloutTurnTaken));
        assert_eq!(memory.view(&one, now).others.namespace.functions, 0, "nothing of it is kept");
        memory.forget(&ObjectRef::from_obj(&one));
        assert_eq!(memory.learn(&other, late, now), Ok(()));
        assert_eq!(memory.view(&one, now).others.namespace.functions, 7);
    }
}
