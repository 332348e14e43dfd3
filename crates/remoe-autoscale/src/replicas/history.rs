//! Recent load reports of gateways and main functions.

use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Largest number of reports that are kept of one gateway or main function: one per second for two minutes.
const MAX_REPORTS: usize = 128;

/// A gateway's report of its requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GatewayReport {
    /// Time of the report, since any fixed moment.
    pub at: Duration,
    /// Total time that its requests have waited or been in flight since it started.
    pub occupied: Duration,
    /// Requests that wait or are in flight at that time.
    pub requests: u32,
    /// Requests that wait.
    pub waiting: u32,
    /// Number of the report. The same number means the same report again.
    pub sequence: u64,
}

/// Main function's report of the work of its remote functions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RemoteWorkReport {
    /// Time since the main function started.
    pub age: Duration,
    /// Total time that remote functions have computed for it, by their addresses.
    pub computed: BTreeMap<String, Duration>,
}

/// Recent load reports, and the times at which replicas of each function were last added.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LoadHistory {
    gateways: BTreeMap<String, VecDeque<GatewayReport>>,
    /// Reports of main functions, each with the time of its arrival.
    mains: BTreeMap<String, VecDeque<(Duration, RemoteWorkReport)>>,
    /// Time when observation began.
    observed_since: Option<Duration>,
    /// Times when replicas of each function were last added.
    last_raised: BTreeMap<String, Duration>,
    /// Last decided number of replicas of each function.
    wanted: BTreeMap<String, u32>,
}

impl LoadHistory {
    /// Adds the report of `gateway` if it is a new one. Drops reports that are older than `window` at `now`.
    pub fn add_gateway_report(
        &mut self,
        gateway: &str,
        report: GatewayReport,
        window: Duration,
        now: Duration,
    ) {
        let known = self.gateways.entry(gateway.to_owned()).or_default();
        let follows = |last: &GatewayReport| match report.sequence == last.sequence {
            true => ReportOrder::Repeated,
            // The gateway was restarted, or its clock was set back.
            false if report.at <= last.at || report.occupied < last.occupied => ReportOrder::Restarted,
            false => ReportOrder::Next,
        };
        add_report(known, report, follows, |report| report.at + window < now);
    }

    /// Adds the report of the main function `main` in the same way.
    pub fn add_work_report(&mut self, main: &str, worked: RemoteWorkReport, window: Duration, now: Duration) {
        let known = self.mains.entry(main.to_owned()).or_default();
        let age = worked.age;
        let follows = |(_, last): &(Duration, RemoteWorkReport)| match age.cmp(&last.age) {
            Ordering::Equal => ReportOrder::Repeated,
            Ordering::Less => ReportOrder::Restarted,
            Ordering::Greater => ReportOrder::Next,
        };
        add_report(known, (now, worked), follows, |(at, _)| *at + window < now);
    }

    /// Drops the reports of gateways and main functions that no longer exist.
    pub fn retain(&mut self, gateway_lives: impl Fn(&str) -> bool, main_lives: impl Fn(&str) -> bool) {
        self.gateways.retain(|gateway, _| gateway_lives(gateway));
        self.mains.retain(|main, _| main_lives(main));
    }

    /// Starts the observation at `now`, if it has not started.
    pub fn start_at(&mut self, now: Duration) {
        self.observed_since.get_or_insert(now);
    }

    /// Records the decision that `function` should have `wanted` replicas. Returns the previous decision.
    pub fn set_wanted(&mut self, function: &str, wanted: u32) -> Option<u32> {
        self.wanted.insert(function.to_owned(), wanted)
    }

    /// Records that replicas of `function` were added at `now`. None of the function is removed before a window has
    /// passed.
    pub fn record_raise(&mut self, function: &str, now: Duration) {
        self.start_at(now);
        self.last_raised.insert(function.to_owned(), now);
    }

    /// Reports if replicas of `function` may be removed.
    pub(crate) fn may_lower(&self, function: &str, now: Duration, window: Duration) -> bool {
        let is_long_ago = |at: Duration| now.saturating_sub(at) >= window;
        self.observed_since.is_some_and(is_long_ago)
            && self.last_raised.get(function).copied().is_none_or(is_long_ago)
    }

    /// Returns the average number of requests that waited or ran in the last `span`. After its last report, a gateway
    /// counts with the number in that report.
    pub(crate) fn requests(&self, now: Duration, span: Duration) -> f64 {
        self.gateways.values().map(|reports| average(reports, now, span)).sum()
    }

