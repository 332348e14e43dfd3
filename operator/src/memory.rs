//! Soft state: what the operator remembers of deployments from one reconcile to the next.
//!
//! It decides in four places: how many replicas a load asks for, when another plan is looked for, how many functions are
//! replaced at once, and which deployments may begin a rollout that no user asked for. Losing it is safe: an operator that
//! starts scales up again from what gateways report, looks for a plan once more, and lets rollouts that have begun go on.
//! A reconcile takes it as one value ([`Remembered`]) and returns one ([`Learned`]).

use super::cooldown::Cooldown;
use super::fleet::{OtherFunctions, SilentFunctions};
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use remoe_api::MoEDeployment;
use remoe_autoscale::replicas::LoadHistory;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One deployment in so many has a turn at a time, and at least one.
const AT_ONCE: usize = 4;
/// Longest turn: a rollout that takes longer delays those of other deployments no more.
const LONGEST: SignedDuration = SignedDuration::from_mins(10);

/// Soft state that a reconcile of one deployment begins with.
#[derive(Debug, Clone, Default)]
pub(crate) struct Remembered {
    /// Load in the scaling window.
    pub load: LoadHistory,
    /// Times before which no other plan is looked for.
    pub cooldown: Cooldown,
    /// Functions of all other deployments.
    pub others: OtherFunctions,
    /// The deployment has a turn for a rollout that no user asked for, or may take one.
    pub has_turn: bool,
}

/// Soft state that a reconcile of one deployment ends with.
#[derive(Debug, Clone, Default)]
pub(crate) struct Learned {
    /// Load in the scaling window.
    pub load: LoadHistory,
    /// Times before which no other plan is looked for.
    pub cooldown: Cooldown,
    /// Functions of the deployment that are not ready.
    pub silence: SilentFunctions,
    /// The deployment takes its turn for a rollout that no user asked for, or keeps it.
    pub takes_turn: bool,
    /// Nothing is left to roll out: the turn is over.
    pub settled: bool,
}

/// Another deployment took the last turn since the soft state was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TurnTaken;

/// Soft state of all deployments.
#[derive(Default)]
pub(super) struct SoftState(Mutex<HashMap<ObjectRef<MoEDeployment>, DeploymentMemory>>);

/// Soft state of one deployment.
#[derive(Default)]
struct DeploymentMemory {
    load: LoadHistory,
    cooldown: Cooldown,
    silence: SilentFunctions,
    /// Time since which it has its turn.
    turn: Option<Timestamp>,
}

impl DeploymentMemory {
    fn turn(&self, now: Timestamp) -> Option<Timestamp> {
        self.turn.filter(|since| now.duration_since(*since) < LONGEST)
    }
}

impl SoftState {
    /// Returns the soft state of `owner`.
    pub(super) fn recall(&self, owner: &MoEDeployment, now: Timestamp) -> Remembered {
        let key = ObjectRef::from_obj(owner);
        let namespace = owner.namespace().unwrap_or_default();
        let all = self.lock();
        let others = all.iter().filter(|(other, _)| **other != key);
        let others =
            others.map(|(other, kept)| (other.namespace.as_deref().unwrap_or_default(), kept.silence));
        let own = all.get(&key);
        Remembered {
            load: own.map(|own| own.load.clone()).unwrap_or_default(),
            cooldown: own.map(|own| own.cooldown).unwrap_or_default(),
            others: OtherFunctions::of(&namespace, others),
            has_turn: has_turn(&all, &key, now),
        }
    }

    /// Keeps the soft state of `owner`.
    ///
    /// # Errors
    /// It takes a turn that another deployment took first. Then nothing is kept.
    pub(super) fn learn(
        &self,
        owner: &MoEDeployment,
        learned: Learned,
        now: Timestamp,
    ) -> Result<(), TurnTaken> {
        let key = ObjectRef::from_obj(owner);
        let mut all = self.lock();
        if learned.takes_turn && !has_turn(&all, &key, now) {
            return Err(TurnTaken);
        }
        let Learned { load, cooldown, silence, takes_turn, settled } = learned;
        let before = all.get(&key).and_then(|kept| kept.turn(now));
        let turn = before.or(takes_turn.then_some(now)).filter(|_| !settled);
        all.insert(key, DeploymentMemory { load, cooldown, silence, turn });
        Ok(())
    }

    /// Forgets a deployment.
    pub(super) fn forget(&self, deployment: &ObjectRef<MoEDeployment>) {
        self.lock().remove(deployment);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ObjectRef<MoEDeployment>, DeploymentMemory>> {
        // Every change is one insertion or removal: a panic elsewhere cannot have left it half-done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns whether the deployment `key` has its turn, or may take one.
fn has_turn(
    all: &HashMap<ObjectRef<MoEDeployment>, DeploymentMemory>,
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

    fn known(deployments: &[MoEDeployment]) -> SoftState {
        let memory = SoftState::default();
        for owner in deployments {
            memory.learn(owner, Learned::default(), Timestamp::UNIX_EPOCH).unwrap();
        }
        memory
    }

    fn takes_turn(memory: &SoftState, owner: &MoEDeployment, now: Timestamp) -> bool {
        let may = memory.recall(owner, now).has_turn;
        let learned = Learned { takes_turn: true, ..Learned::default() };
        assert_eq!(memory.learn(owner, learned, now).is_ok(), may);
        may
    }

    #[test]
    fn a_quarter_takes_its_turn_and_none_forever() {
        let deployments: Vec<MoEDeployment> = (0..9).map(|number| named(&format!("d{number}"))).collect();
        let memory = known(&deployments);
        let begin = Timestamp::UNIX_EPOCH;
        let taking =
            |now| -> Vec<bool> { deployments.iter().map(|owner| takes_turn(&memory, owner, now)).collect() };
        let had = taking(begin);
        assert_eq!(had.iter().filter(|had| **had).count(), 2);
        assert_eq!(taking(begin), had, "the same ones");
        let over = Learned { settled: true, ..Learned::default() };
        memory.learn(&deployments[0], over, begin).unwrap();
        assert!(takes_turn(&memory, &deployments[5], begin));
        assert!(!takes_turn(&memory, &deployments[0], begin));
        assert!(takes_turn(&memory, &deployments[0], begin + LONGEST));
        // Of few there is one at a time.
        let few = known(&deployments[..2]);
        assert!(takes_turn(&few, &deployments[0], begin) && !takes_turn(&few, &deployments[1], begin));
    }

    #[test]
    fn turn_taken_since_the_read_is_refused() {
        let (one, other) = (named("one"), named("other"));
        let memory = known(&[one.clone(), other.clone()]);
        let now = Timestamp::UNIX_EPOCH;
        assert!(memory.recall(&one, now).has_turn && memory.recall(&other, now).has_turn);
        assert!(takes_turn(&memory, &one, now));
        let silence = SilentFunctions { there: 7, ..SilentFunctions::default() };
        let late = Learned { takes_turn: true, silence, ..Learned::default() };
        assert_eq!(memory.learn(&other, late.clone(), now), Err(TurnTaken));
        assert_eq!(memory.recall(&one, now).others.namespace.there, 0, "nothing of it is kept");
        memory.forget(&ObjectRef::from_obj(&one));
        assert_eq!(memory.learn(&other, late, now), Ok(()));
        assert_eq!(memory.recall(&one, now).others.namespace.there, 7);
    }
}
