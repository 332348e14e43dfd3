//! Cluster in memory for whole reconciles: nodes that work, an inspector, a profiler and main functions that answer.

use crate::decide::{Decided, decide};
use crate::diff::Diff;
use crate::facts::ModelFacts;
use crate::fleet::FunctionCounts;
use crate::inputs::Inputs;
use crate::main_pollers::MainObservation;
use crate::manifests::OperatorEnvironment;
use crate::missing_inputs::{MissingInput, missing_input};
use crate::names::{COMPONENT, Component, label};
use crate::observed::Observed;
use crate::plan::{PlanStage, Planner, SearchRequest};
use crate::planning_pool::{PlanProgress, SearchKind, WakePlan};
use crate::routing::RoutingTable;
use crate::scale::Groups;
use crate::soft_state::{SoftStateUpdate, SoftStateView};
use crate::status::{StatusInputs, status};
use crate::testing::example::{deployment, environment, facts, gateway_service};
use crate::testing::solutions;
use crate::write::{DesiredObject, Write};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::ObjectMeta;
use kube::{Resource, ResourceExt};
use remoe_api::{GatewayDemand, MoEDemand, MoEDeployment, MoEDeploymentStatus, MoERecord, ModelStatus};
use remoe_hardware::Profile;
use remoe_planner::{Budget, PlanChange};
use remoe_proto::placement_digest;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Maximum reconciles.
const ENOUGH: usize = 60;

#[derive(Clone)]
pub struct World {
    pub owner: MoEDeployment,
    pub observed: Observed,
    pub environment: OperatorEnvironment,
    /// Facts that an inspector finds.
    pub facts: ModelFacts,
    /// Output of inspectors and profilers that other programs forged.
    pub printed: Option<String>,
    /// Prefix of the addresses of pods.
    pub network: &'static str,
    /// Soft state of the operator.
    pub soft_state: SoftStateView,
    /// Function counts of the last reconcile.
    pub function_counts: FunctionCounts,
    /// State of sleeping remote functions after the last reconcile.
    pub groups: Groups,
    /// Planner.
    pub planner: Immediate,
    /// Stale objects that the next reconcile sees instead of the current ones.
    pub stale: Option<Observed>,
    /// Set if a reconcile saw stale lists.
    stale_seen: bool,
    uids: u32,
}

/// Planner that makes plans immediately, unless it is slow.
#[derive(Clone, Default)]
pub struct Immediate {
    /// Set to delay plans for wakes until they are completed explicitly.
    pub slow: Option<Duration>,
    pub(crate) wake: Option<WakePlan>,
    pub(crate) asked: Option<(u64, crate::planning_pool::PlanOutcome)>,
    /// Changes made by plans for answered requests, in order.
    pub changes: Vec<PlanChange>,
}

impl Immediate {
    /// Completes the plan for the wake.
    pub fn arrive(&mut self) {
        let (wake, outcome) = self.asked.take().unwrap();
        let elapsed = self.slow.unwrap_or_default();
        self.wake = Some(WakePlan { wake, progress: PlanProgress::Done { outcome, elapsed } });
    }
}

impl Immediate {
    /// Sets the time for which the wake's plan has been awaited.
    pub fn wait(&mut self, elapsed: Duration) {
        if let Some(wake) = &mut self.wake {
            wake.progress = PlanProgress::Underway { elapsed };
        }
    }
}

impl Planner for Immediate {
    fn request(&mut self, kind: SearchKind, id: &str, question: SearchRequest) -> PlanProgress {
        if let SearchRequest::Improve { planning, plan } = &question {
            self.changes.extend(planning.change(plan));
        }
        let outcome = match question {
            SearchRequest::Solve { planning, previous } => {
                solutions::solve(&planning, previous.as_deref()).map(|plan| Some(Box::new(plan)))
            }
            question => question.carry_out(Budget::UNLIMITED),
        };
        if kind == SearchKind::Full {
            return PlanProgress::Done { outcome, elapsed: Duration::ZERO };
        }
        let wake = id.parse().unwrap();
        if let Some(known) = self.wake.as_ref().filter(|known| known.wake == wake) {
            return known.progress.clone();
        }
        let progress = match self.slow {
            Some(_) => {
                self.asked = Some((wake, outcome));
                PlanProgress::Underway { elapsed: Duration::ZERO }
            }
            None => PlanProgress::Done { outcome, elapsed: Duration::ZERO },
        };
        self.wake = Some(WakePlan { wake, progress: progress.clone() });
        progress
    }