    /// Returns the present number of requests, if any of them has waited for at least `min_wait`. Requests wait if
    /// all slots are in use or no main function runs.
    pub(crate) fn delayed_requests(&self, now: Duration, min_wait: Duration) -> Option<f64> {
        let waits = |reports: &VecDeque<GatewayReport>| {
            let mut latest = reports.iter().rev();
            let Some(last) = latest.next().filter(|last| last.waiting > 0) else { return false };
            let since =
                latest.take_while(|report| report.waiting > 0).last().map_or(last.at, |first| first.at);
            now.saturating_sub(since) >= min_wait
        };
        let last = self.gateways.values().filter_map(VecDeque::back);
        self.gateways.values().any(waits).then(|| last.map(|report| f64::from(report.requests)).sum())
    }

    /// Returns the average load of the remote functions at `addresses` in the last `span`: seconds of work per
    /// second, summed over all main functions.
    pub(crate) fn busy(&self, addresses: &[String], now: Duration, span: Duration) -> f64 {
        let load = |reports: &VecDeque<(Duration, RemoteWorkReport)>| {
            let (_, last) = reports.back()?;
            // Reports are rare compared with a burst: at least the latest two are used.
            let begin = now.saturating_sub(span);
            let before = reports.iter().rev().skip(1);
            let (_, first) = before.clone().find(|(at, _)| *at <= begin).or_else(|| before.last())?;
            let time = last.age.saturating_sub(first.age).as_secs_f64();
            let computed = |worked: &RemoteWorkReport, address| {
                worked.computed.get(address).copied().unwrap_or_default()
            };
            let sum: Duration = addresses
                .iter()
                .map(|address| computed(last, address).saturating_sub(computed(first, address)))
                .sum();
            (time > 0.0).then(|| sum.as_secs_f64() / time)
        };
        self.mains.values().filter_map(load).sum()
    }
}

/// Relation of a report to the previous one.
enum ReportOrder {
    /// Repetition of the previous report.
    Repeated,
    /// A later report of the same process.
    Next,
    /// The reporting process was restarted.
    Restarted,
}

/// Adds `report` to `reports`. Drops old reports except the last one, and those beyond [`MAX_REPORTS`].
fn add_report<T>(
    reports: &mut VecDeque<T>,
    report: T,
    follows: impl Fn(&T) -> ReportOrder,
    is_old: impl Fn(&T) -> bool,
) {
    match reports.back().map_or(ReportOrder::Next, follows) {
        ReportOrder::Repeated => {}
        ReportOrder::Next => reports.push_back(report),
        ReportOrder::Restarted => *reports = VecDeque::from([report]),
    }
    while reports.len() > MAX_REPORTS || reports.get(1).is_some_and(&is_old) {
        reports.pop_front();
    }
}

