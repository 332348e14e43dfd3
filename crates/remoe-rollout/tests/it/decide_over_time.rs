//! Pure step over simulated time: whatever happens, the deployment recovers.

use crate::fixtures;

use fixtures::{ended, instance, listening, wanted};
use proptest::prelude::*;
use remoe_process::Role;
use remoe_rollout::action::Action;
use remoe_rollout::decide::{Desired, Instance, decide};
use remoe_rollout::memory::RestartMemory;
use remoe_rollout::time::Time;
use remoe_rollout::{FunctionId, FunctionPhase};
use std::time::Duration;

/// Event of a function between two steps.
#[derive(Debug, Clone, Copy)]
enum Disruption {
    Progress,
    Crash,
    Freeze,
    PushFails,
    Sleep,
    Wake,
}

fn fate() -> impl Strategy<Value = (Disruption, usize)> {
    let fate = prop_oneof![
        6 => Just(Disruption::Progress),
        1 => Just(Disruption::Crash),
        1 => Just(Disruption::Freeze),
        1 => Just(Disruption::PushFails),
        1 => Just(Disruption::Sleep),
        2 => Just(Disruption::Wake),
    ];
    (fate, 0_usize..4)
}

/// Simulated launcher and its functions, as the step sees them.
#[derive(Default)]
struct World {
    instances: Vec<Instance>,
    frozen: Vec<FunctionId>,
    started: usize,
    pushing: bool,
    generations: Vec<u64>,
}

impl World {
    fn act(&mut self, desired: &Desired, action: &Action, memory: &RestartMemory, now: Time) {
        match action {
            Action::Start { name } => {
                assert!(now >= memory.not_before(name), "{name} is started in its pause");
                let taken = self.instances.iter().any(|other| other.observed.name == *name);
                assert!(!taken, "{name} is started twice");
                assert!(!desired.asleep, "{name} is started asleep");
                assert!(desired.functions.iter().any(|spec| spec.name == *name));
                self.started += 1;
                let mut new = instance(&format!("{name}/{}", self.started), name, FunctionPhase::Starting);
                (new.answered, new.unready_since) = (now, Some(now));
                self.instances.push(new);
            }
            Action::Stop { id, .. } => {
                let found = self.instances.iter_mut().find(|other| other.observed.id == *id);
                found.unwrap().observed.phase = ended(None);
            }
            Action::Forget { id, .. } => self.instances.retain(|other| other.observed.id != *id),
            Action::Route { generation, route } => {
                assert!(!self.pushing, "two pushes at once");
                assert!(self.generations.iter().all(|earlier| earlier < generation));
                for id in route.endpoints.iter().chain([&route.main]) {
                    let found = self.instances.iter().find(|other| other.observed.id == *id).unwrap();
                    assert!(matches!(found.observed.phase, FunctionPhase::Listening { .. }));
                    assert!(found.observed.role == Role::Main || found.unready_since.is_none());
                }
                self.generations.push(*generation);
                self.pushing = true;
            }
            Action::GiveUp { .. } => panic!("no function refused to start"),
        }
    }

    /// Functions that are not frozen answer, and advance one phase.
    fn live(&mut self, now: Time) {
        for instance in &mut self.instances {
            if self.frozen.contains(&instance.observed.id) {
                continue;
            }
            match instance.observed.phase {
                FunctionPhase::Starting => instance.observed.phase = listening(),
                FunctionPhase::Listening { .. } => instance.unready_since = None,
                FunctionPhase::Stopping | FunctionPhase::Ended(_) => {}
            }
            instance.answered = now;
        }
    }
}

proptest! {
    #[test]
    fn whatever_happens_it_comes_back(
        remotes in 0_usize..4,
        fates in prop::collection::vec(fate(), 0..80),
    ) {
        let mut desired = wanted(remotes);
        let (mut world, mut memory, mut now) = (World::default(), RestartMemory::default(), Time::ZERO);
        // After the events, enough quiet time for the longest pause and the longest silence.
        let quiet = std::iter::repeat_n((Disruption::Wake, 0), 60);
        for (fate, which) in fates.into_iter().chain(quiet) {
            now += Duration::from_millis(500);
            world.live(now);
            let count = world.instances.len();
            let hit = (count > 0).then(|| which % count.max(1));
            match (fate, hit) {
                (Disruption::Crash, Some(hit)) => world.instances[hit].observed.phase = ended(None),
                (Disruption::Freeze, Some(hit)) if matches!(world.instances[hit].observed.phase, FunctionPhase::Listening { .. }) => {
                    world.frozen.push(world.instances[hit].observed.id.clone());
                }
                (Disruption::Sleep, _) => desired.asleep = true,
                (Disruption::Wake, _) => desired.asleep = false,
                _ => {}
            }
            if std::mem::take(&mut world.pushing) {
                memory.routed(!matches!(fate, Disruption::PushFails), now);
            }
            let actions = decide(&desired, &world.instances, &memory, now);
            for action in &actions {
                world.act(&desired, action, &memory, now);
                memory.note(action, now);
            }
            let again = decide(&desired, &world.instances, &memory, now);
            let freed = |place: &String| {
                actions.iter().any(|action| matches!(action, Action::Forget { name, .. } if name == place))
            };
            let settled = |action: &Action| match action {
                Action::Forget { .. } => true,
                // A function that slept has no pause: its slot is filled as soon as it is free.
                Action::Start { name } => freed(name),
                _ => false,
            };
            prop_assert!(again.iter().all(settled), "{again:?}");
        }
        let (generation, route) = memory.in_force().unwrap();
        prop_assert_eq!(Some(&generation), world.generations.last());
        prop_assert_eq!(world.instances.len(), remotes + 1);
        prop_assert_eq!(route.endpoints.len(), remotes);
        let ids: Vec<_> = world.instances.iter().map(|instance| instance.observed.id.clone()).collect();
        prop_assert!(route.endpoints.iter().chain([&route.main]).all(|id| ids.contains(id)));
    }
}
