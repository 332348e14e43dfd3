//! Everything that a hostile tenant can write, and the invariants that must hold. Tests choose randomly; a fuzz
//! target (`crates/remoe-fuzz-harness/src/tenant.rs`) lets a fuzzer choose.

use crate::diff::Diff;
use crate::fleet::OtherDeployments;
use crate::main_client::GenerationOutcome;
use crate::main_pollers::MainObservation;
use crate::names::{DEPLOYMENT, PodName, label};
use crate::observed::Observed;
use crate::ownership::is_owned_by;
use crate::routing::{MAX_GENERATION, RoutingTable};
use crate::testing::example::{large, mix};
use crate::testing::world::World;
use crate::write::{DesiredObject, Write};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::serde::de::DeserializeOwned;
use kube::api::ObjectMeta;
use kube::{Resource, ResourceExt};
use remoe_api::{
    GatewayDemand, MixOf, MoEDeployment, MoEDeploymentStatus, MoERecord, RESTARTED_AT, RequestLoad,
    WakeTimeline,
};
use remoe_autoscale::replicas::RemoteWorkReport;
use remoe_hardware::Profile;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

/// Maximum corrupted objects per reconcile.
pub const AT_ONCE: usize = 12;
/// Profile that a tenant supplies.
const FIGURES: &str = "figures";
/// Maximum characters of a condition's message.
const MESSAGE: usize = 1024;

/// Source of choices; the same choices make the same tenant.
pub enum SeededChoices<'a> {
    /// Pseudo-random numbers (splitmix64).
    Thrown(u64),
    /// Bytes from a caller, two per choice; the first choice when they run out.
    #[allow(dead_code, reason = "a fuzzer chooses, tests throw")]
    Told(&'a [u8]),
}