    fn wake(&self) -> Option<WakePlan> {
        self.wake.clone()
    }

    fn forget(&mut self, _lane: SearchKind) {}
}

/// Fault of a write to the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteFault {
    /// 409, 429 or 500: the write is not made.
    Refused,
    /// 504: the write is made, but the answer is lost.
    Lost,
}

impl World {
    pub fn new(spec: Value) -> Self {
        let observed = Observed { now: "2026-01-01T00:00:00Z".parse().unwrap(), ..Observed::default() };
        Self {
            owner: deployment(spec),
            observed,
            environment: environment(),
            facts: facts(),
            printed: None,
            network: "10.0.0.",
            soft_state: SoftStateView { has_rollout_turn: true, ..SoftStateView::default() },
            function_counts: FunctionCounts::default(),
            groups: Groups::default(),
            planner: Immediate::default(),
            stale: None,
            stale_seen: false,
            uids: 0,
        }
    }

    /// Returns a world whose operator has gateways.
    pub fn with_gateways(spec: Value, gateways: &[&str]) -> Self {
        let mut world = Self::new(spec);
        world.environment.gateway = Some(gateway_service("gateway"));
        world.observed.gateways = gateways.iter().map(|uid| (*uid).to_owned()).collect();
        world.observed.since = world.observed.now;
        world
    }

    /// Returns the demand object.
    pub fn demand(&self) -> &MoEDemand {
        self.observed.demand.as_ref().unwrap()
    }

    /// Writes the entry of a gateway.
    pub fn say(&mut self, entry: GatewayDemand) {
        self.uids += 1;
        let demand = self.observed.demand.as_mut().unwrap();
        demand.metadata.resource_version = Some(self.uids.to_string());
        let gateways = &mut demand.status.get_or_insert_default().gateways;
        gateways.retain(|known| known.uid != entry.uid);
        gateways.push(entry);
    }

    /// Returns the decisions of one reconcile.
    pub fn reconcile(&mut self) -> (PlanStage, Diff) {
        let (planned, diff, _) = self.look_and_state();
        (planned, diff)
    }

    /// Returns the decisions of one reconcile, and its status.
    pub fn look_and_state(&mut self) -> (PlanStage, Diff, MoEDeploymentStatus) {
        self.stale_seen |= self.stale.is_some();
        let owner = &self.environment.policy.priced(&self.owner).into_owned();
        let mut observed = self.stale.take().unwrap_or_else(|| self.observed.clone());
        observed.details.profiles.clear();
        observed.details.maps.clear();
        observed.details.logs.clear();
        while let Some(read) = missing_input(owner, observed.records()).unwrap() {
            match read {
                MissingInput::Log(pod) => observed.details.logs.insert(pod.clone(), self.log(&pod)).map(drop),
                MissingInput::Profile(name) => {
                    let record = self.observed.details.profiles.get(&name).cloned().flatten();
                    observed.details.profiles.insert(name, record).map(drop)
                }
                MissingInput::Map(name) => {
                    let map = self.observed.details.maps.get(&name).cloned().flatten();
                    observed.details.maps.insert(name, map).map(drop)
                }
            };
        }
        let inputs = Inputs {
            owner,
            repriced: owner.spec.pricing != self.owner.spec.pricing,
            environment: &self.environment,
            observed: &observed,
            soft_state: &self.soft_state,
            main_certificate_ready: true,
        };
        let decided = decide(inputs, &mut self.planner).unwrap();
        let stated = status(&StatusInputs::collect(inputs, &decided, Vec::new()));
        let SoftStateUpdate { load, cooldown, function_counts, .. } = decided.soft_state_update();
        let Decided { planned, scaled, manifests, diff, .. } = decided;
        self.soft_state = SoftStateView { load, cooldown, ..self.soft_state.clone() };
        (self.function_counts, self.groups) = (function_counts, scaled.groups);
        // Returns its functions at their scale.
        (PlanStage { target: manifests.target, ..planned }, diff, stated)
    }

