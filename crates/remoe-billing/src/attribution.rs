//! Attribution of an engine's time: splits the time of each iteration over the requests in its batch.
//!
//! The main function's time is split by rows, and that of each remote function by the (token, expert) pairs that it
//! computed. A function without pairs in an iteration was idle. All times are integer nanoseconds: shares add up to
//! the iteration, and iterations and idle time add up to the time that the engine serves.

use crate::meter::RequestWork;
use crate::money::split;
use crate::share::Phase;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Request in an engine's batch.
pub trait BilledRequest {
    /// Returns the work that functions have done for the request, and its present phase.
    fn work(&mut self) -> (&mut RequestWork, Phase);
}

/// Numbers of (token, expert) pairs of an iteration, by remote function (link) and row.
#[derive(Debug, Default)]
pub struct PairCounts {
    rows: usize,
    /// Shape: links x rows.
    pairs: Vec<u32>,
}

impl PairCounts {
    /// Begins an iteration of `rows` rows under a placement with `links` links.
    pub fn begin(&mut self, rows: usize, links: usize) {
        self.rows = rows;
        self.pairs.clear();
        self.pairs.resize(rows * links, 0);
    }

    /// Counts the pairs in `slots`, for which `link` has answered. A row has `top_k` slots. Slots outside of the
    /// iteration are ignored.
    pub fn count(&mut self, link: usize, slots: &[u32], top_k: usize) {
        let first = link * self.rows;
        let rows = self.pairs.get_mut(first..first + self.rows);
        let (Some(rows), Ok(top_k)) = (rows, u32::try_from(top_k)) else { return };
        for slot in slots {
            // Hot: once per pair and layer. A 32-bit division is twice as fast as a 64-bit one.
            if let Some(count) = slot.checked_div(top_k).and_then(|row| rows.get_mut(row as usize)) {
                *count += 1;
            }
        }
    }

    /// Returns the number of pairs of `rows` for which `link` has answered.
    #[must_use]
    pub fn answered_pairs(&self, link: usize, rows: Range<usize>) -> u64 {
        let first = link * self.rows;
        let counts = self.pairs.get(first + rows.start..first + rows.end).unwrap_or_default();
        counts.iter().map(|count| u64::from(*count)).sum()
    }
}

/// Time that functions have worked since the engine began to serve, and its split over requests.
#[derive(Debug)]
pub struct Attribution {
    /// Time when the first placement was in force.
    serving_since: Option<Instant>,
    /// Time until which all time is attributed.
    attributed_until: Instant,
    /// Nanoseconds of work of the main function.
    main: u64,
    /// Nanoseconds of work by address, of the remote functions of the present placement.
    remote: BTreeMap<Arc<str>, u64>,
    /// Addresses of the remote functions, in the order of the placement's links.
    links: Vec<Arc<str>>,
}

/// Time of a completed iteration.
#[derive(Debug, Clone, Copy)]
pub struct IterationTime {
    nanoseconds: u64,
    /// Nanoseconds since the engine began to serve.
    served: u64,
}

impl Attribution {
    /// Makes the attribution of an engine that does not serve yet.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self {
            serving_since: None,
            attributed_until: now,
            main: 0,
            remote: BTreeMap::new(),
            links: Vec::new(),
        }
    }

    /// Records that a placement with remote functions at `addresses` is in force.
    pub fn set_links<'a>(&mut self, addresses: impl Iterator<Item = &'a str>, now: Instant) {
        if self.serving_since.is_none() {
            (self.serving_since, self.attributed_until) = (Some(now), now);
        }
        let known = std::mem::take(&mut self.remote);
        self.links = addresses.map(Arc::from).collect();
        let busy = |address: &Arc<str>| known.get(address).copied().unwrap_or(0);
        self.remote = self.links.iter().map(|address| (address.clone(), busy(address))).collect();
    }

    /// Records that the engine was idle until `now`.
    pub fn record_idle(&mut self, now: Instant) {
        self.attributed_until = now;
    }

    /// Ends an iteration, which takes all time since the previous one or since the engine was idle.
    pub fn end_iteration(&mut self, now: Instant) -> IterationTime {
        let nanoseconds = nanoseconds(self.attributed_until, now);
        self.attributed_until = now;
        self.main += nanoseconds;
        IterationTime {
            nanoseconds,
            served: self.serving_since.map_or(0, |serving| self::nanoseconds(serving, now)),
        }
    }

    /// Adds to every request its share of the iteration's time. `rows` are the rows of each of `requests`, and
    /// `pairs` the pairs that remote functions computed.
    pub fn attribute(
        &mut self,
        iteration: IterationTime,
        requests: &mut [impl BilledRequest],
        rows: impl Iterator<Item = Range<usize>> + Clone,
        pairs: &PairCounts,
    ) {
        let weights = rows.clone().map(|rows| rows.len() as u64);
        for ((request, rows), nanoseconds) in
            requests.iter_mut().zip(rows.clone()).zip(split(iteration.nanoseconds, weights))
        {
            if !rows.is_empty() {
                let (work, phase) = request.work();
                *work.main.share.phase_mut(phase) += nanoseconds;
                (work.main.busy, work.served) = (self.main, iteration.served);
            }
        }
        let mut weights = Vec::with_capacity(requests.len());
        for (link, address) in self.links.iter().enumerate() {
            weights.clear();
            weights.extend(rows.clone().map(|rows| pairs.answered_pairs(link, rows)));
            if weights.iter().all(|pairs| *pairs == 0) {
                continue;
            }
            let busy = self.remote.entry(address.clone()).or_default();
            *busy += iteration.nanoseconds;
            let parts = split(iteration.nanoseconds, weights.iter().copied());
            for ((request, pairs), nanoseconds) in requests.iter_mut().zip(&weights).zip(parts) {
                if *pairs > 0 {
                    let (work, phase) = request.work();
                    let worked = work.remote.entry(address.clone()).or_default();
                    *worked.share.phase_mut(phase) += nanoseconds;
                    worked.busy = *busy;
                }
            }
        }
    }
}

fn nanoseconds(from: Instant, until: Instant) -> u64 {
    // A u64 holds 584 years of nanoseconds.
    until.saturating_duration_since(from).as_nanos() as u64
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::time::Duration;

    struct AttributedWork(RequestWork, Phase);

    impl BilledRequest for AttributedWork {
        fn work(&mut self) -> (&mut RequestWork, Phase) {
            (&mut self.0, self.1)
        }
    }

    #[test]
    fn iteration_is_attributed_by_rows_and_pairs() {
        let start = Instant::now();
        let at = |nanoseconds| start + Duration::from_nanos(nanoseconds);
        let mut attribution = Attribution::new(start);
        attribution.set_links(["a", "b", "idle"].into_iter(), at(100));
        attribution.record_idle(at(1_000));
        let iteration = attribution.end_iteration(at(2_001));
        let mut pairs = PairCounts::default();
        pairs.begin(4, 3);
        // Three rows of the first request and one of the second, two slots each; a slot outside is ignored.
        pairs.count(0, &[0, 1, 2, 6], 2);
        pairs.count(1, &[7, 8], 2);
        pairs.count(9, &[0], 2);
        let request = |phase| AttributedWork(RequestWork::default(), phase);
        let mut requests = [request(Phase::Prefill), request(Phase::Decode), request(Phase::Decode)];
        attribution.attribute(iteration, &mut requests, [0..3, 3..4, 4..4].into_iter(), &pairs);
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
