//! Life of one function from its start to its end, and the costs of its time.

use crate::money::Rate;
use crate::share::{Basis, Share, grow, sum};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Nanoseconds by which the reported work of a function may exceed its life: clocks may be set meanwhile.
const SLACK: u64 = 3_600_000_000_000;

/// Life of a function, as far as it is recorded. Times are nanoseconds since 1970. Ledgers store it as JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionLife {
    pub(crate) rate: Rate,
    is_main: bool,
    basis: Basis,
    started: u64,
    pub(crate) serving: Option<u64>,
    pub(crate) replaced: Option<u64>,
    pub(crate) stopped: Option<u64>,
    /// Last time at which it was known to be alive, if its end is not recorded and the ledger's writer lost track of
    /// it.
    #[serde(rename = "unseen")]
    pub(crate) unobserved_since: Option<u64>,
    /// Nano-dollars that were charged to requests.
    #[serde(rename = "told")]
    pub(crate) charged: u64,
    /// Work of the function by the main function that reports it. Each main function counts from its own start.
    work: BTreeMap<String, FunctionWork>,
    /// Time of the last answer.
    #[serde(rename = "answered")]
    last_answer: Option<u64>,
    /// Time when the main function began to serve, by its own reports: the earliest of them, because each is late by
    /// the time from the engine to the ledger.
    #[serde(rename = "began")]
    reported_serving: Option<u64>,
    /// Time when a request last ended without an answer.
    lost_until: u64,
    /// Nanoseconds since the last answer in which it worked for requests that ended without one.
    #[serde(rename = "lost_for")]
    lost_nanoseconds: u64,
}

/// Nanoseconds of work of a function, and of serving of the main function that reports them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct FunctionWork {
    /// Nanoseconds that the function has worked.
    busy: u64,
    /// Nanoseconds that the main function has served.
    served: u64,
}

/// Costs of a function's time by purpose, in nano-dollars.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TimeCosts {
    pub(crate) paid: u64,
    pub(crate) failed: u64,
    pub(crate) idle: u64,
    pub(crate) cold_start: u64,
    pub(crate) overlap: u64,
    /// `paid` minus all parts.
    pub(crate) residual: i64,
}

impl FunctionLife {
    pub(crate) fn started(at: u64, rate: Rate, is_main: bool, basis: Basis) -> Self {
        Self { rate, is_main, basis, started: at, ..Self::default() }
    }

    /// Adds an answer of the main function `main`, sent at `at`, when `main` had served for `served` nanoseconds.
    pub(crate) fn add_answer(&mut self, main: &str, at: u64, share: &Share, served: u64) {
        grow(&mut self.charged, share.cost.sum());
        let reported_serving = at.saturating_sub(served);
        self.reported_serving =
            Some(self.reported_serving.map_or(reported_serving, |known| known.min(reported_serving)));
        self.last_answer = self.last_answer.max(Some(at));
        // The reported work includes earlier work for lost requests.
        (self.lost_until, self.lost_nanoseconds) = (self.lost_until.max(at), 0);
        if !self.work.contains_key(main) {
            self.work.insert(main.to_owned(), FunctionWork::default());
        }
        if let Some(work) = self.work.get_mut(main) {
            // Answers may be recorded in another order than the engine completed them.
            *work = FunctionWork { busy: work.busy.max(share.busy), served: work.served.max(served) };
        }
    }

    /// Joins the records of the same function in another ledger.
    pub(crate) fn join(&mut self, other: Self) {
        let earliest = |one: Option<u64>, other: Option<u64>| one.into_iter().chain(other).min();
        let latest = |one: Option<u64>, other: Option<u64>| one.into_iter().chain(other).max();
        self.started = self.started.min(other.started);
        self.serving = earliest(self.serving, other.serving);
        self.replaced = earliest(self.replaced, other.replaced);
        self.stopped = earliest(self.stopped, other.stopped);
        // It is alive as long as either ledger observes it.
        self.unobserved_since =
            self.unobserved_since.zip(other.unobserved_since).map(|(one, other)| one.max(other));
        grow(&mut self.charged, other.charged);
        for (main, work) in other.work {
            let known = self.work.entry(main).or_default();
            *known = FunctionWork { busy: known.busy.max(work.busy), served: known.served.max(work.served) };
        }
        self.last_answer = latest(self.last_answer, other.last_answer);
        self.reported_serving = earliest(self.reported_serving, other.reported_serving);
        // If the other gateway got a later answer, the lost time is part of the reported work.
        self.lost_nanoseconds =
            if self.lost_until >= other.lost_until { self.lost_nanoseconds } else { other.lost_nanoseconds };
        self.lost_until = self.lost_until.max(other.lost_until);
    }

    /// Adds a request that the function had from `since`, and that ended without an answer at `at`.
    pub(crate) fn add_lost_request(&mut self, since: u64, at: u64) {
        let lost = at.saturating_sub(since.max(self.lost_until).max(self.started));
        grow(&mut self.lost_nanoseconds, lost);
        self.lost_until = self.lost_until.max(at);
    }

    /// Returns the costs by purpose, until `now` or until the function's end.
    ///
    /// The launcher's clock determines what was paid, the engine's clock the parts. The difference between the two is
    /// the residual.
    pub(crate) fn costs_until(&self, now: u64) -> TimeCosts {
        let end = self.stopped.or(self.unobserved_since).unwrap_or(now).max(self.started);
        // Bounds the reported work: no process works or serves for longer than it lives.
        let longest = (end - self.started).saturating_add(SLACK);
        let busy = sum(self.work.values().map(|work| work.busy)).min(longest);
        if self.basis == Basis::Work {
            // Only work is paid for. Work that was charged to no request failed.
            let paid = self.rate.cost(busy).max(self.charged);
            return TimeCosts { paid, failed: paid - self.charged, ..TimeCosts::default() };
        }
        let serving = self.serving.unwrap_or(end);
        let serving = self
            .reported_serving
            .filter(|_| self.is_main)
            .map_or(serving, |reported_serving| reported_serving.min(serving));
        let serving = serving.clamp(self.started, end);
        let replaced = self.replaced.unwrap_or(end).clamp(serving, end);
        // The main function measures work of remote functions; their idle time follows from their life.
        let measured_until = self.last_answer.unwrap_or(serving).clamp(serving, replaced);
        let served = match self.is_main {
            true => sum(self.work.values().map(|work| work.served)).min(longest),
            false => measured_until - serving,
        };
        let (reported_until, idle) = (serving.saturating_add(served), served.saturating_sub(busy));
        // After the last report only lost requests are known.
        let tail = replaced.saturating_sub(reported_until);
        let lost = if self.is_main { self.lost_nanoseconds.min(tail) } else { 0 };
        // Each part costs what it adds to the cost of the parts before it. So rounding leaves no remainder.
        let mut time = 0;
        let mut cost_of_next = |part: u64| {
            let before = self.rate.cost(time);
            grow(&mut time, part);
            self.rate.cost(time) - before
        };
        let worked = cost_of_next(busy);
        let idle = cost_of_next(idle).saturating_add(cost_of_next(tail - lost));
        let lost = cost_of_next(lost);
        let cold_start = cost_of_next(serving - self.started);
        let overlap = cost_of_next(end - replaced);
        let paid = self.rate.cost(end - self.started);
        let parts = sum([worked.max(self.charged), idle, lost, cold_start, overlap]);
        TimeCosts {
            paid,
            failed: worked.saturating_sub(self.charged).saturating_add(lost),
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