impl SeededChoices<'_> {
    pub fn below(&mut self, bound: usize) -> usize {
        let number = match self {
            Self::Thrown(state) => {
                *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                (mixed ^ (mixed >> 31)) as usize
            }
            Self::Told(bytes) => {
                let Some((chosen, rest)) = bytes.split_first_chunk() else { return 0 };
                *bytes = rest;
                usize::from(u16::from_le_bytes(*chosen))
            }
        };
        number % bound.max(1)
    }

    /// Returns a handwritten text.
    fn text(&mut self) -> String {
        let length = self.below(64);
        match self {
            Self::Thrown(_) => "é".repeat(length),
            Self::Told(bytes) => {
                let (text, rest) = bytes.split_at(length.min(bytes.len()));
                *bytes = rest;
                String::from_utf8_lossy(text).into_owned()
            }
        }
    }

    fn value(&mut self) -> Value {
        match self.below(20) {
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
            18 => json!(self.text()),
            _ => Value::Null,
        }
    }

    /// Numbers at their limits.
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

    /// Corrupts one leaf or branch of `value`.
    fn corrupt(&mut self, value: &mut Value) {
        match value {
            Value::Object(map) if !map.is_empty() && self.below(8) > 0 => {
                let key = map.keys().nth(self.below(map.len())).unwrap().clone();
                match self.below(12) {
                    0 => drop(map.remove(&key)),
                    1 => drop(map.insert(format!("{key}-"), json!("1"))),
                    _ => self.corrupt(map.get_mut(&key).unwrap()),
                }
            }
            Value::Array(list) if !list.is_empty() && self.below(8) > 0 => {
                let index = self.below(list.len());
                match self.below(8) {
                    0 => drop(list.remove(index)),
                    1 => list.push(list[index].clone()),
                    _ => self.corrupt(&mut list[index]),
                }
            }
            // JSON nested in a string, as in records and ConfigMaps.
            Value::String(text) if text.starts_with('{') && self.below(4) > 0 => {
                let Ok(mut inner) = serde_json::from_str(text) else { return *value = self.value() };
                self.corrupt(&mut inner);
                *text = inner.to_string();
            }
            // Only another number is accepted there.
            Value::Number(_) if self.below(4) > 0 => *value = self.number(),
            other => *other = self.value(),
        }
    }

    /// Returns a corrupted `object` that the API accepts, that is, one that fits its types. Name, namespace and UID
    /// are the API server's.
    pub fn corrupted<K>(&mut self, object: &K) -> Option<K>
    where
        K: Resource<DynamicType = ()> + serde::Serialize + DeserializeOwned,
    {
        let mut value = serde_json::to_value(object).unwrap();
        let branches =
            value.as_object()?.keys().filter(|key| !["apiVersion", "kind"].contains(&key.as_str()));
        let all: Vec<String> = branches.cloned().collect();
        let branch = all.get(self.below(all.len()))?;
        self.corrupt(value.get_mut(branch)?);
        let mut corrupted: K = serde_json::from_value(value).ok()?;
        let (meta, known) = (corrupted.meta_mut(), object.meta());
        meta.namespace.clone_from(&known.namespace);
        meta.name.clone_from(&known.name);
        meta.uid.clone_from(&known.uid);
        Some(corrupted)
    }

    /// Corrupts one of `list`, or adds a corrupted copy of one. Returns whether it did.
    pub fn spoil_one<K>(&mut self, list: &mut Vec<K>) -> bool
    where
        K: Resource<DynamicType = ()> + serde::Serialize + DeserializeOwned,
    {
        if list.is_empty() {
            return false;
        }
        let index = self.below(list.len());
        let Some(mut object) = self.corrupted(&list[index]) else { return false };
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

    pub fn spoil_option<K>(&mut self, object: &mut Option<K>) -> bool
    where
        K: Resource<DynamicType = ()> + serde::Serialize + DeserializeOwned,
    {
        let corrupted = object.as_ref().and_then(|known| self.corrupted(known));
        let is_spoiled = corrupted.is_some();
        *object = corrupted.or(object.take());
        is_spoiled
    }

    /// The deployment itself: its spec, annotations and status.
    fn spoil_owner(&mut self, owner: &mut MoEDeployment) -> bool {
        let mut noted = owner.clone();
        let annotations = noted.annotations_mut();
        annotations.entry(RESTARTED_AT.to_owned()).or_insert_with(|| "2026-01-01T00:00:00Z".to_owned());
        let Some(mut corrupted) = self.corrupted(&noted) else { return false };
        // As validated at its creation.
        corrupted.metadata.generation = owner.metadata.generation;
        *owner = corrupted;
        true
    }

    /// Makes up an arbitrary report of a main function.
    fn make_up_observation(&mut self, observation: &mut MainObservation) {
        let number = [0, 1, 7, MAX_GENERATION - 1, MAX_GENERATION, u64::MAX][self.below(6)];
        let address = ["10.0.0.1:9001", "10.0.0.2:9001", ":", "\u{0}"][self.below(4)];
        let time = [Timestamp::MAX, Timestamp::MIN, Timestamp::UNIX_EPOCH][self.below(3)];
        *observation = MainObservation {
            in_force: (self.below(3) > 0).then_some(number),
            placement: ["", "f00d", &"x".repeat(9000)][self.below(3)].to_owned(),
            last_outcome: match self.below(4) {
                0 => Some((number, GenerationOutcome::Failed("\u{7}".repeat(5000)))),
                1 => Some((number, GenerationOutcome::InForce { problems: vec!["é".repeat(900); 40] })),
                _ => None,
            },
            worked: (self.below(3) > 0).then(|| RemoteWorkReport {
                age: Duration::from_micros(number),
                computed: [(address.to_owned(), Duration::from_micros(u64::MAX))].into(),
            }),
            recently_used: [("g0".to_owned(), time), ("l1".to_owned(), time)].into(),
        };
    }

    /// Returns output of one-shot pods: correct, corrupted, or arbitrary.
    fn printed(&mut self, world: &World) -> String {
        let facts = serde_json::to_value(&world.facts).unwrap();
        let profile = serde_json::to_value(Profile::prior(&world.facts.inspection, "bfloat16")).unwrap();
        let mut said = [facts, profile][self.below(2)].clone();
        self.corrupt(&mut said);
        match self.below(8) {
            0 => "{".repeat(9000),
            1 => String::new(),
            2 => format!("{{}}\n{said}\n{{\u{0}"),
            _ => said.to_string(),
        }
    }

    /// Corrupts one object or one report. Returns whether the API would accept it.
    pub fn spoil_world(&mut self, world: &mut World) -> bool {
        let printed = self.printed(world);
        let existing = &mut world.observed;
        match self.below(22) {
            0..=4 => self.spoil_one(&mut existing.pods),
            5 => self.spoil_one(&mut existing.services),
            6 => self.spoil_one(&mut existing.network_policies),
            7 => self.spoil_one(&mut existing.budgets),
            8 | 9 => self.spoil_one(&mut existing.plans),
            10 => self.spoil_option(&mut existing.model),
            11 | 12 => self.spoil_option(&mut existing.routing),
            13 => existing.details.profiles.values_mut().any(|profile| self.spoil_option(profile)),
            14 => existing.details.maps.values_mut().any(|map| self.spoil_option(map)),
            15..=17 => self.spoil_option(&mut existing.demand),
            18 | 19 => self.spoil_owner(&mut world.owner),
            20 => {
                world.printed = Some(printed);
                // They are polled.
                existing.model = None;
                existing.details.profiles.values_mut().for_each(|profile| *profile = None);
                true
            }
            _ => {
                let uids: Vec<String> = existing.pods.iter().filter_map(ResourceExt::uid).collect();
                let Some(uid) = uids.get(self.below(uids.len())) else { return false };
                self.make_up_observation(existing.main_observations.entry(uid.clone()).or_default());
                true
            }
        }
    }
}

