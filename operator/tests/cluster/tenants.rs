//! Everything that a tenant can write, written by one who means harm: no look panics, none names what is
//! another's, and what it writes stays within what the deployment consists of.

use crate::example::around;
use crate::world::World;
use jiff::Timestamp;
use k8s_openapi::serde::de::DeserializeOwned;
use kube::{Resource, ResourceExt};
use remoe_operator::conversations::Heard;
use remoe_operator::known::{Lacking, know, lacking};
use remoe_operator::mains::Outcome;
use remoe_operator::observed::Observed;
use remoe_operator::planned::{PlanState, Planned, Task, task};
use remoe_operator::pods::Trouble;
use remoe_operator::routing::{MOST_GENERATIONS, RoutingTable};
use remoe_operator::steps::{Steps, Write, steps};
use remoe_scaling::Worked;
use serde_json::{Value, json};
use std::time::Duration;

/// Objects that are spoiled, a few of them for each look.
const OBJECTS: usize = 10_000;
const AT_ONCE: usize = 20;

/// Numbers in a fixed order that looks like none (splitmix64).
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) as usize % bound.max(1)
    }

    fn value(&mut self) -> Value {
        match self.below(16) {
            0 => json!(u64::MAX),
            1 => json!(i64::MIN),
            2 => json!(-1),
            3 => json!(0),
            4 => json!(1e308),
            5 => json!(u32::MAX.to_string()),
            6 => json!("9".repeat(60)),
            7 => json!("\u{0}\u{202e}é".repeat(200)),
            8 => json!(""),
            9 => json!("9999-12-30T22:00:00Z"),
            10 => json!("-009999-01-02T01:59:59Z"),
            11 => json!({}),
            12 => json!([]),
            13 => json!("[".repeat(5000)),
            14 => json!(format!(
                "{{\"number\":{},\"plan\":\"\",\"revision\":\"\",\"remote\":\"0:0-4294967295\",\"endpoints\":[]}}",
                u64::MAX
            )),
            _ => Value::Null,
        }
    }

    /// Spoils one leaf or branch of `value`.
    fn spoil(&mut self, value: &mut Value) {
        match value {
            Value::Object(map) if !map.is_empty() && self.below(8) > 0 => {
                let key = map.keys().nth(self.below(map.len())).unwrap().clone();
                match self.below(12) {
                    0 => drop(map.remove(&key)),
                    1 => drop(map.insert(format!("{key}-"), json!("1"))),
                    _ => self.spoil(map.get_mut(&key).unwrap()),
                }
            }
            Value::Array(list) if !list.is_empty() && self.below(8) > 0 => {
                let index = self.below(list.len());
                match self.below(8) {
                    0 => drop(list.remove(index)),
                    1 => list.push(list[index].clone()),
                    _ => self.spoil(&mut list[index]),
                }
            }
            // A value within a value: what records and ConfigMaps hold.
            Value::String(text) if text.starts_with('{') && self.below(4) > 0 => {
                let Ok(mut inner) = serde_json::from_str(text) else { return *value = self.value() };
                self.spoil(&mut inner);
                *text = inner.to_string();
            }
            other => *other = self.value(),
        }
    }

    /// One of `list`, or a copy of one beside it, as somebody spoiled it. The API takes only what fits its
    /// types; what belongs to somebody else says so.
    fn spoil_one<K>(&mut self, list: &mut Vec<K>)
    where
        K: Resource<DynamicType = ()> + serde::Serialize + DeserializeOwned,
    {
        if list.is_empty() {
            return;
        }
        let index = self.below(list.len());
        let mut object = serde_json::to_value(&list[index]).unwrap();
        let branch = ["metadata", "spec", "status", "data"][self.below(4)];
        if let Some(branch) = object.get_mut(branch) {
            self.spoil(branch);
        }
        let Ok(mut object) = serde_json::from_value::<K>(object) else { return };
        // These are the API server's.
        object.meta_mut().namespace.clone_from(&list[index].meta().namespace);
        if self.below(2) == 0 {
            let number = self.below(1 << 20);
            object.meta_mut().uid = Some(format!("another-{number}"));
            object.meta_mut().name.get_or_insert_with(|| format!("another-{number}"));
            if self.below(2) == 0 {
                object.meta_mut().owner_references = None;
            }
            list.push(object);
        } else {
            object.meta_mut().uid.clone_from(&list[index].meta().uid);
            object.meta_mut().name.clone_from(&list[index].meta().name);
            list[index] = object;
        }
    }

    fn spoil_observed(&mut self, observed: &mut Observed) {
        match self.below(9) {
            0..=2 => self.spoil_one(&mut observed.pods),
            3 => self.spoil_one(&mut observed.services),
            4 => self.spoil_one(&mut observed.plans),
            5 => self.spoil_option(&mut observed.model),
            6 => self.spoil_option(&mut observed.routing),
            7 => {
                for profile in observed.profiles.values_mut() {
                    self.spoil_option(profile);
                }
            }
            _ => {
                let uids: Vec<String> = observed.pods.iter().filter_map(ResourceExt::uid).collect();
                let number = [0, 1, 7, MOST_GENERATIONS - 1, MOST_GENERATIONS, u64::MAX][self.below(6)];
                let said = Heard {
                    in_force: (self.below(3) > 0).then_some(number),
                    placement: String::new(),
                    told: (self.below(3) == 0).then(|| (number, Outcome::Failed("\u{7}".repeat(5000)))),
                    worked: (self.below(3) == 0).then(|| Worked {
                        age: Duration::from_micros(number),
                        computed: [("10.0.0.1:9001".to_owned(), Duration::from_micros(u64::MAX))].into(),
                    }),
                    used: [("g0".to_owned(), Timestamp::MAX)].into(),
                };
                observed.heard.insert(uids[self.below(uids.len())].clone(), said);
            }
        }
    }

    fn spoil_option<K>(&mut self, object: &mut Option<K>)
    where
        K: Resource<DynamicType = ()> + serde::Serialize + DeserializeOwned,
    {
        let mut list: Vec<K> = object.take().into_iter().collect();
        self.spoil_one(&mut list);
        // One of its own name and owner is all that is read.
        list.truncate(1);
        *object = list.pop();
    }
}

