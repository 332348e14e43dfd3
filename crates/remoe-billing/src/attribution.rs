//! Whose work an iteration of an engine was: its time, split over the requests that took part.
//!
//! The main function's time goes by rows, that of each remote function that answered by the pairs that it
//! computed. A function that had nothing to do in an iteration was idle. All in integer nanoseconds: shares add up to
//! the iteration, iterations and idle time to the time that the engine serves.

use crate::meter::RequestWork;
use crate::money::split;
use crate::share::Phase;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// A request that takes part in iterations.
pub trait Billed {
    /// Returns the work that functions have done for it, and its present phase.
    fn work(&mut self) -> (&mut RequestWork, Phase);
}

/// Which remote functions answered for which rows of an iteration: counts of (token, expert) pairs by link and row.
#[derive(Debug, Default)]
pub struct Pairs {
    rows: usize,
    /// links x rows.
    pairs: Vec<u32>,
}

impl Pairs {
    /// Begins an iteration of `rows` rows under a placement with `links` links.
    pub fn begin(&mut self, rows: usize, links: usize) {
        self.rows = rows;
        self.pairs.clear();
        self.pairs.resize(rows * links, 0);
    }

    /// Counts the pairs in `slots` that link `link` has answered for, `top_k` slots for each row. Slots outside of the
    /// iteration are ignored.
    pub fn count(&mut self, link: usize, slots: &[u32], top_k: usize) {
        let first = link * self.rows;
        let rows = self.pairs.get_mut(first..first + self.rows);
        let (Some(rows), Ok(top_k)) = (rows, u32::try_from(top_k)) else { return };
        for slot in slots {
            // Twice as fast as in 64 bits, and there is one for each pair of every layer.
            if let Some(count) = slot.checked_div(top_k).and_then(|row| rows.get_mut(row as usize)) {
                *count += 1;
            }
        }
    }

    /// Pairs of `rows` that link `link` has answered for.
    #[must_use]
    pub fn of(&self, link: usize, rows: Range<usize>) -> u64 {
        let first = link * self.rows;
        let counts = self.pairs.get(first + rows.start..first + rows.end).unwrap_or_default();
        counts.iter().map(|count| u64::from(*count)).sum()
    }
}

/// Time that functions have worked since the engine serves.
#[derive(Debug)]
pub struct Attribution {
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
pub struct Passed {
    nanoseconds: u64,
    served: u64,
}

impl Attribution {
    /// Creates the attribution of an engine that does not serve yet.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { serving: None, until: now, main: 0, remote: BTreeMap::new(), links: Vec::new() }
    }

    /// A placement with remote functions at `addresses` is in force.
    pub fn switched<'a>(&mut self, addresses: impl Iterator<Item = &'a str>, now: Instant) {
        if self.serving.is_none() {
            (self.serving, self.until) = (Some(now), now);
        }
        let known = std::mem::take(&mut self.remote);
        self.links = addresses.map(Arc::from).collect();
        let busy = |address: &Arc<str>| known.get(address).copied().unwrap_or(0);
        self.remote = self.links.iter().map(|address| (address.clone(), busy(address))).collect();
    }

    /// There was nothing to do until `now`.
    pub fn rested(&mut self, now: Instant) {
        self.until = now;
    }

    /// An iteration is over. All that was done since the last one, or since there was nothing to do, was done for it.
    pub fn passed(&mut self, now: Instant) -> Passed {
        let nanoseconds = nanoseconds(self.until, now);
        self.until = now;
        self.main += nanoseconds;
        Passed { nanoseconds, served: self.serving.map_or(0, |serving| self::nanoseconds(serving, now)) }
    }

    /// Gives every request of the iteration its share: `rows` says which rows each of `requests` had, and `pairs` what
    /// remote functions computed for them.
    pub fn share(
        &mut self,
        passed: Passed,
        requests: &mut [impl Billed],
        rows: impl Iterator<Item = Range<usize>> + Clone,
        pairs: &Pairs,
    ) {
        let weights = rows.clone().map(|rows| rows.len() as u64);
        for ((request, rows), nanoseconds) in
            requests.iter_mut().zip(rows.clone()).zip(split(passed.nanoseconds, weights))
        {
            if !rows.is_empty() {
                let (work, phase) = request.work();
                *work.main.share.of(phase) += nanoseconds;
                (work.main.busy, work.served) = (self.main, passed.served);
            }
        }
        let mut weights = Vec::with_capacity(requests.len());
        for (link, address) in self.links.iter().enumerate() {
            weights.clear();
            weights.extend(rows.clone().map(|rows| pairs.of(link, rows)));
            if weights.iter().all(|pairs| *pairs == 0) {
                continue;
            }
            let busy = self.remote.entry(address.clone()).or_default();
            *busy += passed.nanoseconds;
            let parts = split(passed.nanoseconds, weights.iter().copied());
            for ((request, pairs), nanoseconds) in requests.iter_mut().zip(&weights).zip(parts) {
                if *pairs > 0 {
                    let (work, phase) = request.work();
                    let worked = work.remote.entry(address.clone()).or_default();
                    *worked.share.of(phase) += nanoseconds;
                    worked.busy = *busy;
                }
            }
        }
    }
}

fn nanoseconds(from: Instant, until: Instant) -> u64 {
    // 584 years fit.
    until.saturating_duration_since(from).as_nanos() as u64
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::time::Duration;

    struct AttributedWork(RequestWork, Phase);

    impl Billed for AttributedWork {
        fn work(&mut self) -> (&mut RequestWork, Phase) {
            (&mut self.0, self.1)
        }
    }

    #[test]
    fn an_iteration_is_whose_rows_and_pairs_it_had() {
        let start = Instant::now();
        let at = |nanoseconds| start + Duration::from_nanos(nanoseconds);
        let mut attribution = Attribution::new(start);
        attribution.switched(["a", "b", "idle"].into_iter(), at(100));
        attribution.rested(at(1_000));
        let passed = attribution.passed(at(2_001));
        let mut pairs = Pairs::default();
        pairs.begin(4, 3);
        // Three rows of the first request and one of the second, two slots each; a slot outside is ignored.
        pairs.count(0, &[0, 1, 2, 6], 2);
        pairs.count(1, &[7, 8], 2);
        pairs.count(9, &[0], 2);
        let request = |phase| AttributedWork(RequestWork::default(), phase);
        let mut requests = [request(Phase::Prefill), request(Phase::Decode), request(Phase::Decode)];
        attribution.share(passed, &mut requests, [0..3, 3..4, 4..4].into_iter(), &pairs);
        let [AttributedWork(one, _), AttributedWork(other, _), AttributedWork(none, _)] = requests;
        assert_eq!((one.main.share.prefill, one.main.share.decode), (750, 0));
        assert_eq!((other.main.share.prefill, other.main.share.decode), (0, 251));
        assert_eq!((one.main.busy, one.served, other.served), (1_001, 1_901, 1_901));
        assert_eq!((one.remote["a"].share.prefill, other.remote["a"].share.decode), (750, 251));
        assert_eq!((one.remote.get("b"), other.remote["b"].share.decode), (None, 1_001));
        assert_eq!(none, RequestWork::default());
        assert!(!one.remote.contains_key("idle") && !other.remote.contains_key("idle"));
    }
}
