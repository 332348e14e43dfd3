//! Everything that a tenant can write, written by one who means harm: no look panics, none names what is
//! another's, what it writes stays within what the deployment consists of, and other tenants are served as before.

use crate::following::{large, mix};
use crate::world::World;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::serde::de::DeserializeOwned;
use kube::api::ObjectMeta;
use kube::{Resource, ResourceExt};
use remoe_operator::api::{
    GatewayDemand, MixOf, MoEDeployment, MoEDeploymentStatus, MoERecord, RESTARTED_AT, RequestLoad,
    WakeTimeline,
};
use remoe_operator::conversations::Heard;
use remoe_operator::fleet::{Others, Silence};
use remoe_operator::mains::Outcome;
use remoe_operator::names::{DEPLOYMENT, PodName, label};
use remoe_operator::observed::Observed;
use remoe_operator::pods::is_controlled_by;
use remoe_operator::routing::{MOST_GENERATIONS, RoutingTable};
use remoe_operator::steps::{Steps, Write};
use remoe_profile::Profile;
use remoe_scaling::Worked;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

/// Objects that are spoiled, a few of them for each look.
const OBJECTS: usize = 10_000;
const AT_ONCE: usize = 12;
/// Figures that a tenant supplies.
const FIGURES: &str = "figures";
/// Characters that a condition of the status has at most.
const MESSAGE: usize = 1024;

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
        match self.below(19) {
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
            15..=17 => self.number(),
            _ => Value::Null,
        }
    }

    /// The limits of what numbers can be.
    fn number(&mut self) -> Value {
        match self.below(12) {
            0..=2 => json!(u32::MAX),
            3 => json!(u64::MAX),
            4 => json!(i32::MAX),
            5 => json!(i64::MAX),
            6 => json!(i64::MIN),
            7 => json!(i32::MIN),
            8 => json!(1_u64 << 38),
            9 => json!(1),
            10 => json!(1e308),
            _ => json!(0),
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
            // Another number is taken where anything else is refused.
            Value::Number(_) if self.below(4) > 0 => *value = self.number(),
            other => *other = self.value(),
        }
    }

    /// `object` as somebody spoiled it, where the API takes it: what fits its types. Name, namespace and uid are the API
    /// server's.
    pub fn spoiled<K>(&mut self, object: &K) -> Option<K>
    where
        K: Resource<DynamicType = ()> + serde::Serialize + DeserializeOwned,
    {
        let mut value = serde_json::to_value(object).unwrap();
        let branches =
            value.as_object()?.keys().filter(|key| !["apiVersion", "kind"].contains(&key.as_str()));
        let all: Vec<String> = branches.cloned().collect();
        let branch = all.get(self.below(all.len()))?;
        self.spoil(value.get_mut(branch)?);
        let mut spoiled: K = serde_json::from_value(value).ok()?;
        let (meta, known) = (spoiled.meta_mut(), object.meta());
        meta.namespace.clone_from(&known.namespace);
        meta.name.clone_from(&known.name);
        meta.uid.clone_from(&known.uid);
        Some(spoiled)
    }

    /// Spoils one of `list`, or a copy of one beside it. Returns whether it did.
    fn spoil_one<K>(&mut self, list: &mut Vec<K>) -> bool
    where
        K: Resource<DynamicType = ()> + serde::Serialize + DeserializeOwned,
    {
        if list.is_empty() {
            return false;
        }
        let index = self.below(list.len());
        let Some(mut object) = self.spoiled(&list[index]) else { return false };
        if self.below(2) == 0 {
            list[index] = object;
            return true;
        }
        let number = self.below(1 << 20);
        let name = match self.below(4) {
            0 => format!("{}-{}", object.name_any(), u32::MAX),
            // The next one at its place.
            1 => PodName::parse(&object.name_any()).map_or_else(
                || format!("demo-{number}"),
                |name| format!("{}-{}", name.place, name.incarnation.saturating_add(1)),
            ),
            _ => format!("another-{number}"),
        };
        if list.iter().any(|known| known.name_any() == name) {
            return false;
        }
        object.meta_mut().uid = Some(format!("another-{number}"));
        object.meta_mut().name = Some(name);
        if self.below(2) == 0 {
            object.meta_mut().owner_references = None;
        }
        list.push(object);
        true
    }

    fn spoil_option<K>(&mut self, object: &mut Option<K>) -> bool
    where
        K: Resource<DynamicType = ()> + serde::Serialize + DeserializeOwned,
    {
        let spoiled = object.as_ref().and_then(|known| self.spoiled(known));
        let is_spoiled = spoiled.is_some();
        *object = spoiled.or(object.take());
        is_spoiled
    }

    /// The deployment itself: what it is to be, what people note on it, and what the operator said of it.
    fn spoil_owner(&mut self, owner: &mut MoEDeployment) -> bool {
        let mut noted = owner.clone();
        let annotations = noted.annotations_mut();
        annotations.entry(RESTARTED_AT.to_owned()).or_insert_with(|| "2026-01-01T00:00:00Z".to_owned());
        let Some(mut spoiled) = self.spoiled(&noted) else { return false };
        // As it was checked when it was made.
        spoiled.metadata.generation = owner.metadata.generation;
        *owner = spoiled;
        true
    }

    /// What a main function says in the name of the pod with `uid`: anything.
    fn saying(&mut self, heard: &mut Heard) {
        let number = [0, 1, 7, MOST_GENERATIONS - 1, MOST_GENERATIONS, u64::MAX][self.below(6)];
        let address = ["10.0.0.1:9001", "10.0.0.2:9001", ":", "\u{0}"][self.below(4)];
        let time = [Timestamp::MAX, Timestamp::MIN, Timestamp::UNIX_EPOCH][self.below(3)];
        *heard = Heard {
            in_force: (self.below(3) > 0).then_some(number),
            placement: ["", "f00d", &"x".repeat(9000)][self.below(3)].to_owned(),
            told: match self.below(4) {
                0 => Some((number, Outcome::Failed("\u{7}".repeat(5000)))),
                1 => Some((number, Outcome::InForce { problems: vec!["é".repeat(900); 40] })),
                _ => None,
            },
            worked: (self.below(3) > 0).then(|| Worked {
                age: Duration::from_micros(number),
                computed: [(address.to_owned(), Duration::from_micros(u64::MAX))].into(),
            }),
            used: [("g0".to_owned(), time), ("l1".to_owned(), time)].into(),
        };
    }

    /// What helpers print: what they should, spoiled, or anything.
    fn printed(&mut self, world: &World) -> String {
        let facts = serde_json::to_value(&world.facts).unwrap();
        let profile = serde_json::to_value(Profile::prior(&world.facts.inspection, "bfloat16")).unwrap();
        let mut said = [facts, profile][self.below(2)].clone();
        self.spoil(&mut said);
        match self.below(8) {
            0 => "{".repeat(9000),
            1 => String::new(),
            2 => format!("{{}}\n{said}\n{{\u{0}"),
            _ => said.to_string(),
        }
    }

    /// Somebody writes one object, or says something. Returns whether anybody would take it.
    fn spoil_world(&mut self, world: &mut World) -> bool {
        let printed = self.printed(world);
        let there = &mut world.there;
        match self.below(22) {
            0..=4 => self.spoil_one(&mut there.pods),
            5 => self.spoil_one(&mut there.services),
            6 => self.spoil_one(&mut there.network_policies),
            7 => self.spoil_one(&mut there.budgets),
            8 | 9 => self.spoil_one(&mut there.plans),
            10 => self.spoil_option(&mut there.model),
            11 | 12 => self.spoil_option(&mut there.routing),
            13 => there.profiles.values_mut().any(|profile| self.spoil_option(profile)),
            14 => there.maps.values_mut().any(|map| self.spoil_option(map)),
            15..=17 => self.spoil_option(&mut there.demand),
            18 | 19 => self.spoil_owner(&mut world.owner),
            20 => {
                world.printed = Some(printed);
                // They are asked.
                there.model = None;
                there.profiles.values_mut().for_each(|profile| *profile = None);
                true
            }
            _ => {
                let uids: Vec<String> = there.pods.iter().filter_map(ResourceExt::uid).collect();
                let Some(uid) = uids.get(self.below(uids.len())) else { return false };
                self.saying(there.heard.entry(uid.clone()).or_default());
                true
            }
        }
    }
}

