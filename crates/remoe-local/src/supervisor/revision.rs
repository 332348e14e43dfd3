//! Revisions of the placement while a model runs: rollout and rollback.

use super::{MAX_PAUSE_FACTOR, ModelSupervisor, SupervisorState};
use crate::deployment::DesiredDeployment as Placed;
use crate::error::LocalError;
use crate::rates::FunctionPrices;
use crate::replan::{BetterPlacement, Measured, MeasuredReplan, PlacementBasis, replan_on_measurements};
use remoe_process::Role;
use remoe_rollout::decide::Desired;
use std::time::Instant;
use tokio::task::{JoinError, JoinHandle};

/// Revision in progress: until it is in force, the old placement applies.
pub(super) struct Revision {
    pub(super) better: BetterPlacement,
    pub(super) cause: RevisionCause,
    /// Generation that it replaces.
    pub(super) replaces: Option<u64>,
    /// Deadline after which the revision is rolled back.
    pub(super) until: Option<Instant>,
}

/// Cause of a revision while the model serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RevisionCause {
    /// Recent expert usage.
    Drift,
    /// Measurements of this machine.
    Measurements,
}

/// Replanning in progress after a measurement.
pub(super) struct Planning {
    measured: Measured,
    /// Revision of the placement that it starts from.
    from: u32,
    answer: JoinHandle<Result<MeasuredReplan, LocalError>>,
}

type RevisionResult = Result<Result<MeasuredReplan, LocalError>, JoinError>;

impl Planning {
    /// Waits for the plan. This is cancel-safe.
    pub(super) async fn planned(&mut self) -> RevisionResult {
        (&mut self.answer).await
    }
}

impl ModelSupervisor {
    /// Adopts the plan for the next start, if there is one.
    pub(super) fn adopt_next_plan(&mut self) {
        if let Some(next) = self.next.take() {
            self.set_prices(&next.wanted);
            self.adopt(next, "measurements of this machine");
        }
    }

    /// Starts to replan with the measured figures, in the background.
    pub(super) fn plan_on_measurements(&self, measured: Measured) -> Option<Planning> {
        let PlacementBasis::Planned(_, remote) = self.basis else { return None };
        let (wanted, problem) = (self.report.wanted.clone(), measured.problem.clone());
        let from = wanted.placement.revision();
        let answer = tokio::task::spawn_blocking(move || replan_on_measurements(&problem, remote, &wanted));
        Some(Planning { measured, from, answer })
    }

    /// Applies a plan on measured figures, and reports it.
    pub(super) fn apply_measured_plan(
        &mut self,
        planning: Planning,
        planned: RevisionResult,
        state: &mut SupervisorState,
    ) {
        let Planning { measured, from, .. } = planning;
        if self.report.wanted.placement.revision() != from {
            // A wake changed the placement meanwhile, so the plan is void.
            state.planning = self.plan_on_measurements(measured);
            return;
        }
        let Measured { problem, took } = measured;
        let PlacementBasis::Planned(_, remote) = self.basis else { return };
        self.basis = PlacementBasis::Planned(Box::new(problem), remote);
        let (name, seconds) = (self.model.name().to_owned(), took.as_secs_f64());
        let line = match planned {
            Ok(Ok(MeasuredReplan { now, next, line })) => {
                self.next = next;
                match now {
                    Some(better) if state.asleep => self.next = Some(self.next.take().unwrap_or(better)),
                    Some(better) => self.revise(better, RevisionCause::Measurements, state),
                    None => {}
                }
                line
            }
            Ok(Err(error)) => format!("the placement stays: {error}"),
            Err(_broken_off) => return,
        };
        self.report.note(&format!("{name}: measured this machine in {seconds:.0} s; {line}"));
    }

    /// Starts the rollout of a better placement.
    pub(super) fn revise(
        &mut self,
        better: BetterPlacement,
        cause: RevisionCause,
        state: &mut SupervisorState,
    ) {
        let (before, desired) = (self.report.wanted.desired(), better.wanted.desired());
        let main = |desired: &Desired| {
            desired.functions.iter().find(|function| function.role == Role::Main).cloned()
        };
        // A restart of the main function would lose its requests, so the placement waits for the next wake.
        if main(&before) != main(&desired) {
            return self.lengthen_pause(state);
        }
        self.set_prices(&better.wanted);
        let replaces = self.supervisor.status().borrow().generation;
        let until = Instant::now().checked_add(desired.timeouts.ready);
        state.revision = Some(Revision { better, cause, replaces, until });
        state.change = self.supervisor.change(desired);
    }

    /// Completes a revision that is in force.
    pub(super) fn complete(
        &mut self,
        better: BetterPlacement,
        cause: RevisionCause,
        state: &mut SupervisorState,
    ) {
        let before = self.report.wanted.placement.remote();
        let drifts = cause == RevisionCause::Drift;
        match self.following.as_ref().filter(|_| drifts) {
            // The placement oscillates between two states.
            _ if state.previous_remote.as_ref() == Some(&better.wanted.placement.remote()) => {
                self.lengthen_pause(state)
            }
            Some(following) => state.pause = following.pause,
            None => {}
        }
        state.previous_remote = Some(before);
        if let Some(following) = self.following.as_ref().filter(|_| drifts) {
            following.metrics.count_replan("drift");
        }
        match cause {
            RevisionCause::Drift => self.adopt(better, "recent expert usage"),
            // This was reported when it was planned.
            RevisionCause::Measurements => self.report.wanted = better.wanted,
        }
        state.slept.clear();
        if let Some(sleep_groups) = &mut state.sleep_groups {
            sleep_groups.begin(&self.report.wanted, None);
            self.model.set_inactive_groups(sleep_groups.groups(), 0);
        }
    }

    /// Rolls a revision back to the placement in force.
    pub(super) fn roll_back(&mut self, why: &str, state: &mut SupervisorState) {
        if state.revision.take().is_none() {
            return;
        }
        if let Some(following) = &self.following {
            following.metrics.count_replan("failed");
        }
        self.lengthen_pause(state);
        self.reset_prices();
        let desired = self.desired(state);
        state.change = self.supervisor.change(desired);
        self.report.note(&format!("placement rolled back: {why}"));
    }

    /// Lengthens the pause before the next revision.
    pub(super) fn lengthen_pause(&self, state: &mut SupervisorState) {
        if let Some(following) = &self.following {
            let most = following.pause.saturating_mul(MAX_PAUSE_FACTOR);
            state.pause = state.pause.saturating_mul(2).min(most);
        }
    }

    /// Sets the prices of the functions of `wanted`. Running functions of other placements keep theirs.
    pub(super) fn set_prices(&mut self, wanted: &Placed) {
        let status = self.supervisor.status();
        let status = status.borrow();
        let running = status.functions.iter().map(|function| function.name.as_str());
        self.function_prices =
            FunctionPrices::of(wanted, &self.pricing).with_prices_of(&self.function_prices, running);
        self.tell.send_replace(Some(self.function_prices.clone()));
    }

    pub(super) fn reset_prices(&mut self) {
        let wanted = self.report.wanted.clone();
        self.set_prices(&wanted);
    }

    /// Makes `better` the current placement, and reports it.
    pub(super) fn adopt(&mut self, better: BetterPlacement, followed: &str) {
        let BetterPlacement { wanted, why } = better;
        self.report.wanted = wanted;
        self.report.note(&format!("placement revised for {followed}: {why}"));
    }
}