/// Returns the average number of requests in the last `span`, by the differences between successive reports.
fn average(reports: &VecDeque<GatewayReport>, now: Duration, span: Duration) -> f64 {
    let Some(last) = reports.back() else { return 0.0 };
    let begin = now.saturating_sub(span);
    let within = |from: Duration, to: Duration| to.min(now).saturating_sub(from.max(begin)).as_secs_f64();
    let tail = within(last.at, now);
    let (mut sum, mut time) = (f64::from(last.requests) * tail, tail);
    for (before, next) in reports.iter().zip(reports.iter().skip(1)) {
        let interval = next.at.saturating_sub(before.at).as_secs_f64();
        let requests = next.occupied.saturating_sub(before.occupied).as_secs_f64() / interval;
        let length = within(before.at, next.at);
        (sum, time) = (sum + requests * length, time + length);
    }
    // The time is 0 if the gateway's clock is ahead.
    if time > 0.0 { sum / time } else { f64::from(last.requests) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn second(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn report(at: u64, occupied: u64, requests: u32) -> GatewayReport {
        GatewayReport {
            at: second(at),
            occupied: second(occupied),
            requests,
            waiting: 0,
            sequence: at + occupied,
        }
    }

    fn worked(age: u64, computed: &[(&str, u64)]) -> RemoteWorkReport {
        let computed = computed.iter().map(|(address, time)| ((*address).to_owned(), second(*time)));
        RemoteWorkReport { age: second(age), computed: computed.collect() }
    }

    fn close(one: f64, other: f64) -> bool {
        (one - other).abs() < 1e-9
    }

    #[test]
    fn requests_are_averaged_by_time_however_often_reported() {
        let mut history = LoadHistory::default();
        // Ten requests for ten seconds, then none, without another report.
        for (at, occupied, requests) in [(100, 0, 10), (110, 100, 0)] {
            history.add_gateway_report("a", report(at, occupied, requests), MINUTE, second(at));
        }
        assert!(close(history.requests(second(110), second(6)), 10.0));
        assert!(close(history.requests(second(120), second(20)), 5.0));
        assert!(close(history.requests(second(160), MINUTE), 100.0 / 60.0));
        assert!(close(history.requests(second(200), MINUTE), 0.0));
        // The last reported number counts until the next report. Gateways add up.
        history.add_gateway_report("b", report(200, 0, 3), MINUTE, second(200));
        assert!(close(history.requests(second(230), MINUTE), 3.0));
        history.add_gateway_report("a", report(230, 130, 1), MINUTE, second(230));
        // 30 request-seconds in 120 s of a, as far as anybody knows.
        assert!(close(history.requests(second(230), MINUTE), 3.0 + 0.25));
    }

    #[test]
    fn repeated_report_counts_once_and_restart_is_no_load() {
        let mut history = LoadHistory::default();
        history.add_gateway_report("a", report(100, 50, 1), MINUTE, second(100));
        history.add_gateway_report(
            "a",
            GatewayReport { requests: 9, ..report(100, 50, 1) },
            MINUTE,
            second(101),
        );
        assert!(close(history.requests(second(110), MINUTE), 1.0));
        history.add_gateway_report("a", report(120, 0, 0), MINUTE, second(120));
        assert!(close(history.requests(second(130), MINUTE), 0.0));
        history.retain(|gateway| gateway != "a", |_| true);
        history.add_gateway_report("b", report(130, 0, 2), MINUTE, second(130));
        assert!(close(history.requests(second(131), MINUTE), 2.0));
    }

    #[test]
    fn function_busyness_sums_over_all_main_functions() {
        let mut history = LoadHistory::default();
        let busy =
            |history: &LoadHistory, now| history.busy(&["x".to_owned(), "y".to_owned()], second(now), MINUTE);
        history.add_work_report("one", worked(1_000, &[("x", 500), ("z", 9)]), MINUTE, second(10));
        assert!(close(busy(&history, 10), 0.0));
        history.add_work_report("one", worked(1_020, &[("x", 510), ("y", 4), ("z", 29)]), MINUTE, second(30));
        history.add_work_report("two", worked(7, &[("x", 3)]), MINUTE, second(30));
        history.add_work_report("two", worked(17, &[("x", 6)]), MINUTE, second(40));
        assert!(close(busy(&history, 40), 0.5 + 0.2 + 0.3));
        // The same report again, and a process that began again.
        history.add_work_report("one", worked(1_020, &[]), MINUTE, second(50));
        history.add_work_report("two", worked(2, &[("x", 1)]), MINUTE, second(50));
        assert!(close(busy(&history, 50), 0.7));
        history.retain(|_| true, |main| main != "one");
        assert!(close(busy(&history, 50), 0.0));
    }

    #[test]
    fn no_replica_is_removed_within_a_window() {
        let mut history = LoadHistory::default();
        let may = |history: &LoadHistory, function, now| history.may_lower(function, second(now), MINUTE);
        assert!(!may(&history, "main", 500));
        history.start_at(second(100));
        history.start_at(second(130));
        for function in ["main", "g0"] {
            assert!(!may(&history, function, 159) && may(&history, function, 160), "{function}");
        }
        history.record_raise("g0", second(150));
        assert!(!may(&history, "g0", 209) && may(&history, "g0", 210));
        assert!(may(&history, "main", 160), "nothing was added to it");
    }

    #[test]
    fn number_of_reports_is_bounded() {
        let mut history = LoadHistory::default();
        for at in 0..10_000 {
            history.add_gateway_report("a", report(at, at, 1), MINUTE, second(at));
            history.add_work_report("m", worked(at, &[]), MINUTE, second(at));
        }
        assert!(history.gateways["a"].len() <= 62 && history.mains["m"].len() <= 62);
        for at in 0..10_000_u64 {
            let at = Duration::from_millis(10_000_000 + at);
            let at_once =
                GatewayReport { at, sequence: 100_000 + at.as_millis() as u64, ..report(0, 20_000, 1) };
            history.add_gateway_report("a", at_once, MINUTE, second(10_000));
        }
        assert!(history.gateways["a"].len() <= MAX_REPORTS);
    }
}
