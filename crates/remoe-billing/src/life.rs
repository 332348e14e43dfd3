//! One function from its start to its end, and what its time was paid for.

use crate::money::Rate;
use crate::share::{Basis, Share, grow, sum};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Time that a function may say it worked or served beyond its life: clocks may be set meanwhile.
const SLACK: u64 = 3_600_000_000_000;

/// Life of a function, as far as it is known. Times are nanoseconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionLife {
    pub(crate) rate: Rate,
    is_main: bool,
    basis: Basis,
    started: u64,
    pub(crate) serving: Option<u64>,
    pub(crate) replaced: Option<u64>,
    pub(crate) stopped: Option<u64>,
    /// Last time at which it was known to be alive, if the ledger was opened again since and no record says that it
    /// still is.
    pub(crate) unseen: Option<u64>,
    /// Nano-dollars that requests were charged.
    pub(crate) told: u64,
    /// Work that it did, by the main function that reports it: each counts from its own start.
    work: BTreeMap<String, FunctionWork>,
    /// When an answer last left.
    answered: Option<u64>,
    /// When a main function began to serve, by its own account: answers leave some time after the engine ended them, the
    /// quickest of them says it best.
    began: Option<u64>,
    /// When a request last ended without an answer.
    lost_until: u64,
    /// How long it has worked since the last answer for requests that ended without one.
    lost_for: u64,
}

/// Work of a function, and the main function's own time, as a main function reports them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct FunctionWork {
    /// How long the function worked.
    busy: u64,
    /// How long the main function had served by then.
    served: u64,
}

/// Where the money for a function's time went, in nano-dollars.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TimeCosts {
    pub(crate) paid: u64,
    pub(crate) failed: u64,
    pub(crate) idle: u64,
    pub(crate) cold_start: u64,
    pub(crate) overlap: u64,
    /// Rest of what was paid.
    pub(crate) residual: i64,
}

impl FunctionLife {
    pub(crate) fn started(at: u64, rate: Rate, is_main: bool, basis: Basis) -> Self {
        Self { rate, is_main, basis, started: at, ..Self::default() }
    }

    /// Takes note of an answer of `main` that left at `at`, when that had served for `served`.
    pub(crate) fn answered(&mut self, main: &str, at: u64, share: &Share, served: u64) {
        grow(&mut self.told, share.cost.sum());
        let began = at.saturating_sub(served);
        self.began = Some(self.began.map_or(began, |known| known.min(began)));
        self.answered = self.answered.max(Some(at));
        // What it did before is in what it says that it worked.
        (self.lost_until, self.lost_for) = (self.lost_until.max(at), 0);
        if !self.work.contains_key(main) {
            self.work.insert(main.to_owned(), FunctionWork::default());
        }
        if let Some(work) = self.work.get_mut(main) {
            // Answers leave in another order than the engine ended them in.
            *work = FunctionWork { busy: work.busy.max(share.busy), served: work.served.max(served) };
        }
    }

    /// Takes note of what another ledger says of the same function.
    pub(crate) fn join(&mut self, other: Self) {
        let first = |one: Option<u64>, other: Option<u64>| one.into_iter().chain(other).min();
        let last = |one: Option<u64>, other: Option<u64>| one.into_iter().chain(other).max();
        self.started = self.started.min(other.started);
        self.serving = first(self.serving, other.serving);
        self.replaced = first(self.replaced, other.replaced);
        self.stopped = first(self.stopped, other.stopped);
        // It lives while either knows that it does.
        self.unseen = self.unseen.zip(other.unseen).map(|(one, other)| one.max(other));
        grow(&mut self.told, other.told);
        for (main, work) in other.work {
            let known = self.work.entry(main).or_default();
            *known = FunctionWork { busy: known.busy.max(work.busy), served: known.served.max(work.served) };
        }
        self.answered = last(self.answered, other.answered);
        self.began = first(self.began, other.began);
        // One that another gateway was answered later has that time in its work.
        self.lost_for = if self.lost_until >= other.lost_until { self.lost_for } else { other.lost_for };
        self.lost_until = self.lost_until.max(other.lost_until);
    }

    /// Takes note of a request that it had `since` then and that ended without an answer at `at`.
    pub(crate) fn lose(&mut self, since: u64, at: u64) {
        let lost = at.saturating_sub(since.max(self.lost_until).max(self.started));
        grow(&mut self.lost_for, lost);
        self.lost_until = self.lost_until.max(at);
    }

    /// Returns where the money went until `now`, or until its end.
    ///
    /// The launcher's clock says what was paid, the engine's what it was for: where the two contradict each other, the
    /// difference is the residual.
    pub(crate) fn spent(&self, now: u64) -> TimeCosts {
        let end = self.stopped.or(self.unseen).unwrap_or(now).max(self.started);
        // No process works or serves for longer than it lives, whatever it says.
        let longest = (end - self.started).saturating_add(SLACK);
        let busy = sum(self.work.values().map(|work| work.busy)).min(longest);
        if self.basis == Basis::Work {
            // Only work is paid for: work that no request was charged for was for nothing.
            let paid = self.rate.cost(busy).max(self.told);
            return TimeCosts { paid, failed: paid - self.told, ..TimeCosts::default() };
        }
        let serving = self.serving.unwrap_or(end);
        let serving = self.began.filter(|_| self.is_main).map_or(serving, |began| began.min(serving));
        let serving = serving.clamp(self.started, end);
        let replaced = self.replaced.unwrap_or(end).clamp(serving, end);
        // Main functions measure the work of a remote one; its other time is not measured.
        let until = self.answered.unwrap_or(serving).clamp(serving, replaced);
        let served = match self.is_main {
            true => sum(self.work.values().map(|work| work.served)).min(longest),
            false => until - serving,
        };
        let (at, idle) = (serving.saturating_add(served), served.saturating_sub(busy));
        // Of what was done since then nothing is known but whether a request was lost.
        let tail = replaced.saturating_sub(at);
        let lost = if self.is_main { self.lost_for.min(tail) } else { 0 };
        // Each part costs what it adds to the cost of those before it: together they cost what their time costs.
        let mut time = 0;
        let mut next = |part: u64| {
            let before = self.rate.cost(time);
            grow(&mut time, part);
            self.rate.cost(time) - before
        };
        let worked = next(busy);
        let idle = next(idle).saturating_add(next(tail - lost));
        let lost = next(lost);
        let cold_start = next(serving - self.started);
        let overlap = next(end - replaced);
        let paid = self.rate.cost(end - self.started);
        let parts = sum([worked.max(self.told), idle, lost, cold_start, overlap]);
        TimeCosts {
            paid,
            failed: worked.saturating_sub(self.told).saturating_add(lost),
            idle,
            cold_start,
            overlap,
            residual: signed(paid) - signed(parts),
        }
    }
}

fn signed(amount: u64) -> i64 {
    i64::try_from(amount).unwrap_or(i64::MAX)
}
