//! Soft state: values that the operator keeps in memory from one reconcile of a deployment to the next.
//!
//! It influences four decisions: the number of replicas for a load, when the next plan is searched, how many
//! functions are replaced at once, and which deployments may begin a rollout that no user requested. Losing it is
//! safe: a restarted operator scales up again from the gateways' reports, searches one more plan, and continues
//! rollouts in progress. A reconcile reads it as one value ([`SoftStateView`]) and writes one back
//! ([`SoftStateUpdate`]).

use super::cooldown::Cooldown;
use super::fleet::{FunctionCounts, OtherDeployments};
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use remoe_api::MoEDeployment;
use remoe_autoscale::replicas::LoadHistory;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One in this many deployments may roll out at a time; at least one may.
const CONCURRENT_ROLLOUT_SHARE: usize = 4;
/// Longest turn. A rollout that takes longer no longer delays those of other deployments.
const MAX_TURN: SignedDuration = SignedDuration::from_mins(10);

/// Soft state at the start of a reconcile.
#[derive(Debug, Clone, Default)]
pub(crate) struct SoftStateView {
    /// Load in the scaling window.
    pub load: LoadHistory,
    /// Times before which no new plan is searched.
    pub cooldown: Cooldown,
    /// Function counts of all other deployments.
    pub others: OtherDeployments,
    /// Set if the deployment may roll out without a request of a user: it has a turn, or one is free.
    pub has_rollout_turn: bool,
}

/// Soft state at the end of a reconcile.
#[derive(Debug, Clone, Default)]
pub(crate) struct SoftStateUpdate {
    /// Load in the scaling window.
    pub load: LoadHistory,
    /// Times before which no new plan is searched.
    pub cooldown: Cooldown,
    /// Function counts of this deployment.
    pub function_counts: FunctionCounts,
    /// Set if the deployment takes or keeps a turn for a rollout that no user requested.
    pub takes_rollout_turn: bool,
    /// Set if the rollout is complete, which ends the turn.
    pub settled: bool,
}

/// Error: another deployment took the last free turn since the soft state was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RolloutTurnTaken;

/// Soft state of all deployments.
#[derive(Default)]
pub(super) struct SoftStateStore(Mutex<HashMap<ObjectRef<MoEDeployment>, DeploymentSoftState>>);

/// Soft state of one deployment.
#[derive(Default)]
struct DeploymentSoftState {
    load: LoadHistory,
    cooldown: Cooldown,
    function_counts: FunctionCounts,
    /// Begin of the deployment's turn.
    turn_since: Option<Timestamp>,
}

impl DeploymentSoftState {
    fn turn_since(&self, now: Timestamp) -> Option<Timestamp> {
        self.turn_since.filter(|since| now.duration_since(*since) < MAX_TURN)
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
            .map(|(other, state)| (other.namespace.as_deref().unwrap_or_default(), state.function_counts));
        let own = all.get(&key);
        SoftStateView {
            load: own.map(|own| own.load.clone()).unwrap_or_default(),
            cooldown: own.map(|own| own.cooldown).unwrap_or_default(),
            others: OtherDeployments::sum(&namespace, others),
            has_rollout_turn: has_rollout_turn(&all, &key, now),
        }
    }

    /// Stores the soft state of `owner`.
    ///
    /// # Errors
    /// Another deployment took the last turn first. Then nothing is stored.
    pub(super) fn store(
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
        let before = all.get(&key).and_then(|state| state.turn_since(now));
        let turn_since = before.or(takes_rollout_turn.then_some(now)).filter(|_| !settled);
        all.insert(key, DeploymentSoftState { load, cooldown, function_counts, turn_since });
        Ok(())
    }

    /// Drops the soft state of a deployment.
    pub(super) fn forget(&self, deployment: &ObjectRef<MoEDeployment>) {
        self.lock().remove(deployment);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ObjectRef<MoEDeployment>, DeploymentSoftState>> {
        // Every change is one map operation: a panic elsewhere cannot leave it inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns whether the deployment `key` has a turn, or may take one.
fn has_rollout_turn(
    all: &HashMap<ObjectRef<MoEDeployment>, DeploymentSoftState>,
    key: &ObjectRef<MoEDeployment>,
    now: Timestamp,
) -> bool {
    let deployments = all.len() + usize::from(!all.contains_key(key));
    let taken = all.iter().filter(|(other, state)| *other != key && state.turn_since(now).is_some()).count();
    all.get(key).is_some_and(|own| own.turn_since(now).is_some())
        || taken < (deployments / CONCURRENT_ROLLOUT_SHARE).max(1)
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
            memory.store(owner, SoftStateUpdate::default(), Timestamp::UNIX_EPOCH).unwrap();
        }
        memory
    }

    fn takes_rollout_turn(memory: &SoftStateStore, owner: &MoEDeployment, now: Timestamp) -> bool {
        let may = memory.view(owner, now).has_rollout_turn;
        let soft_state_update = SoftStateUpdate { takes_rollout_turn: true, ..SoftStateUpdate::default() };
        assert_eq!(memory.store(owner, soft_state_update, now).is_ok(), may);
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
        memory.store(&deployments[0], over, begin).unwrap();
        assert!(takes_rollout_turn(&memory, &deployments[5], begin));
        assert!(!takes_rollout_turn(&memory, &deployments[0], begin));
        assert!(takes_rollout_turn(&memory, &deployments[0], begin + MAX_TURN));
        // With fewer than four deployments, one rolls out at a time.
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
        assert_eq!(memory.store(&other, late.clone(), now), Err(RolloutTurnTaken));
        assert_eq!(memory.view(&one, now).others.namespace.functions, 0, "nothing of it is kept");
        memory.forget(&ObjectRef::from_obj(&one));
        assert_eq!(memory.store(&other, late, now), Ok(()));
        assert_eq!(memory.view(&one, now).others.namespace.functions, 7);
    }
}
