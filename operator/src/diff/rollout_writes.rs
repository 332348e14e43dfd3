//! Writes of one rollout step: pods and routing.

use super::{Diff, DiffInput, PROGRESS_INTERVAL};
use crate::drift::is_up_to_date;
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
    /// Adds the writes of the next rollout step, and sets the main functions to poll.
    pub(super) fn write_rollout_step(&mut self, stages: DiffInput<'_>) -> Result<(), serde_json::Error> {
        let table = stages.table();
        self.report(stages, &table);
        if stages.scaled.demanded.phase == ScalingPhase::Asleep {
            return self.scale_to_zero(stages, table);
        }
        let Some(target) = &stages.manifests.target else {
            self.set_polled_mains(stages, &table);
            return Ok(());
        };
        self.budgets(stages);
        if self.awaits_turn {
            self.set_polled_mains(stages, &table);
            self.requeue_within(PROGRESS_INTERVAL);
            return Ok(());
        }
        let name = stages.inputs.owner.name_any();
        let rollout = step(rollout::RolloutInput {
            deployment: &name,
            target: &target.revision,
            strategy: stages.inputs.owner.spec.strategy(),
            main_certificate_ready: stages.inputs.main_certificate_ready,
            table: &table,
            pods: &stages.scaled.pods,
            others: stages.inputs.soft_state.others,
            now: stages.inputs.observed.now,
        })?;
        let remote_hold = stages.planned.remote_hold;
        let remote = |creation: &rollout::Creation| creation.function != rollout::MAIN_FUNCTION;
        let (waiting, create): (Vec<_>, Vec<_>) =
            rollout.create.into_iter().partition(|creation| remote_hold.is_some() && remote(creation));
        self.start(stages, &target.revision, &create);
        if let Some(time) = remote_hold.filter(|_| !waiting.is_empty()) {
            self.requeue_within(time);
        }
        self.writes.extend(rollout.delete.into_iter().map(Write::Delete));
        self.relabel(stages, &target.revision);
        self.issues.extend(rollout.paused);
        let table = rollout.table.unwrap_or(table);
        // The table is written before any main function is told, so that each number means one generation, whatever
        // happens next. A corrupted table stays until its replacement is known.
        if !table.corrupted
            && (!table.entries.is_empty() || stages.inputs.observed.has_routing(stages.inputs.owner))
        {
            let existing: Vec<_> = stages.inputs.observed.routing.iter().cloned().collect();
            self.write_if_changed(stages, table.record(stages.inputs.owner), &existing, Write::Routing);
        }
        self.set_polled_mains(stages, &table);
        if let Some(at) = rollout.requeue_after {
            self.requeue_at(at, stages.inputs.observed.now);
        }
        if !rollout.settled {
            self.requeue_within(PROGRESS_INTERVAL);
        }
        if let Some(after) = stages.scaled.groups.requeue_after {
            self.requeue_within(after);
        }
        self.settled = rollout.settled;
        Ok(())
    }

    /// Writes the disruption budgets, and deletes those that are no longer needed.
    fn budgets(&mut self, stages: DiffInput<'_>) {
        let wanted = stages.manifests.budgets.clone();
        let existing = &stages.inputs.observed.budgets;
        let is_over = |name: &String| wanted.iter().all(|budget| budget.name_any() != *name);
        let ours = existing.iter().filter(|live| is_owned_by(*live, &stages.uid()));
        let obsolete = ours.map(|live| (live.name_any(), live.uid().unwrap_or_default()));
        let obsolete: Vec<Write> = obsolete
            .filter(|(name, _)| is_over(name))
            .map(|(name, uid)| Write::DeleteBudget(name, uid))
            .collect();
        for budget in wanted {
            self.write_if_changed(stages, budget, existing, Write::Budget);
        }
        self.writes.extend(obsolete);
    }

    fn start(&mut self, stages: DiffInput<'_>, revision: &Revision, creations: &[rollout::Creation]) {
        let functions: Vec<_> = revision.functions().collect();
        for creation in sorted_by_need(stages, &functions, creations) {
            let Some(function) = functions.get(creation.function) else { continue };
            let pod = function.pod(stages.inputs.owner, creation.replica, creation.incarnation);
            let component = if function.hosted.is_some() { Component::RemoteExpert } else { Component::Main };
            let name = pod.name_any();
            let started = ClusterEvent::normal("FunctionsStarted", format!("{STARTED}{name}"));
            self.create(pod, component, started);
            if let Some(fault) = &creation.replaces {
                let note = format!("Pod {name} replaces a failed pod: {}: {}", fault.reason, fault.message);
                self.add_event(ClusterEvent::warning("FunctionReplaced", note));
            }
        }
    }

    /// Restores the labels of the revision's pods that another writer removed or changed.
    fn relabel(&mut self, stages: DiffInput<'_>, revision: &Revision) {
        let (name, uid) = (stages.inputs.owner.name_any(), stages.uid());
        for live in &stages.inputs.observed.pods {
            let view = PodView::from_pod(live, &uid, stages.inputs.observed.now);
            let Some(view) = view.filter(|view| view.owned && view.ends_by.is_none()) else { continue };
            let function = revision.functions().find(|function| {
                (0..function.total_replicas())
                    .any(|replica| view.name.place == function.place(&name, replica))
            });
            let wanted = function
                .map(|function| function.pod(stages.inputs.owner, view.replica, view.name.incarnation));
            let Some(wanted) = wanted else { continue };
            if !is_up_to_date(live, &Pod { metadata: wanted.metadata.clone(), ..Pod::default() }) {
                self.writes.push(Write::Relabel { live: Box::new(live.clone()), wanted: Box::new(wanted) });
            }
        }
    }

    /// Sets the main functions to poll, and the generation that each must have in force.
    fn set_polled_mains(&mut self, stages: DiffInput<'_>, table: &RoutingTable) {
        let orders: BTreeMap<&String, Arc<RoutingOrder>> = table
            .entries
            .iter()
            .map(|(identity, generation)| (identity, Arc::new(routing_order(stages, generation))))
            .collect();
        let polled_mains = desired_generations(table, &stages.scaled.pods).filter_map(|(pod, generation)| {
            // A generation that is not stored yet is not sent.
            let order =
                generation.filter(|_| !table.corrupted).and_then(|_| orders.get(&pod.identity).cloned());
            let watched = stages.scaled.groups.watched.clone();
            Some(PolledMain { uid: pod.uid.clone(), ip: pod.ip?, order, starting: pod.starting, watched })
        });
        self.polled_mains = polled_mains.collect();
    }

    /// Reports the outcome of sent generations as events and issues.
    fn report(&mut self, stages: DiffInput<'_>, table: &RoutingTable) {
        let mut events = Vec::new();
        for (pod, generation) in desired_generations(table, &stages.scaled.pods) {
            let observation = stages.inputs.observed.main_observations.get(&pod.uid);
            let Some((number, outcome)) =
                observation.and_then(|observation| observation.last_outcome.as_ref())
            else {
                continue;
            };
            match outcome {
                GenerationOutcome::InForce { problems } if problems.is_empty() => {
                    let note = format!("Routing generation {number} is in force in pod {}.", pod.name);
                    events.push(ClusterEvent::normal("RoutingInForce", note));
                }
                GenerationOutcome::InForce { problems } => {
                    let note = format!(
                        "Routing generation {number} in pod {} has unusable remote functions: {}",
                        pod.name,
                        problems.join("; ")
                    );
                    events.push(ClusterEvent::warning("RoutingProblem", note));
                }
                // The status watches the progress deadline.
                GenerationOutcome::Underway => {}
                GenerationOutcome::Failed(message) => {
                    let is_current = generation.is_some_and(|generation| generation.number == *number);
                    if is_current && pod.in_force < Some(*number) {
                        let message =
                            format!("{}: routing generation {number} is not in force: {message}", pod.name);
                        self.issues.push(StatusIssue::new("RoutingFailed", message));
                    }
                }
            }
        }
        events.into_iter().for_each(|event| self.add_event(event));
    }
}

