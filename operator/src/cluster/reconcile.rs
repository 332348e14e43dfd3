//! The pipeline: observe, find out about the model, plan, build, apply, tell main functions, state the
//! status. Everything that is decided is decided by pure modules; this one joins them.

use super::api::{MoEDeployment, MoEPlan, MoEPlanSpec, Mode, ModelStatus, ProfileSource, RESTARTED_AT};
use super::apply::{Applier, Made};
use super::build::{
    BuildError, Revision, Surroundings, budgets, frame, inspector, inspector_place, plan_name, plan_object,
    revision,
};
use super::calls::{CallError, Calls};
use super::events::{Happening, publish, transitions};
use super::facts::{ModelFacts, subject};
use super::inspection::{Inspecting, inspecting, useless_inspectors};
use super::mains;
use super::metrics::Metrics;
use super::observe::{Observed, observe};
use super::planning::{KnownProfile, Planning, PlanningError, compute_dtype};
use super::pods::{PodView, Trouble};
use super::rollout::{Scene, pushes, step};
use super::routing::RoutingTable;
use super::status::{Findings, PlanState, status};
use jiff::Timestamp;
use kube::runtime::events::Recorder;
use kube::{Client, ResourceExt};
use remoe_profile::Profile;
use std::time::Duration;
use tokio::time::timeout;

/// A plan that takes longer to make is not made.
const PLANNING: Duration = Duration::from_secs(120);
/// When to look again at something that is on its way, whatever events say.
const SOON: Duration = Duration::from_secs(1);
/// When to look again at something that others must move on.
const LATER: Duration = Duration::from_secs(15);
/// When to look again at what is as it should be: watches can miss something.
const SETTLED: Duration = Duration::from_secs(300);
/// The key of a profile in its ConfigMap.
const PROFILE_KEY: &str = "profile.json";

/// What every run works with.
pub(super) struct Context {
    /// The API.
    pub(super) client: Client,
    /// What the operator was told.
    pub(super) around: Surroundings,
    /// Where events are published.
    pub(super) recorder: Recorder,
    /// What is counted.
    pub(super) metrics: Metrics,
}

/// Why a run came to nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReconcileError {
    /// A call of the API.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A value that cannot be written as JSON.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// The task that plans ended abnormally, or took too long.
    #[error("planning: {0}")]
    Planning(String),
}

impl ReconcileError {
    /// For metrics.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Call(CallError::Timeout { .. }) => "timeout",
            Self::Call(error) if error.code() == 409 => "conflict",
            Self::Call(_) => "api",
            Self::Json(_) => "json",
            Self::Planning(_) => "planning",
        }
    }
}

/// Looks at one deployment and does what is to be done. Returns when to look again.
///
/// # Errors
/// A call came to nothing. What was done stands, and the next run goes on from there.
pub(super) async fn reconcile(owner: &MoEDeployment, context: &Context) -> Result<Duration, ReconcileError> {
    let calls = Calls::new(
        context.client.clone(),
        &owner.namespace().unwrap_or_default(),
        context.metrics.writes.clone(),
    );
    let there = observe(&calls, owner).await?;
    let mut run = Run {
        owner,
        context,
        applier: Applier::new(&calls, owner),
        calls: &calls,
        there,
        troubles: Vec::new(),
        happenings: Vec::new(),
        look_again: SETTLED,
        now: Timestamp::now(),
    };
    run.pipeline().await?;
    Ok(run.look_again)
}

/// One run.
struct Run<'a> {
    owner: &'a MoEDeployment,
    context: &'a Context,
    calls: &'a Calls,
    applier: Applier<'a>,
    there: Observed,
    troubles: Vec<Trouble>,
    happenings: Vec<Happening>,
    look_again: Duration,
    now: Timestamp,
}