/// Index of the tenant whose functions may sleep. The next one is the same tenant with functions that always run.
pub const SLEEPING: usize = 3;

/// Returns settled deployments of tenants that contain every kind of object.
pub fn tenants() -> Vec<World> {
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
        let now = MicroTime(sleeping.observed.now);
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
    proposed.observed.details.maps.insert(FIGURES.to_owned(), Some(map));
    // Nothing runs before a user accepts the proposed plan.
    for _ in 0..6 {
        let (_, diff) = proposed.reconcile();
        proposed.write(&diff, usize::MAX);
        proposed.run();
    }
    proposed.owner.spec.accepted_plan =
        proposed.observed.plans[0].name_any().strip_prefix("demo-").map(str::to_owned);
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

/// Drops objects that the operator would not read: those with other labels, and foreign records and plans.
pub fn as_read(world: &mut World) {
    fn listed<K: Resource>(object: &K) -> bool {
        label(object.meta(), DEPLOYMENT) == "demo"
    }
    fn ours<K: Resource>(object: &K) -> bool {
        object.owner_references().iter().any(|owner| owner.controller == Some(true) && owner.uid == "uid-1")
    }
    let existing = &mut world.observed;
    existing.pods.retain(listed);
    existing.services.retain(listed);
    existing.network_policies.retain(listed);
    existing.budgets.retain(listed);
    existing.plans.retain(|plan| listed(plan) && ours(plan));
    let read = |record: &MoERecord| listed(record) && ours(record);
    existing.model = existing.model.take().filter(read);
    existing.routing = existing.routing.take().filter(read);
}

fn newest(observed: &Observed) -> u64 {
    observed.routing.as_ref().map(RoutingTable::from_record).unwrap_or_default().newest()
}

/// Checks that the object belongs to the deployment, by its name and as it was read.
fn check_kept<K: Resource<DynamicType = ()>>(keep: &DesiredObject<K>) {
    let name = keep.wanted.name_any();
    let is_ours = |owner: &OwnerReference| owner.controller == Some(true) && owner.uid == "uid-1";
    assert!(name == "demo" || name.starts_with("demo-"), "{name}");
    assert_eq!(keep.wanted.namespace().as_deref(), Some("test"), "{name}");
    assert!(keep.wanted.owner_references().iter().all(is_ours), "{name}");
    assert!(keep.live.iter().all(|live| live.owner_references().iter().any(is_ours)), "{name}");
}

/// Checks that all writes concern only the deployment's own objects, and that only its own pods are polled.
pub fn check(world: &World, diff: &Diff, stated: &MoEDeploymentStatus) {
    let observed = &world.observed;
    let mut created = BTreeSet::new();
    for write in &diff.writes {
        match write {
            Write::Service(keep) => check_kept(keep),
            Write::Policy(keep) => check_kept(keep),
            Write::Budget(keep) => check_kept(keep),
            Write::Facts(keep) => check_kept(keep),
            Write::Demand(keep) => check_kept(keep),
            Write::Delete(deletion) => {
                let meant =
                    observed.pods.iter().find(|pod| pod.uid().as_ref() == Some(&deletion.uid)).unwrap();
                assert!(is_owned_by(meant, "uid-1"), "{deletion:?}");
            }
            Write::Relabel { live, .. } => {
                assert!(is_owned_by(live.as_ref(), "uid-1"), "{}", live.name_any())
            }
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
                check_kept(keep);
                let table = RoutingTable::from_record(&keep.wanted);
                // Beyond that, numbering starts over.
                assert!(!table.corrupted || newest(observed) == MAX_GENERATION - 2, "{table:?}");
            }
            Write::Plan(plan) => assert!(plan.name_any().starts_with("demo-"), "{}", plan.name_any()),
            Write::DeletePlan(name, _) => {
                assert!(observed.plans.iter().any(|plan| plan.name_any() == *name), "{name}");
            }
            // Objects shared by several deployments, or that existed before.
            Write::Profile(record) | Write::Share(record) => {
                assert!(record.name_any().starts_with("remoe-profile-"), "{}", record.name_any());
            }
            Write::ForgetGateways(demand) => assert_eq!(demand.uid(), world.demand().uid()),
        }
    }
    for polled_main in &diff.polled_mains {
        let pod = observed.pods.iter().find(|pod| pod.uid().as_ref() == Some(&polled_main.uid)).unwrap();
        assert!(is_owned_by(pod, "uid-1"), "{polled_main:?}");
    }
    for condition in &stated.conditions {
        assert!(condition.message.chars().count() <= MESSAGE, "{}", condition.message);
    }
}