/// Sorts `creations` by how much requests need them. The API server gets them in this order, and if nodes are short
/// of resources, the scheduler places the first ones. Main functions come before remote ones. Without known expert
/// usage, remote functions keep the order of the plan.
fn sorted_by_need<'a>(
    stages: DiffInput<'_>,
    functions: &[&Function],
    creations: &'a [rollout::Creation],
) -> Vec<&'a rollout::Creation> {
    let mut ordered: Vec<&rollout::Creation> = creations.iter().collect();
    let model = stages.resolved.model.facts().map(|facts| &facts.inspection);
    let plan = stages.manifests.target.as_ref().map(|target| &target.plan);
    let expected = model.and_then(|model| {
        Some((model, usage::expected(stages.inputs.owner, stages.inputs.observed, model, plan?)?))
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

/// Returns the order for a generation, with its account of the expected cost of requests. The account follows from
/// the immutable plan alone, so that a generation is the same whenever it is sent. If the plan has no valid account,
/// the order has none.
fn routing_order(stages: DiffInput<'_>, generation: &Generation) -> RoutingOrder {
    let plans = stages.inputs.observed.plans.iter().chain(&stages.planned.new);
    let plan = find_plan(stages.inputs.owner, plans, &generation.plan);
    let account = plan.and_then(|plan| account(&plan.spec).ok().flatten()).unwrap_or_default();
    let routing = generation.routing(account).map_err(|error| error.to_string());
    RoutingOrder { number: generation.number, routing }
}
