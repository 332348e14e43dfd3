//! Bringing about what was decided: pods, routing, and the plans that are kept.

use super::{LATER, ReconcileError, Run, SOON};
use crate::apply::Made;
use crate::build::{Revision, plan_name};
use crate::events::Happening;
use crate::mains::{self, Outcome};
use crate::planning::account;
use crate::pods::{PodView, Trouble};
use crate::rollout::{Scene, pushes, step};
use crate::routing::{Generation, RoutingTable};
use crate::status::PlanState;
use kube::ResourceExt;
use std::collections::{BTreeMap, BTreeSet};

impl Run<'_> {
    /// Pods and routing, one step further. Returns whether everything is as it is to be.
    pub(super) async fn roll(
        &mut self,
        revision: &Revision,
        table: &RoutingTable,
        pods: &[PodView],
    ) -> Result<bool, ReconcileError> {
        let name = self.owner.name_any();
        let steps = step(Scene { deployment: &name, target: revision, table, pods, now: self.now })?;
        let mut started = Vec::new();
        for made in self.applier.create(revision, &steps.create).await? {
            match made {
                Made::Created(pod) => started.push(pod),
                Made::Refused(trouble) => self.troubles.push(trouble),
            }
        }
        if !started.is_empty() {
            self.happenings.push(Happening::normal("FunctionsStarted", started.join(", ")));
        }
        let faults = steps.create.iter().filter_map(|creation| creation.instead_of.as_ref());
        for fault in faults {
            let note = format!("a function is replaced: {}: {}", fault.reason, fault.message);
            self.happenings.push(Happening::warning("FunctionReplaced", note));
        }
        self.applier.delete(&steps.delete).await?;
        self.relabel(revision).await?;
        let table = steps.table.as_ref().unwrap_or(table);
        self.troubles.extend(steps.held);
        // Written before anybody is told: a number means one thing only, whatever happens next. What was
        // spoiled stays until it is known what to write instead.
        if !table.spoiled && (!table.entries.is_empty() || self.there.routing.is_some()) {
            let trouble = self.applier.routing(table.config_map(self.owner)?, self.there.routing.as_ref());
            self.troubles.extend(trouble.await?);
        }
        let mut acted = steps.table.is_some();
        let due = pushes(table, pods);
        let accounts = self.accounts(&due);
        for told in mains::push(due, &accounts).await {
            acted = true;
            match told.outcome {
                Outcome::InForce { problems } if problems.is_empty() => {
                    let note = format!("generation {} is in force at {}", told.number, told.pod);
                    self.happenings.push(Happening::normal("RoutingInForce", note));
                }
                Outcome::InForce { problems } => {
                    let (number, pod) = (told.number, told.pod);
                    let note = format!("generation {number} at {pod}: {}", problems.join("; "));
                    self.happenings.push(Happening::warning("RoutingProblem", note));
                }
                // Asked again by the next run; how long nothing changes is what the status watches.
                Outcome::Underway => {}
                Outcome::Failed(message) => {
                    let message = format!("{}: generation {}: {message}", told.pod, told.number);
                    self.troubles.push(Trouble::new("RoutingFailed", message));
                }
            }
        }
        if let Some(at) = steps.look_again {
            self.look_at(at);
        }
        if !steps.settled {
            let up = pods.iter().any(|pod| pod.is_main && pod.ip.is_some() && !pod.ready);
            self.look_soon(if acted || up { SOON } else { LATER });
        }
        Ok(steps.settled)
    }

    /// What main functions that are told of generations are told to expect of requests, by plan. It follows
    /// from the plan alone, which never changes: a generation is the same whenever it is told. Where a plan
    /// says nothing about it, or something that cannot be, requests are served without.
    fn accounts(&self, due: &[(&PodView, &Generation)]) -> BTreeMap<String, String> {
        let plans: BTreeSet<&String> = due.iter().map(|(_, generation)| &generation.plan).collect();
        let known = plans.into_iter().filter_map(|hash| {
            let account = account(&self.find(hash)?.spec).ok().flatten()?;
            Some((hash.clone(), account))
        });
        known.collect()
    }

    /// Gives the pods of the revision the labels back that somebody took or changed.
    async fn relabel(&self, revision: &Revision) -> Result<(), ReconcileError> {
        let uid = self.owner.uid().unwrap_or_default();
        for live in &self.there.pods {
            let Some(view) = PodView::of(live, &uid, self.now).filter(|view| view.owned) else { continue };
            let name = self.owner.name_any();
            let function = revision.functions().find(|function| {
                (0..function.replicas).any(|replica| view.name.place == function.place(&name, replica))
            });
            if let Some(function) = function {
                let wanted = function.pod(self.owner, view.replica, view.name.incarnation);
                self.applier.relabel(live, &wanted).await?;
            }
        }
        Ok(())
    }

    /// Deletes old plans; those that are proposed, to run or running stay.
    pub(super) async fn prune(
        &self,
        planning: &PlanState,
        target: Option<&str>,
        running: Option<&str>,
    ) -> Result<(), ReconcileError> {
        let planned = match planning {
            PlanState::Planned { hash, .. } => Some(hash.as_str()),
            PlanState::Inspecting { .. } | PlanState::Refused(_) => None,
        };
        let in_use = [planned, target, running].into_iter().flatten();
        let in_use: Vec<String> = in_use.map(|hash| plan_name(&self.owner.name_any(), hash)).collect();
        Ok(self.applier.prune_plans(&self.there.plans, &in_use).await?)
    }
}
