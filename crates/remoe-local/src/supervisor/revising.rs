//! Other placements while a model runs: how one takes over, and what becomes of one that does not.

use super::{MOST_PAUSES, ModelSupervisor, SupervisorState};
use crate::deployment::DesiredDeployment as Placed;
use crate::error::LocalError;
use crate::rates::FunctionPrices;
use crate::replan::{BetterPlacement, Measured, OnMeasurements, PlacementBasis, on_measurements};
use remoe_process::Role;
use remoe_rollout::decide::Desired;
use std::time::Instant;
use tokio::task::{JoinError, JoinHandle};

/// A placement on its way: until it is in force, the one before counts.
pub(super) struct Revision {
    pub(super) better: BetterPlacement,
    pub(super) cause: RevisionCause,
    /// The generation that it is to replace.
    pub(super) replaces: Option<u64>,
    /// Deadline: a revision that takes longer is given up.
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

/// A plan on measurements on its way.
pub(super) struct Planning {
    measured: Measured,
    /// Revision of the placement that it starts from.
    from: u32,
    answer: JoinHandle<Result<OnMeasurements, LocalError>>,
}

type RevisionResult = Result<Result<OnMeasurements, LocalError>, JoinError>;

impl Planning {
    /// Waits for the plan. It is safe to cancel this.
    pub(super) async fn planned(&mut self) -> RevisionResult {
        (&mut self.answer).await
    }
}

impl ModelSupervisor {
    /// Starts by the plan that waits for the next start, where one does.
    pub(super) fn take_next(&mut self) {
        if let Some(next) = self.next.take() {
            self.charge(&next.wanted);
            self.adopt(next, "measurements of this machine");
        }
    }

    /// Plans again on what was measured, beside what the keeper does meanwhile.
    pub(super) fn plan_again(&self, measured: Measured) -> Option<Planning> {
        let PlacementBasis::Planned(_, remote) = self.basis else { return None };
        let (wanted, problem) = (self.report.wanted.clone(), measured.problem.clone());
        let from = wanted.placement.revision();
        let answer = tokio::task::spawn_blocking(move || on_measurements(&problem, remote, &wanted));
        Some(Planning { measured, from, answer })
    }

    /// Follows a plan on measurements, and says what changes.
    pub(super) fn follow_plan(
        &mut self,
        planning: Planning,
        planned: RevisionResult,
        seen: &mut SupervisorState,
    ) {
        let Planning { measured, from, .. } = planning;
        if self.report.wanted.placement.revision() != from {
            // A wake has brought another placement meanwhile: the plan is no change of that one.
            seen.planning = self.plan_again(measured);
            return;
        }
        let Measured { problem, took } = measured;
        let PlacementBasis::Planned(_, remote) = self.basis else { return };
        self.basis = PlacementBasis::Planned(Box::new(problem), remote);
        let (name, seconds) = (self.model.name().to_owned(), took.as_secs_f64());
        let line = match planned {
            Ok(Ok(OnMeasurements { now, next, line })) => {
                self.next = next;
                match now {
                    Some(better) if seen.asleep => self.next = Some(self.next.take().unwrap_or(better)),
                    Some(better) => self.revise(better, RevisionCause::Measurements, seen),
                    None => {}
                }
                line
            }
            Ok(Err(error)) => format!("the placement stays: {error}"),
            Err(_broken_off) => return,
        };
        self.report.note(&format!("{name}: measured this machine in {seconds:.0} s; {line}"));
    }

    /// Has a better placement take over from the one that runs.
    pub(super) fn revise(
        &mut self,
        better: BetterPlacement,
        cause: RevisionCause,
        seen: &mut SupervisorState,
    ) {
        let (before, desired) = (self.report.wanted.desired(), better.wanted.desired());
        let main = |desired: &Desired| {
            desired.functions.iter().find(|function| function.role == Role::Main).cloned()
        };
        // One that restarts loses what it serves: that waits for the next wake.
        if main(&before) != main(&desired) {
            return self.wait_longer(seen);
        }
        self.charge(&better.wanted);
        let replaces = self.supervisor.status().borrow().generation;
        let until = Instant::now().checked_add(desired.timeouts.ready);
        seen.revision = Some(Revision { better, cause, replaces, until });
        seen.change = self.supervisor.change(desired);
    }

    /// The revision is in force: it is what counts.
    pub(super) fn complete(
        &mut self,
        better: BetterPlacement,
        cause: RevisionCause,
        seen: &mut SupervisorState,
    ) {
        let before = self.report.wanted.placement.remote();
        let drifts = cause == RevisionCause::Drift;
        match self.following.as_ref().filter(|_| drifts) {
            // Back to what was there before: what is used hovers between both.
            _ if seen.replaced.as_ref() == Some(&better.wanted.placement.remote()) => self.wait_longer(seen),
            Some(following) => seen.pause = following.pause,
            None => {}
        }
        seen.replaced = Some(before);
        if let Some(following) = self.following.as_ref().filter(|_| drifts) {
            following.metrics.replanned("drift");
        }
        match cause {
            RevisionCause::Drift => self.adopt(better, "recent expert usage"),
            // That was said when it was planned.
            RevisionCause::Measurements => self.report.wanted = better.wanted,
        }
        seen.rested.clear();
        if let Some(tiers) = &mut seen.tiers {
            tiers.begin(&self.report.wanted, None);
            self.model.groups_are(tiers.groups(), 0);
        }
    }

    /// Goes on with the placement that is in force.
    pub(super) fn take_back(&mut self, why: &str, seen: &mut SupervisorState) {
        if seen.revision.take().is_none() {
            return;
        }
        if let Some(following) = &self.following {
            following.metrics.replanned("failed");
        }
        self.wait_longer(seen);
        self.charge_for_those_before();
        let desired = self.desired(seen);
        seen.change = self.supervisor.change(desired);
        self.report.note(&format!("placement rolled back: {why}"));
    }

    /// Lengthens the pause before the next revision.
    pub(super) fn wait_longer(&self, seen: &mut SupervisorState) {
        if let Some(following) = &self.following {
            let most = following.pause.saturating_mul(MOST_PAUSES);
            seen.pause = seen.pause.saturating_mul(2).min(most);
        }
    }

    /// Functions of `wanted` cost what its plan says from now on; those that run beside them, what they did.
    pub(super) fn charge(&mut self, wanted: &Placed) {
        let status = self.supervisor.status();
        let status = status.borrow();
        let running = status.functions.iter().map(|function| function.name.as_str());
        self.function_prices =
            FunctionPrices::of(wanted, &self.pricing).beside(&self.function_prices, running);
        self.tell.send_replace(Some(self.function_prices.clone()));
    }

    pub(super) fn charge_for_those_before(&mut self) {
        let wanted = self.report.wanted.clone();
        self.charge(&wanted);
    }

    /// Another placement counts from now on.
    pub(super) fn adopt(&mut self, better: BetterPlacement, followed: &str) {
        let BetterPlacement { wanted, why } = better;
        self.report.wanted = wanted;
        self.report.note(&format!("placement revised for {followed}: {why}"));
    }
}