    /// Returns the log of a completed pod.
    fn log(&self, pod: &str) -> Result<String, String> {
        if let Some(printed) = &self.printed {
            return Ok(printed.clone());
        }
        let found = self.observed.pods.iter().find(|known| known.name_any() == pod);
        let pod = found.ok_or_else(|| format!("pod {pod} is gone"))?;
        Ok(if label(&pod.metadata, COMPONENT) == Component::Inspector.name() {
            serde_json::to_string(&self.facts).unwrap()
        } else {
            serde_json::to_string(&Profile::prior(&self.facts.inspection, "bfloat16")).unwrap()
        })
    }

    /// Makes the first `most` writes; then the operator is killed. Returns the number of writes.
    pub fn write(&mut self, diff: &Diff, most: usize) -> usize {
        self.write_as(diff, most, |_| None)
    }

    /// Makes writes with faults from `answer`; see [`Self::write`]. Writes after one that fails, or seems to fail,
    /// are left for the next reconcile.
    pub fn write_as(
        &mut self,
        diff: &Diff,
        most: usize,
        mut answer: impl FnMut(&Write) -> Option<WriteFault>,
    ) -> usize {
        let mut count = 0;
        for write in diff.writes.iter().take(most) {
            let answer = answer(write);
            if answer == Some(WriteFault::Refused) || !self.store(write) || answer == Some(WriteFault::Lost) {
                return count.max(1);
            }
            count += 1;
        }
        if count == diff.writes.len() {
            for polled_main in &diff.polled_mains {
                let observation = self.observed.main_observations.entry(polled_main.uid.clone()).or_default();
                observation.in_force.get_or_insert(0);
                let newer =
                    polled_main.order.as_ref().filter(|order| observation.in_force < Some(order.number));
                if let Some(order) = newer {
                    let placement = placement_digest(order.routing.as_ref().unwrap());
                    *observation = MainObservation {
                        in_force: Some(order.number),
                        placement,
                        ..MainObservation::default()
                    };
                }
            }
        }
        count
    }