/// Checks that another tenant's deployment, which loses `lost`, is healed despite pods of `foreign` under its labels.
pub fn is_healed(neighbour: &World, lost: usize, foreign: &[Pod], others: OtherDeployments) {
    let mut world = neighbour.clone();
    world.soft_state.others = others;
    let lost = world.observed.pods.remove(lost);
    let place = |pod: &Pod| PodName::parse(&pod.name_any()).unwrap().place;
    let mut next = PodName::parse(&lost.name_any()).unwrap().incarnation;
    let ours: Vec<Pod> = world.observed.pods.clone();
    for (index, stolen) in foreign.iter().enumerate().filter(|(_, pod)| !is_owned_by(*pod, "uid-2")) {
        let mut stolen = stolen.clone();
        // Names of new objects, labels of existing ones.
        next += 1;
        stolen.metadata.name = Some(format!("{}-{next}", place(&lost)));
        stolen.metadata.uid = Some(format!("stolen-{index}"));
        stolen.metadata.labels.clone_from(&ours[index % ours.len()].metadata.labels);
        world.observed.pods.push(stolen);
    }
    let before = world.observed.pods.clone();
    let (_, diff, stated) = world.look_and_state();
    let made = diff.writes.iter().filter_map(|write| match write {
        Write::Create(creation) => Some(place(&creation.pod)),
        _ => None,
    });
    assert_eq!(made.collect::<Vec<_>>(), [place(&lost)], "{:?}", stated.conditions);
    for write in &diff.writes {
        let uid = match write {
            Write::Delete(deletion) => &deletion.uid,
            Write::Relabel { live, .. } => live.metadata.uid.as_ref().unwrap(),
            _ => continue,
        };
        let meant = before.iter().find(|pod| pod.uid().as_ref() == Some(uid)).unwrap();
        assert!(is_owned_by(meant, "uid-2"), "{}", meant.name_any());
    }
}
