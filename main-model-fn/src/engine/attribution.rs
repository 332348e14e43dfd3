//! Whose work an iteration was: its time, split over the requests that took part.
//!
//! The main function's time goes by rows, that of each remote function that answered by the pairs that it
//! computed. A function that had nothing to do in an iteration was idle. All in integer nanoseconds: shares add up to
//! the iteration, iterations and idle time to the time that the engine serves.

use super::sequence::{Running, Share};
use crate::experts::Answered;
use remoe_ledger::split;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// What the functions have done since the engine serves.
#[derive(Debug)]
pub(super) struct Busy {
    /// When the first placement was in force.
    serving: Option<Instant>,
    /// Until when time is accounted for.
    until: Instant,
    main: u64,
    /// By address; remote functions of the present placement.
    remote: BTreeMap<Arc<str>, u64>,
    /// Their addresses, in the order of the placement's links.
    links: Vec<Arc<str>>,
}

/// An iteration that is over.
#[derive(Debug, Clone, Copy)]
pub(super) struct Passed {
    nanoseconds: u64,
    served: u64,
}

impl Busy {
    pub(super) fn new(now: Instant) -> Self {
        Self { serving: None, until: now, main: 0, remote: BTreeMap::new(), links: Vec::new() }
    }

    /// A placement with remote functions at `addresses` is in force.
    pub(super) fn switched<'a>(&mut self, addresses: impl Iterator<Item = &'a str>, now: Instant) {
        if self.serving.is_none() {
            (self.serving, self.until) = (Some(now), now);
        }
        let known = std::mem::take(&mut self.remote);
        self.links = addresses.map(Arc::from).collect();
        let busy = |address: &Arc<str>| known.get(address).copied().unwrap_or(0);
        self.remote = self.links.iter().map(|address| (address.clone(), busy(address))).collect();
    }

    /// There was nothing to do until `now`.
    pub(super) fn rested(&mut self, now: Instant) {
        self.until = now;
    }

    /// An iteration is over. All that was done since the last one, or since there was nothing to do, was done for it.
    pub(super) fn passed(&mut self, now: Instant) -> Passed {
        let nanoseconds = nanoseconds(self.until, now);
        self.until = now;
        self.main += nanoseconds;
        Passed { nanoseconds, served: self.serving.map_or(0, |serving| self::nanoseconds(serving, now)) }
    }

    /// Gives every request of the iteration its share.
    pub(super) fn share(
        &mut self,
        passed: Passed,
        running: &mut [Running],
        shares: &[Share],
        answered: &Answered,
    ) {
        let rows = shares.iter().map(|share| share.rows as u64);
        for ((running, share), nanoseconds) in
            running.iter_mut().zip(shares).zip(split(passed.nanoseconds, rows))
        {
            if share.rows > 0 {
                running.worked(nanoseconds, self.main, passed.served);
            }
        }
        let mut pairs = Vec::with_capacity(shares.len());
        for (link, address) in self.links.iter().enumerate() {
            let mut first = 0;
            pairs.clear();
            pairs.extend(shares.iter().map(|share| {
                first += share.rows;
                answered.pairs(link, first - share.rows..first)
            }));
            if pairs.iter().all(|pairs| *pairs == 0) {
                continue;
            }
            let busy = self.remote.entry(address.clone()).or_default();
            *busy += passed.nanoseconds;
            let parts = split(passed.nanoseconds, pairs.iter().copied());
            for ((running, pairs), nanoseconds) in running.iter_mut().zip(&pairs).zip(parts) {
                if *pairs > 0 {
                    running.worked_remotely(address, nanoseconds, *busy);
                }
            }
        }
    }
}

fn nanoseconds(from: Instant, until: Instant) -> u64 {
    // 584 years fit.
    until.saturating_duration_since(from).as_nanos() as u64
}
