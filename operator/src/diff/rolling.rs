//! Pods and routing, one step further.

use super::{Diff, DiffInput, LATER};
use crate::drift::is_as;
use crate::events::ClusterEvent;
use crate::main_client::{GenerationOutcome, RoutingOrder};
use crate::main_pollers::PolledMain;
use crate::manifests::{Function, Revision, find_plan};
use crate::names::Component;
use crate::ownership::is_owned_by;
use crate::planning::account;
use crate::pods::PodView;
use crate::rollout::{self, desired_generations, step};
use crate::routing::{Generation, RoutingTable};
use crate::status_issue::StatusIssue;
use crate::usage;
use crate::write::{STARTED, Write};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use remoe_autoscale::scale_to_zero::ScalingPhase;
use remoe_rollout::need::{self, ReplicaNeed};
use std::collections::BTreeMap;
use std::sync::Arc;

impl Diff {
    /// Brings the revision about that is to run, and tells main functions of it.
    pub(super) fn roll(&mut self, scene: DiffInput<'_>) -> Result<(), serde_json::Error> {
        let table = scene.table();
        self.report(scene, &table);
        if scene.scaled.demanded.phase == ScalingPhase::Asleep {
            return self.sleep(scene, table);
        }
        let Some(target) = &scene.manifests.target else {
            self.speak(scene, &table);
            return Ok(());
        };
        self.budgets(scene);
        if self.waits {
            self.speak(scene, &table);
            self.requeue_within(LATER);
            return Ok(());
        }
        let name = scene.inputs.owner.name_any();
        let rollout = step(rollout::RolloutInput {
            deployment: &name,
            target: &target.revision,
            strategy: scene.inputs.owner.spec.strategy(),
            main_certificate_ready: scene.inputs.main_certificate_ready,
            table: &table,
            pods: &scene.scaled.pods,
            others: scene.inputs.soft_state.others,
            now: scene.inputs.observed.now,
        })?;
        let held = scene.planned.remote_waits;
        let remote = |creation: &rollout::Creation| creation.function != rollout::MAIN_FUNCTION;
        let (waiting, create): (Vec<_>, Vec<_>) =
            rollout.create.into_iter().partition(|creation| held.is_some() && remote(creation));
        self.start(scene, &target.revision, &create);
        if let Some(time) = held.filter(|_| !waiting.is_empty()) {
            self.requeue_within(time);
        }
        self.writes.extend(rollout.delete.into_iter().map(Write::Delete));
        self.relabel(scene, &target.revision);
        self.issues.extend(rollout.held);
        let table = rollout.table.unwrap_or(table);
        // Written before anybody is told: a number means one thing only, whatever happens next. What was
        // spoiled stays until it is known what to write instead.
        if !table.corrupted
            && (!table.entries.is_empty() || scene.inputs.observed.has_routing(scene.inputs.owner))
        {
            let there: Vec<_> = scene.inputs.observed.routing.iter().cloned().collect();
            self.keep(scene, table.record(scene.inputs.owner), &there, Write::Routing);
        }
        self.speak(scene, &table);
        if let Some(at) = rollout.requeue_after {
            self.requeue_at(at, scene.inputs.observed.now);
        }
        if !rollout.settled {
            self.requeue_within(LATER);
        }
        if let Some(after) = scene.scaled.groups.requeue_after {
            self.requeue_within(after);
        }
        self.settled = rollout.settled;
        Ok(())
    }

    /// Disruption budgets; those of functions that need none any more go.
    fn budgets(&mut self, scene: DiffInput<'_>) {
        let wanted = scene.manifests.budgets.clone();
        let there = &scene.inputs.observed.budgets;
        let is_over = |name: &String| wanted.iter().all(|budget| budget.name_any() != *name);
        let ours = there.iter().filter(|live| is_owned_by(*live, &scene.uid()));
        let over = ours.map(|live| (live.name_any(), live.uid().unwrap_or_default()));
        let over: Vec<Write> = over
            .filter(|(name, _)| is_over(name))
            .map(|(name, uid)| Write::DeleteBudget(name, uid))
            .collect();
        for budget in wanted {
            self.keep(scene, budget, there, Write::Budget);
        }
        self.writes.extend(over);
    }

    fn start(&mut self, scene: DiffInput<'_>, revision: &Revision, creations: &[rollout::Creation]) {
        let functions: Vec<_> = revision.functions().collect();
        for creation in in_order_of_need(scene, &functions, creations) {
            let Some(function) = functions.get(creation.function) else { continue };
            let pod = function.pod(scene.inputs.owner, creation.replica, creation.incarnation);
            let component = if function.hosted.is_some() { Component::RemoteExpert } else { Component::Main };
            let name = pod.name_any();
            let started = ClusterEvent::normal("FunctionsStarted", format!("{STARTED}{name}"));
            self.create(pod, component, started);
            if let Some(fault) = &creation.replaces {
                let note = format!("Pod {name} replaces a failed pod: {}: {}", fault.reason, fault.message);
                self.say(ClusterEvent::warning("FunctionReplaced", note));
            }
        }
    }