impl Run<'_> {
    async fn pipeline(&mut self) -> Result<(), ReconcileError> {
        let table = self.there.routing.as_ref().map(RoutingTable::from_config_map).unwrap_or_default();
        let running = self.running(&table);
        // Before any pod is made: a pod without its policy would be open to all.
        let frame = frame(self.owner, &self.context.around);
        self.troubles.extend(self.applier.frame(&frame, &self.there).await?);
        let model = self.model().await?;
        let planning = match &model {
            Ok(facts) => self.plan(facts, running.as_deref()).await?,
            Err(state) => state.clone(),
        };
        let target = self.target(&planning, running.as_deref());
        let built =
            target.and_then(|(hash, plan)| match revision(self.owner, &hash, &plan, &self.context.around) {
                Ok(revision) => Some((revision, plan)),
                Err(error) => {
                    self.troubles.push(Trouble::new("InvalidSpec", error.to_string()));
                    None
                }
            });
        let mut pods = self.views();
        mains::describe(&mut pods).await;
        let mut settled = false;
        if let Some((revision, _)) = &built {
            let budgets = budgets(self.owner, revision);
            self.troubles.extend(self.applier.budgets(&budgets, &self.there).await?);
            settled = self.roll(revision, &table, &pods).await?;
        }
        self.prune(&planning, built.as_ref().map(|(revision, _)| revision.plan.as_str()), running.as_deref())
            .await?;
        let facts = model.ok();
        let findings = Findings {
            deployment: self.owner,
            model: facts.map(|facts| ModelStatus {
                source: self.owner.spec.model.source.clone(),
                revision: facts.revision,
                digest: facts.inspection.fingerprint,
            }),
            planning: &planning,
            target: built.as_ref().map(|(revision, plan)| (revision, plan)),
            running: running.as_deref(),
            pods: &pods,
            troubles: std::mem::take(&mut self.troubles),
            settled,
            now: self.now,
        };
        let status = status(&findings);
        if self.owner.status.as_ref() != Some(&status) {
            self.calls.apply_status(&self.owner.name_any(), &status).await?;
        }
        self.happenings.extend(transitions(self.owner.status.as_ref(), &status));
        publish(&self.context.recorder, self.owner, &self.happenings).await;
        Ok(())
    }

    /// The plan that main functions were last told of.
    fn running(&self, table: &RoutingTable) -> Option<String> {
        let newest = table.entries.values().max_by_key(|generation| generation.number);
        let told = newest.map(|generation| generation.plan.clone());
        told.or_else(|| self.owner.status.as_ref()?.plan.clone())
    }

    /// The facts of the checkpoint, or what is done to get them.
    async fn model(&mut self) -> Result<Result<ModelFacts, PlanState>, ReconcileError> {
        let restarted_at = self.owner.annotations().get(RESTARTED_AT).map(String::as_str);
        let subject = subject(&self.owner.spec.model, restarted_at)?;
        let place = inspector_place(&self.owner.name_any(), &subject);
        let uid = self.owner.uid().unwrap_or_default();
        let state = inspecting(self.there.model.as_ref(), &self.there.pods, &uid, &subject, &place, self.now);
        self.applier.delete(&useless_inspectors(&self.there.pods, &uid, &subject, &state)).await?;
        let waiting = |trouble| Ok(Err(PlanState::Inspecting { trouble }));
        match state {
            Inspecting::Known(facts) => {
                // Labels and owner included.
                let map = facts.config_map(self.owner, &subject)?;
                self.troubles.extend(self.applier.model(&map, &self.there).await?);
                Ok(Ok(*facts))
            }
            Inspecting::Read { pod } => match ModelFacts::from_log(&self.calls.log(&pod).await?) {
                Ok(facts) => {
                    let map = facts.config_map(self.owner, &subject)?;
                    self.troubles.extend(self.applier.model(&map, &self.there).await?);
                    self.look_soon(SOON);
                    Ok(Ok(facts))
                }
                Err(error) => {
                    self.look_soon(LATER);
                    Ok(Err(PlanState::Refused(error.into())))
                }
            },
            Inspecting::Start { incarnation, after } => {
                let pod = match inspector(self.owner, &subject, incarnation, &self.context.around) {
                    Ok(pod) => pod,
                    Err(error) => return Ok(Err(PlanState::Refused(invalid_spec(&error)))),
                };
                self.look_soon(LATER);
                match self.applier.pod(pod).await? {
                    Made::Created(pod) => {
                        self.happenings
                            .push(Happening::normal("InspectorStarted", format!("{pod} reads the model")));
                        waiting(after)
                    }
                    Made::Refused(trouble) => waiting(Some(trouble)),
                }
            }
            Inspecting::Waiting { trouble } => {
                self.look_soon(LATER);
                waiting(trouble)
            }
            Inspecting::Failed { trouble, retry_at } => {
                self.look_at(retry_at);
                Ok(Err(PlanState::Refused(trouble)))
            }
        }
    }

    /// The plan for the present spec: the one that was made of the same inputs, else a new one.
    async fn plan(&mut self, facts: &ModelFacts, running: Option<&str>) -> Result<PlanState, ReconcileError> {
        let name = self.owner.name_any();
        let known = match self.profile(facts) {
            Ok(known) => known,
            Err(trouble) => {
                self.look_soon(LATER);
                return Ok(PlanState::Refused(trouble));
            }
        };
        let planning = match Planning::new(&name, &self.owner.spec, facts, &known) {
            Ok(planning) => planning,
            Err(error) => return Ok(PlanState::Refused(refused(&error))),
        };
        let made = self.there.plans.iter().rev().find(|plan| plan.spec.inputs == planning.inputs);
        if let Some((hash, plan)) = made.and_then(|plan| Some((self.hash(plan)?, plan))) {
            return Ok(PlanState::Planned { hash, plan: Box::new(plan.spec.clone()) });
        }
        let previous = running.and_then(|hash| self.find(hash)).map(|plan| plan.spec.clone());
        let solving = tokio::task::spawn_blocking(move || planning.solve(previous.as_ref()));
        let solved = timeout(PLANNING, solving)
            .await
            .map_err(|_elapsed| ReconcileError::Planning(format!("no plan within {PLANNING:?}")))?
            .map_err(|error| ReconcileError::Planning(error.to_string()))?;
        let plan = match solved {
            Ok(plan) => plan,
            Err(error) => return Ok(PlanState::Refused(refused(&error))),
        };
        let (hash, object) = plan_object(self.owner, plan.clone())?;
        self.applier.plan(&object).await?;
        self.there.plans.push(object);
        Ok(PlanState::Planned { hash, plan: Box::new(plan) })
    }

    /// Figures of the hardware: those that the spec names, else the prior.
    fn profile(&self, facts: &ModelFacts) -> Result<KnownProfile, Trouble> {
        let dtype = compute_dtype(&self.owner.spec, facts);
        let Some(named) = &self.owner.spec.profile else {
            let profile = Profile::prior(&facts.inspection, dtype.name());
            return Ok(KnownProfile { profile, source: ProfileSource::Prior });
        };
        let name = &named.config_map_name;
        let map = self.there.profile.as_ref().ok_or_else(|| {
            Trouble::new(
                "ProfileMissing",
                format!("spec.profile.configMapName: there is no ConfigMap {name}"),
            )
        })?;
        let text = map.data.as_ref().and_then(|data| data.get(PROFILE_KEY)).ok_or_else(|| {
            Trouble::new("ProfileMissing", format!("ConfigMap {name} has no key {PROFILE_KEY}"))
        })?;
        let profile = Profile::from_json(text)
            .map_err(|error| Trouble::new("ProfileInvalid", format!("ConfigMap {name}: {error}")))?;
        Ok(KnownProfile { profile, source: ProfileSource::Supplied })
    }

    /// What is to run: the plan for the present spec, or in mode Advisory the accepted one; while there
    /// is none, what runs already.
    fn target(&mut self, planning: &PlanState, running: Option<&str>) -> Option<(String, MoEPlanSpec)> {
        let stored = |run: &Self, hash: &str| Some((hash.to_owned(), run.find(hash)?.spec.clone()));
        let keep = |run: &Self| running.and_then(|hash| stored(run, hash));
        match self.owner.spec.mode {
            Mode::Active => match planning {
                PlanState::Planned { hash, plan } => Some((hash.clone(), plan.as_ref().clone())),
                PlanState::Inspecting { .. } | PlanState::Refused(_) => keep(self),
            },
            Mode::Advisory => {
                let Some(accepted) = self.owner.spec.accepted_plan.clone() else { return keep(self) };
                let found = stored(self, &accepted);
                if found.is_none() {
                    let message = format!("spec.acceptedPlan: this deployment has no plan {accepted}");
                    self.troubles.push(Trouble::new("PlanUnknown", message));
                }
                found.or_else(|| keep(self))
            }
        }
    }

    fn find(&self, hash: &str) -> Option<&MoEPlan> {
        let name = plan_name(&self.owner.name_any(), hash);
        self.there.plans.iter().find(|plan| plan.name_any() == name)
    }

    /// The hash in a plan's name.
    fn hash(&self, plan: &MoEPlan) -> Option<String> {
        let name = plan.name_any();
        let hash = name.strip_prefix(&self.owner.name_any())?.strip_prefix('-')?;
        Some(hash.to_owned())
    }

    fn views(&self) -> Vec<PodView> {
        let uid = self.owner.uid().unwrap_or_default();
        self.there.pods.iter().filter_map(|pod| PodView::of(pod, &uid, self.now)).collect()
    }

    /// Pods and routing, one step further. Returns whether everything is as it is to be.
    async fn roll(
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
        // Written before anybody is told: a number means one thing only, whatever happens next.
        if !table.entries.is_empty() || self.there.routing.is_some() {
            let trouble = self.applier.routing(table.config_map(self.owner)?, self.there.routing.as_ref());
            self.troubles.extend(trouble.await?);
        }
        let mut acted = steps.table.is_some();
        for told in mains::push(pushes(table, pods)).await {
            acted = true;
            match told.outcome {
                Ok(problems) if problems.is_empty() => {
                    let note = format!("generation {} is in force at {}", told.number, told.pod);
                    self.happenings.push(Happening::normal("RoutingInForce", note));
                }
                Ok(problems) => {
                    let (number, pod) = (told.number, told.pod);
                    let note = format!("generation {number} at {pod}: {}", problems.join("; "));
                    self.happenings.push(Happening::warning("RoutingProblem", note));
                }
                Err(message) => {
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

    async fn prune(
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

    fn look_soon(&mut self, after: Duration) {
        self.look_again = self.look_again.min(after);
    }

    fn look_at(&mut self, at: Timestamp) {
        // A little later, so that the time has come.
        let after = Duration::try_from(at.duration_since(self.now)).unwrap_or_default();
        self.look_soon(after + Duration::from_millis(100));
    }
}

fn invalid_spec(error: &BuildError) -> Trouble {
    Trouble::new("InvalidSpec", format!("spec.model.source: {error}"))
}

fn refused(error: &PlanningError) -> Trouble {
    let reason = match error {
        PlanningError::Spec { .. } => "InvalidSpec",
        PlanningError::Profile(_) => "ProfileInvalid",
        PlanningError::Infeasible(_) => "Infeasible",
        PlanningError::Json(_) => "InvalidSpec",
    };
    Trouble::new(reason, error.to_string())
}