/// What one look at `observed` decides; no plan is computed.
fn look(world: &World, observed: &mut Observed) -> Steps {
    for _ in 0..8 {
        match lacking(&world.owner, observed).unwrap() {
            None => break,
            Some(Lacking::Log(pod)) => drop(observed.logs.insert(pod, Ok("{".repeat(9000)))),
            Some(Lacking::Profile(name)) => drop(observed.profiles.insert(name, None)),
            Some(Lacking::Map(name)) => drop(observed.maps.insert(name, None)),
        }
    }
    let known = know(&world.owner, observed).unwrap();
    let state = match task(&world.owner, observed, &known, &around()) {
        Task::Done(state) => state,
        Task::Solve { .. } | Task::Follow(_) => {
            PlanState::Refused(Trouble::new("Infeasible", "nothing is computed here"))
        }
    };
    let planned = Planned::new(&world.owner, observed, &known, (state, None), &around());
    let pods = observed.functions(&world.owner);
    steps(&world.owner, (observed, pods), &known, &planned, &around()).unwrap()
}

fn observed_newest(observed: &Observed) -> u64 {
    observed.routing.as_ref().map(RoutingTable::from_record).unwrap_or_default().newest()
}

fn check(observed: &Observed, steps: &Steps, functions: usize) {
    let mut created = 0;
    for write in &steps.writes {
        match write {
            Write::Delete(deletion) => {
                let meant =
                    observed.pods.iter().find(|pod| pod.uid().as_ref() == Some(&deletion.uid)).unwrap();
                assert!(meant.owner_references().iter().any(|owner| owner.uid == "uid-1"), "{deletion:?}");
            }
            Write::Create(creation) => {
                created += 1;
                let name = creation.pod.name_any();
                assert!(name.starts_with("demo-") || name.starts_with("remoe-profile-"), "{name}");
            }
            Write::Routing(keep) => {
                let table = RoutingTable::from_record(&keep.wanted);
                // Beyond that it begins anew.
                assert!(!table.spoiled || observed_newest(observed) == MOST_GENERATIONS - 2, "{table:?}");
            }
            _ => {}
        }
    }
    // One for each place, an inspector and a profiler.
    assert!(created <= functions + 2, "{created} pods are made");
    for partner in &steps.partners {
        let pod = observed.pods.iter().find(|pod| pod.uid().as_ref() == Some(&partner.uid)).unwrap();
        assert!(pod.owner_references().iter().any(|owner| owner.uid == "uid-1"), "{partner:?}");
    }
}

#[test]
fn ten_thousand_spoiled_objects_are_looked_at() {
    let mut world = World::new(json!({"replicas": 2}));
    world.settle();
    let functions = world.there.pods.len();
    let mut dice = Dice(7);
    for _ in 0..OBJECTS / AT_ONCE {
        let mut observed = world.there.clone();
        for _ in 0..AT_ONCE {
            dice.spoil_observed(&mut observed);
        }
        let steps = look(&world, &mut observed);
        check(&observed, &steps, functions);
    }
}

/// What is spoiled is replaced, and then everything is as it was.
#[test]
fn what_a_tenant_spoiled_is_healed() {
    let mut reference = World::new(json!({"replicas": 2}));
    reference.settle();
    for seed in 0..40 {
        let mut world = World::new(json!({"replicas": 2}));
        world.settle();
        let mut dice = Dice(seed);
        let spoiled = &mut world.there;
        dice.spoil_option(&mut spoiled.model);
        dice.spoil_option(&mut spoiled.routing);
        dice.spoil_one(&mut spoiled.services);
        spoiled.services.retain(|service| service.uid().is_some_and(|uid| !uid.starts_with("another")));
        world.settle();
        assert_eq!(world.names(), reference.names(), "seed {seed}");
    }
}