    /// Restores the labels of the revision's pods that another writer removed or changed.
    fn relabel(&mut self, scene: DiffInput<'_>, revision: &Revision) {
        let (name, uid) = (scene.inputs.owner.name_any(), scene.uid());
        for live in &scene.inputs.observed.pods {
            let view = PodView::of(live, &uid, scene.inputs.observed.now);
            let Some(view) = view.filter(|view| view.owned && view.ends_by.is_none()) else { continue };
            let function = revision.functions().find(|function| {
                (0..function.most()).any(|replica| view.name.place == function.place(&name, replica))
            });
            let wanted = function
                .map(|function| function.pod(scene.inputs.owner, view.replica, view.name.incarnation));
            let Some(wanted) = wanted else { continue };
            if !is_as(live, &Pod { metadata: wanted.metadata.clone(), ..Pod::default() }) {
                self.writes.push(Write::Relabel { live: Box::new(live.clone()), wanted: Box::new(wanted) });
            }
        }
    }

    /// Main functions are asked what they have in force, and told what they are to have.
    fn speak(&mut self, scene: DiffInput<'_>, table: &RoutingTable) {
        let told: BTreeMap<&String, Arc<RoutingOrder>> = table
            .entries
            .iter()
            .map(|(identity, generation)| (identity, Arc::new(order(scene, generation))))
            .collect();
        let polled_mains = desired_generations(table, &scene.scaled.pods).filter_map(|(pod, generation)| {
            // What is not written yet, because it is not known what to write, is not told.
            let order =
                generation.filter(|_| !table.corrupted).and_then(|_| told.get(&pod.identity).cloned());
            let watched = scene.scaled.groups.watched.clone();
            Some(PolledMain { uid: pod.uid.clone(), ip: pod.ip?, order, starting: pod.starting, watched })
        });
        self.polled_mains = polled_mains.collect();
    }

    /// Reports how main functions took their orders, as events and troubles.
    fn report(&mut self, scene: DiffInput<'_>, table: &RoutingTable) {
        let mut said = Vec::new();
        for (pod, generation) in desired_generations(table, &scene.scaled.pods) {
            let observation = scene.inputs.observed.main_observations.get(&pod.uid);
            let Some((number, outcome)) =
                observation.and_then(|observation| observation.last_outcome.as_ref())
            else {
                continue;
            };
            match outcome {
                GenerationOutcome::InForce { problems } if problems.is_empty() => {
                    let note = format!("Routing generation {number} is in force in pod {}.", pod.name);
                    said.push(ClusterEvent::normal("RoutingInForce", note));
                }
                GenerationOutcome::InForce { problems } => {
                    let note = format!(
                        "Routing generation {number} in pod {} has unusable remote functions: {}",
                        pod.name,
                        problems.join("; ")
                    );
                    said.push(ClusterEvent::warning("RoutingProblem", note));
                }
                // How long nothing changes is what the status watches.
                GenerationOutcome::Underway => {}
                GenerationOutcome::Failed(message) => {
                    let stands = generation.is_some_and(|generation| generation.number == *number);
                    if stands && pod.in_force < Some(*number) {
                        let message =
                            format!("{}: routing generation {number} is not in force: {message}", pod.name);
                        self.issues.push(StatusIssue::new("RoutingFailed", message));
                    }
                }
            }
        }
        said.into_iter().for_each(|event| self.say(event));
    }
}

/// `creations` with those first that requests need most: the API server gets them in this order, and where nodes have little
/// room the scheduler gives it to those that came first. Main functions come before remote ones; where nothing is known of
/// requests, remote ones as the plan lists them.
fn in_order_of_need<'a>(
    scene: DiffInput<'_>,
    functions: &[&Function],
    creations: &'a [rollout::Creation],
) -> Vec<&'a rollout::Creation> {
    let mut ordered: Vec<&rollout::Creation> = creations.iter().collect();
    let model = scene.resolved.model.facts().map(|facts| &facts.inspection);
    let plan = scene.manifests.target.as_ref().map(|target| &target.plan);
    let expected = model.and_then(|model| {
        Some((model, usage::expected(scene.inputs.owner, scene.inputs.observed, model, plan?)?))
    });
    let Some((model, shares)) = expected else { return ordered };
    let layers: Vec<u32> =
        model.moe_layers.iter().map(|layer| u32::try_from(*layer).unwrap_or(u32::MAX)).collect();
    let usage = shares.to_rows();
    let need = |creation: &rollout::Creation| {
        let function = functions.get(creation.function)?;
        let work = need::work(function.hosted.as_ref()?.sets(), &layers, &usage);
        Some(ReplicaNeed { replica: creation.replica, work, name: &function.name })
    };
    ordered.sort_by(|one, other| match (need(one), need(other)) {
        (Some(one), Some(other)) => one.order(&other),
        (one, other) => one.is_some().cmp(&other.is_some()),
    });
    ordered
}

/// Returns a generation as main functions are told it, with what they are to expect of requests. That follows from the
/// plan alone, which never changes: a generation is the same whenever it is told. If the plan says nothing about it, or
/// something invalid, requests are served without.
fn order(scene: DiffInput<'_>, generation: &Generation) -> RoutingOrder {
    let plans = scene.inputs.observed.plans.iter().chain(&scene.planned.new);
    let plan = find_plan(scene.inputs.owner, plans, &generation.plan);
    let account = plan.and_then(|plan| account(&plan.spec).ok().flatten()).unwrap_or_default();
    let routing = generation.routing(account).map_err(|error| error.to_string());
    RoutingOrder { number: generation.number, routing }
}