/// Deployments as tenants have them, settled, in which everything is that they can consist of.
fn tenants() -> Vec<World> {
    let sleeps = json!({
        "scaling": {"min": 0, "max": 4, "idleWindow": "20s", "remoteIdleWindow": "30s", "remote": {"max": 3, "memoryMB": 100_000}},
        "workload": {
            "maxInputTokens": 768, "maxOutputTokens": 256, "typicalInputTokens": 96, "typicalOutputTokens": 52,
            "arrivals": {"perHour": "30", "burst": "2"},
        },
        "main": {"template": {
            "nodeSelector": {"pool": "a"}, "tolerations": [{"key": "a", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
        }},
        "pricing": {"billing": "Invocation", "cpuCoreHour": "0.03", "memoryGBHour": "0.004"},
    });
    let advisory = json!({"mode": "Advisory", "profile": {"configMapName": FIGURES}, "slo": {"ttft": "10s", "tpot": "150ms"}});
    let gpu = json!({
        "main": {"device": "cuda", "gpu": {"resource": "nvidia.com/gpu", "count": 1}},
        "pricing": {"gpuHour": "2.5", "gpuMemoryMB": 80_000},
    });
    let apart = json!({
        "replicas": 2, "main": {"cpu": {"min": 500, "max": 4000, "step": 500}},
        "remoteExperts": {"cpu": {"min": 100, "max": 1000, "step": 100}, "maxGroups": 4},
    });
    let mut all = vec![World::new(json!({"replicas": 2})), World::new(gpu), World::new(apart)];
    let mut sleeping = World::with_gateways(sleeps, &["a", "b"]);
    sleeping.facts = large();
    sleeping.settle();
    for (uid, of) in [("a", MixOf::Waiting), ("b", MixOf::Answered)] {
        let now = MicroTime(sleeping.there.now);
        sleeping.say(GatewayDemand {
            uid: uid.to_owned(),
            pod: uid.to_owned(),
            waiting: 2,
            in_flight: 1,
            acknowledged: sleeping.demand().spec.turn,
            saved: 5,
            last_active: now.clone(),
            sequence: 1,
            mix: Some(mix(of, &[1, 2])),
            load: Some(RequestLoad { at: now, occupied_ms: 1000 }),
            wake: Some(WakeTimeline { wake: 1, first_us: 5, ..WakeTimeline::default() }),
        });
    }
    let mut busy = sleeping.clone();
    busy.owner.spec.scaling.min = 1;
    all.extend([sleeping, busy]);
    let mut proposed = World::new(advisory);
    let figures = serde_json::to_string(&Profile::prior(&proposed.facts.inspection, "bfloat16")).unwrap();
    let map = ConfigMap {
        metadata: ObjectMeta { name: Some(FIGURES.to_owned()), ..ObjectMeta::default() },
        data: Some([("profile.json".to_owned(), figures)].into()),
        ..ConfigMap::default()
    };
    proposed.there.maps.insert(FIGURES.to_owned(), Some(map));
    // Nothing runs before somebody accepts what is proposed.
    for _ in 0..6 {
        let (_, steps) = proposed.look();
        proposed.write(&steps, usize::MAX);
        proposed.run();
    }
    proposed.owner.spec.accepted_plan =
        proposed.there.plans[0].name_any().strip_prefix("demo-").map(str::to_owned);
    all.push(proposed);
    let mut upgraded = World::new(json!({}));
    upgraded.settle();
    upgraded.keep_in_config_maps();
    // Its records are not written yet.
    for world in &mut all {
        world.settle();
    }
    all.push(upgraded);
    all
}

/// What is read: what has other labels is not, nor are records and plans of somebody else.
fn as_read(world: &mut World) {
    fn listed<K: Resource>(object: &K) -> bool {
        label(object.meta(), DEPLOYMENT) == "demo"
    }
    fn ours<K: Resource>(object: &K) -> bool {
        object.owner_references().iter().any(|owner| owner.controller == Some(true) && owner.uid == "uid-1")
    }
    let there = &mut world.there;
    there.pods.retain(listed);
    there.services.retain(listed);
    there.network_policies.retain(listed);
    there.budgets.retain(listed);
    there.plans.retain(|plan| listed(plan) && ours(plan));
    let read = |record: &MoERecord| listed(record) && ours(record);
    there.model = there.model.take().filter(read);
    there.routing = there.routing.take().filter(read);
}

fn newest(observed: &Observed) -> u64 {
    observed.routing.as_ref().map(RoutingTable::from_record).unwrap_or_default().newest()
}

fn check(world: &World, steps: &Steps, stated: &MoEDeploymentStatus) {
    let observed = &world.there;
    let mut created = BTreeSet::new();
    for write in &steps.writes {
        match write {
            Write::Delete(deletion) => {
                let meant =
                    observed.pods.iter().find(|pod| pod.uid().as_ref() == Some(&deletion.uid)).unwrap();
                assert!(is_controlled_by(meant, "uid-1"), "{deletion:?}");
            }
            Write::Relabel { live, .. } => assert!(is_controlled_by(live, "uid-1"), "{}", live.name_any()),
            Write::DeleteBudget(name, uid) => {
                let mut ours = observed
                    .budgets
                    .iter()
                    .filter(|budget| budget.owner_references().iter().any(|owner| owner.uid == "uid-1"));
                assert!(ours.any(|budget| budget.uid().as_ref() == Some(uid)), "{name}");
            }
            Write::Create(creation) => {
                let name = creation.pod.name_any();
                assert!(name.starts_with("demo-") || name.starts_with("remoe-profile-"), "{name}");
                assert!(created.insert(PodName::parse(&name).unwrap().place), "{name} is one of two");
            }
            Write::Routing(keep) => {
                let table = RoutingTable::from_record(&keep.wanted);
                // Beyond that it begins anew.
                assert!(!table.spoiled || newest(observed) == MOST_GENERATIONS - 2, "{table:?}");
            }
            _ => {}
        }
    }
    for partner in &steps.partners {
        let pod = observed.pods.iter().find(|pod| pod.uid().as_ref() == Some(&partner.uid)).unwrap();
        assert!(is_controlled_by(pod, "uid-1"), "{partner:?}");
    }
    for condition in &stated.conditions {
        assert!(condition.message.chars().count() <= MESSAGE, "{}", condition.message);
    }
}

/// The deployment of somebody else, which loses `lost` while pods that `strange` has are there under its labels.
fn is_healed(neighbour: &World, lost: usize, strange: &[Pod], others: Others) {
    let mut world = neighbour.clone();
    world.there.others = others;
    let lost = world.there.pods.remove(lost);
    let place = |pod: &Pod| PodName::parse(&pod.name_any()).unwrap().place;
    let mut next = PodName::parse(&lost.name_any()).unwrap().incarnation;
    let ours: Vec<Pod> = world.there.pods.clone();
    for (index, stolen) in strange.iter().enumerate().filter(|(_, pod)| !is_controlled_by(pod, "uid-2")) {
        let mut stolen = stolen.clone();
        // Names of what is to come, labels of what is there.
        next += 1;
        stolen.metadata.name = Some(format!("{}-{next}", place(&lost)));
        stolen.metadata.uid = Some(format!("stolen-{index}"));
        stolen.metadata.labels.clone_from(&ours[index % ours.len()].metadata.labels);
        world.there.pods.push(stolen);
    }
    let before = world.there.pods.clone();
    let (_, steps, stated) = world.look_and_state();
    let made = steps.writes.iter().filter_map(|write| match write {
        Write::Create(creation) => Some(place(&creation.pod)),
        _ => None,
    });
    assert_eq!(made.collect::<Vec<_>>(), [place(&lost)], "{:?}", stated.conditions);
    for write in &steps.writes {
        let uid = match write {
            Write::Delete(deletion) => &deletion.uid,
            Write::Relabel { live, .. } => live.metadata.uid.as_ref().unwrap(),
            _ => continue,
        };
        let meant = before.iter().find(|pod| pod.uid().as_ref() == Some(uid)).unwrap();
        assert!(is_controlled_by(meant, "uid-2"), "{}", meant.name_any());
    }
}

/// `value` with each of its numbers at each limit, one at a time; those of a value within a value too.
fn at_limits(value: &Value) -> Vec<Value> {
    match value {
        Value::Number(_) => {
            [json!(u32::MAX), json!(u64::MAX), json!(i64::MIN), json!(1e308), json!(0)].into()
        }
        Value::Object(map) => {
            let changed = map.iter().flat_map(|(key, inner)| {
                at_limits(inner).into_iter().map(|inner| {
                    let mut map = map.clone();
                    map.insert(key.clone(), inner);
                    Value::Object(map)
                })
            });
            changed.collect()
        }
        Value::Array(list) => {
            let changed = list.iter().enumerate().flat_map(|(index, inner)| {
                at_limits(inner).into_iter().map(move |inner| {
                    let mut list = list.clone();
                    list[index] = inner;
                    Value::Array(list)
                })
            });
            changed.collect()
        }
        Value::String(text) if text.starts_with('{') => {
            let inner = serde_json::from_str(text).unwrap_or_default();
            at_limits(&inner).into_iter().map(|inner| json!(inner.to_string())).collect()
        }
        _ => Vec::new(),
    }
}

/// `object` so, as far as the API takes it.
fn with_limits<K: serde::Serialize + DeserializeOwned>(object: &K) -> Vec<K> {
    let changed = at_limits(&serde_json::to_value(object).unwrap());
    changed.into_iter().filter_map(|object| serde_json::from_value(object).ok()).collect()
}

#[test]
fn numbers_at_their_limits_are_looked_at() {
    let mut looks = 0;
    for world in tenants() {
        let mut look = |change: &dyn Fn(&mut World)| {
            let mut world = world.clone();
            change(&mut world);
            let (_, steps, stated) = world.look_and_state();
            check(&world, &steps, &stated);
            looks += 1;
        };
        with_limits(&world.owner).iter().for_each(|owner| look(&|world| world.owner = owner.clone()));
        let there = &world.there;
        for changed in there.demand.iter().flat_map(with_limits) {
            look(&|world| world.there.demand = Some(changed.clone()));
        }
        for changed in there.routing.iter().flat_map(with_limits) {
            look(&|world| world.there.routing = Some(changed.clone()));
        }
        for changed in there.model.iter().flat_map(with_limits) {
            look(&|world| world.there.model = Some(changed.clone()));
        }
        for changed in there.plans.last().into_iter().flat_map(with_limits) {
            look(&|world| *world.there.plans.last_mut().unwrap() = changed.clone());
        }
        for (index, changed) in there.pods.iter().map(with_limits).enumerate().take(2) {
            for pod in changed {
                look(&|world| world.there.pods[index] = pod.clone());
            }
        }
        for (name, map) in there.maps.iter().filter_map(|(name, map)| Some((name, map.as_ref()?))) {
            for changed in with_limits(map) {
                look(&|world| drop(world.there.maps.insert(name.clone(), Some(changed.clone()))));
            }
        }
        for (name, record) in
            there.profiles.iter().filter_map(|(name, record)| Some((name, record.as_ref()?)))
        {
            for changed in with_limits(record) {
                look(&|world| drop(world.there.profiles.insert(name.clone(), Some(changed.clone()))));
            }
        }
    }
    println!("{looks} numbers at their limits");
}

/// Two numbers of which each can be are together more than one of them holds.
#[test]
fn what_gateways_say_together_is_looked_at() {
    let with_gateways = tenants().into_iter().filter(|world| world.there.demand.is_some());
    let mut looks = 0;
    for mut world in with_gateways {
        let said = world.demand().gateways().to_vec();
        for entry in &said {
            let most = GatewayDemand { waiting: u32::MAX, in_flight: u32::MAX, load: None, ..entry.clone() };
            world.say(most);
            looks += 1;
        }
        let (_, steps, stated) = world.look_and_state();
        check(&world, &steps, &stated);
    }
    assert!(looks >= 4, "{looks}");
}

#[test]
fn ten_thousand_spoiled_objects_are_looked_at_and_others_are_healed_meanwhile() {
    let tenants = tenants();
    let mut neighbour = World::new(json!({"replicas": 2}));
    neighbour.owner.metadata.name = Some("other".to_owned());
    neighbour.owner.metadata.uid = Some("uid-2".to_owned());
    neighbour.settle();
    let functions = neighbour.there.pods.len();
    let mut dice = Dice(7);
    let (mut spoiled, mut looks) = (0, 0);
    while spoiled < OBJECTS {
        let mut world = tenants[looks % tenants.len()].clone();
        for _ in 0..=dice.below(AT_ONCE) {
            spoiled += usize::from(dice.spoil_world(&mut world));
        }
        as_read(&mut world);
        let (_, steps, stated) = world.look_and_state();
        check(&world, &steps, &stated);
        let others = Others::of("theirs", [("spoiled", Silence::among(&steps.pods))]);
        is_healed(&neighbour, looks % functions, &world.there.pods, others);
        looks += 1;
    }
    println!("{spoiled} spoiled objects in {looks} looks");
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
        as_read(&mut world);
        world.settle();
        assert_eq!(world.names(), reference.names(), "seed {seed}");
    }
}