    /// Makes one write. Returns false if the object changed since it was read.
    fn store(&mut self, write: &Write) -> bool {
        self.uids += 1;
        let uid = format!("object-{}", self.uids);
        let now = self.observed.now;
        let observed = &mut self.observed;
        match write {
            Write::Service(keep) => put(&mut observed.services, keep, uid),
            Write::Policy(keep) => put(&mut observed.network_policies, keep, uid),
            Write::Budget(keep) => put(&mut observed.budgets, keep, uid),
            Write::Facts(keep) => observed.model = Some(keep.wanted.as_ref().clone()),
            Write::Routing(DesiredObject { wanted, live }) => {
                let version = |record: &MoERecord| record.metadata.resource_version.clone();
                if observed.routing.as_ref().map(version) != live.as_deref().map(version) {
                    return false;
                }
                let mut record = wanted.as_ref().clone();
                record.metadata.resource_version = Some(uid);
                observed.routing = Some(record);
            }
            Write::Demand(DesiredObject { wanted, live }) => {
                let version = |demand: &MoEDemand| demand.metadata.resource_version.clone();
                if observed.demand.as_ref().map(version) != live.as_deref().map(version) {
                    return false;
                }
                let mut demand = wanted.as_ref().clone();
                demand.metadata.resource_version = Some(uid.clone());
                demand.metadata.uid = Some(uid);
                demand.status = observed.demand.take().and_then(|before| before.status);
                observed.demand = Some(demand);
            }
            Write::ForgetGateways(left) => {
                if left.metadata.resource_version
                    != observed.demand.as_ref().unwrap().metadata.resource_version
                {
                    return false;
                }
                let mut demand = left.as_ref().clone();
                demand.metadata.resource_version = Some(uid);
                observed.demand = Some(demand);
            }
            // Plans are named by their content: it is equal.
            Write::Plan(plan) if observed.plans.iter().any(|known| known.name_any() == plan.name_any()) => {}
            Write::Plan(plan) => {
                let mut plan = plan.as_ref().clone();
                plan.metadata.creation_timestamp =
                    Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now));
                observed.plans.push(plan);
            }
            Write::Profile(record) | Write::Share(record) => {
                observed.details.profiles.insert(record.name_any(), Some(record.as_ref().clone()));
            }
            Write::Create(creation) => {
                let mut pod = creation.pod.as_ref().clone();
                let taken = observed.pods.iter_mut().find(|known| known.name_any() == pod.name_any());
                if let Some(taken) = taken {
                    // Only an operator with stale lists creates an existing pod. Its labels are restored.
                    assert!(self.stale_seen, "a name is taken");
                    taken.metadata.labels.clone_from(&pod.metadata.labels);
                    return true;
                }
                pod.metadata.uid = Some(uid);
                pod.metadata.creation_timestamp =
                    Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now));
                observed.pods.push(pod);
            }
            Write::Relabel { live, wanted } => {
                let Some(pod) = observed.pods.iter_mut().find(|pod| pod.uid() == live.uid()) else {
                    return false;
                };
                pod.metadata.labels.clone_from(&wanted.metadata.labels);
            }
            Write::Delete(deletion) => observed.pods.retain(|pod| pod.uid().as_ref() != Some(&deletion.uid)),
            Write::DeleteBudget(_, uid) => {
                observed.budgets.retain(|budget| budget.uid().as_ref() != Some(uid))
            }
            Write::DeletePlan(name, _) => observed.plans.retain(|plan| plan.name_any() != *name),
        }
        true
    }

    /// Lets nodes work for one second.
    pub fn run(&mut self) {
        self.observed.now = self.observed.now.checked_add(SignedDuration::from_secs(1)).unwrap();
        let now = self.observed.now;
        for (index, pod) in self.observed.pods.iter_mut().enumerate() {
            let component = label(&pod.metadata, COMPONENT).to_owned();
            let is_main = component == Component::Main.name();
            let in_force = pod.uid().and_then(|uid| self.observed.main_observations.get(&uid)?.in_force);
            if is_main || component == Component::RemoteExpert.name() {
                serve(pod, format!("{}{}", self.network, index + 1), !is_main || in_force > Some(0), now);
            } else {
                pod.status = serde_json::from_value(json!({"phase": "Succeeded"})).unwrap();
            }
        }
    }

    /// Reconciles until the deployment is settled. Returns the number of writes.
    pub fn settle(&mut self) -> usize {
        let mut writes = 0;
        for _ in 0..ENOUGH {
            let (_, diff) = self.reconcile();
            writes += self.write(&diff, usize::MAX);
            if diff.settled && diff.writes.is_empty() {
                return writes;
            }
            self.run();
        }
        let (planned, diff) = self.reconcile();
        panic!(
            "not settled: {:?} {:?} {:?}, {:#?}",
            planned.state, diff.issues, self.observed.demand, diff.writes
        );
    }

    /// Converts all records to ConfigMaps of the previous release.
    pub fn keep_in_config_maps(&mut self) {
        let facts = self.observed.model.take().unwrap();
        let routing = self.observed.routing.take().unwrap();
        let running = RoutingTable::from_record(&routing);
        let (_, running) = running.entries.into_iter().max_by_key(|(_, entry)| entry.number).unwrap();
        let mut keep = |mut metadata: ObjectMeta, data: BTreeMap<String, String>| {
            metadata.resource_version = None;
            let name = metadata.name.clone().unwrap();
            let map = ConfigMap { metadata, data: Some(data), ..ConfigMap::default() };
            self.observed.details.maps.insert(name, Some(map));
        };
        for profile in std::mem::take(&mut self.observed.details.profiles).into_values().flatten() {
            keep(profile.metadata, [("profile.json".to_owned(), profile.spec.json.unwrap())].into());
        }
        let mut metadata = facts.metadata;
        let subject = facts.spec.subject.unwrap();
        metadata.labels.as_mut().unwrap().insert("remoe.dev/subject".to_owned(), subject);
        keep(metadata, [("model.json".to_owned(), facts.spec.json.unwrap())].into());
        let generations = routing.spec.generations.into_iter().map(|(identity, generation)| {
            (format!("{identity}.json"), serde_json::to_string(&generation).unwrap())
        });
        keep(routing.metadata, generations.collect());
        self.owner.status = Some(MoEDeploymentStatus {
            observed_generation: self.owner.metadata.generation,
            model: Some(ModelStatus {
                source: self.owner.spec.model.source.clone(),
                revision: None,
                digest: self.facts.inspection.fingerprint.clone(),
            }),
            plan: Some(running.plan),
            ..MoEDeploymentStatus::default()
        });
    }

    /// Returns all objects of the deployment, without values that differ between lifetimes.
    pub fn objects(&self) -> BTreeMap<String, Value> {
        fn of<K: Resource<DynamicType = ()> + serde::Serialize>(list: &[K]) -> Vec<Value> {
            let named = |object: &K| {
                let mut value = serde_json::to_value(object).unwrap();
                value["kind"] = json!(K::kind(&()));
                value
            };
            list.iter().map(named).collect()
        }
        let observed = &self.observed;
        let records: Vec<MoERecord> = observed
            .details
            .profiles
            .values()
            .chain([&observed.model, &observed.routing])
            .flatten()
            .cloned()
            .collect();
        let lists = [
            of(&observed.pods),
            of(&observed.services),
            of(&observed.network_policies),
            of(&observed.budgets),
        ];
        let objects = lists.into_iter().chain([of(&observed.plans), of(&records)]).flatten();
        // Incarnations, pod addresses, and growing numbers.
        let mut lives: Vec<(String, String)> = Vec::new();
        for pod in &observed.pods {
            let name = pod.name_any();
            let place = name.rsplit_once('-').map_or(name.as_str(), |(place, _)| place).to_owned();
            if let Some(ip) = pod.status.as_ref().and_then(|status| status.pod_ip.clone()) {
                lives.push((format!("\"{ip}:"), format!("\"{place}:")));
            }
            lives.push((format!("\"{name}\""), format!("\"{place}\"")));
        }
        let mut all = BTreeMap::new();
        for mut object in objects {
            object.as_object_mut().unwrap().remove("status");
            let metadata = object["metadata"].as_object_mut().unwrap();
            metadata.retain(|field, _| {
                !["uid", "resourceVersion", "creationTimestamp"].contains(&field.as_str())
            });
            if let Some(generations) = object["spec"]["generations"].as_object_mut() {
                generations.values_mut().for_each(|generation| generation["number"] = json!(0));
                object["spec"]["about"] = Value::Null;
            }
            let mut text = object.to_string();
            for (life, place) in &lives {
                text = text.replace(life, place);
            }
            let object: Value = serde_json::from_str(&text).unwrap();
            let name = format!(
                "{} {}",
                object["kind"].as_str().unwrap(),
                object["metadata"]["name"].as_str().unwrap()
            );
            assert!(all.insert(name, object).is_none(), "two of one name");
        }
        all
    }

    /// Returns the names of all objects, pods without incarnations.
    pub fn names(&self) -> BTreeSet<String> {
        fn of<K: Resource<DynamicType = ()>>(list: &[K]) -> Vec<String> {
            list.iter().map(|object| format!("{} {}", K::kind(&()), object.name_any())).collect()
        }
        let observed = &self.observed;
        let pods = observed.pods.iter().map(|pod| {
            let name = pod.name_any();
            format!("Pod {}", name.rsplit_once('-').map_or(name.as_str(), |(place, _)| place))
        });
        let records =
            observed.details.profiles.values().chain([&observed.model, &observed.routing]).flatten();
        let records = records.map(|record| format!("MoERecord {}", record.name_any()));
        let lists = [
            of(&observed.services),
            of(&observed.network_policies),
            of(&observed.budgets),
            of(&observed.plans),
        ];
        pods.chain(records).chain(lists.into_iter().flatten()).collect()
    }
}

fn put<K: Resource<DynamicType = ()> + Clone>(list: &mut Vec<K>, keep: &DesiredObject<K>, uid: String) {
    list.retain(|known| known.name_any() != keep.wanted.name_any());
    let mut object = keep.wanted.as_ref().clone();
    object.meta_mut().uid = Some(uid);
    list.push(object);
}

fn serve(pod: &mut Pod, ip: String, ready: bool, now: Timestamp) {
    let before = serde_json::to_value(&pod.status).unwrap();
    let now = json!(now.to_string());
    let status = if ready { "True" } else { "False" };
    let known = &before["conditions"][0];
    let since = if known["status"] == status { &known["lastTransitionTime"] } else { &now };
    let started = if before["startTime"].is_null() { &now } else { &before["startTime"] };
    let ready = json!({"type": "Ready", "status": status, "lastTransitionTime": since});
    let status = json!({"phase": "Running", "podIP": ip, "startTime": started, "conditions": [ready]});
    pod.status = serde_json::from_value(status).unwrap();
}
