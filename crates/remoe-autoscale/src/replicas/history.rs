//! Recent reports of load by gateways and main functions.

use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Reports kept of one gateway or main function: one a second in a burst, for a minute and more.
const MOST_SAID: usize = 128;

/// A gateway's report of its requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GatewayReport {
    /// When, since any fixed moment.
    pub at: Duration,
    /// How long its requests have waited or been worked on since it started, all together.
    pub occupied: Duration,
    /// Requests that wait or are worked on at that time.
    pub requests: u32,
    /// Waiting ones among them.
    pub waiting: u32,
    /// Differs from that of the word before: what was said again is no news.
    pub sequence: u64,
}

/// A main function's report of the remote functions that it calls.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Worked {
    /// Since when it runs.
    pub age: Duration,
    /// How long they have computed for it so far, by their addresses.
    pub computed: BTreeMap<String, Duration>,
}

/// Recent reports, and when replicas of each function were last added.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct History {
    gateways: BTreeMap<String, VecDeque<GatewayReport>>,
    /// With when it was heard.
    mains: BTreeMap<String, VecDeque<(Duration, Worked)>>,
    /// When this began.
    since: Option<Duration>,
    /// When replicas of a function were last added.
    raised: BTreeMap<String, Duration>,
    /// Replicas that there were to be of each function, as far as that is known.
    wanted: BTreeMap<String, u32>,
}

impl History {
    /// Takes note of what `gateway` said, where it is news, and forgets what is older than `window` at `now`.
    pub fn note(&mut self, gateway: &str, said: GatewayReport, window: Duration, now: Duration) {
        let known = self.gateways.entry(gateway.to_owned()).or_default();
        let follows = |last: &GatewayReport| match said.sequence == last.sequence {
            true => ReportOrder::Same,
            // It started again, or its clock was set back.
            false if said.at <= last.at || said.occupied < last.occupied => ReportOrder::Nothing,
            false => ReportOrder::On,
        };
        hear(known, said, follows, |said| said.at + window < now);
    }

    /// Takes note of what the main function `main` said, likewise.
    pub fn note_work(&mut self, main: &str, worked: Worked, window: Duration, now: Duration) {
        let known = self.mains.entry(main.to_owned()).or_default();
        let age = worked.age;
        let follows = |(_, last): &(Duration, Worked)| match age.cmp(&last.age) {
            Ordering::Equal => ReportOrder::Same,
            Ordering::Less => ReportOrder::Nothing,
            Ordering::Greater => ReportOrder::On,
        };
        hear(known, (now, worked), follows, |(at, _)| *at + window < now);
    }

    /// Forgets all but the gateways and main functions that live.
    pub fn keep(&mut self, gateway_lives: impl Fn(&str) -> bool, main_lives: impl Fn(&str) -> bool) {
        self.gateways.retain(|gateway, _| gateway_lives(gateway));
        self.mains.retain(|main, _| main_lives(main));
    }

    /// Begins to listen at `now`: later reports count.
    pub fn look(&mut self, now: Duration) {
        self.since.get_or_insert(now);
    }

    /// There are to be `wanted` replicas of `function`; how many there were to be until now.
    pub fn want(&mut self, function: &str, wanted: u32) -> Option<u32> {
        self.wanted.insert(function.to_owned(), wanted)
    }

    /// Replicas of `function` were added: none of them is taken away before a window has passed. Others follow their own load.
    pub fn raised(&mut self, function: &str, now: Duration) {
        self.look(now);
        self.raised.insert(function.to_owned(), now);
    }

    /// Reports if replicas of `function` may be taken away.
    pub(crate) fn may_lower(&self, function: &str, now: Duration, window: Duration) -> bool {
        let is_long_ago = |at: Duration| now.saturating_sub(at) >= window;
        self.since.is_some_and(is_long_ago) && self.raised.get(function).copied().is_none_or(is_long_ago)
    }

    /// Requests that waited or ran at the same time in the last `span`, on average. Who has said nothing since goes on with
    /// as many.
    pub(crate) fn requests(&self, now: Duration, span: Duration) -> f64 {
        self.gateways.values().map(|said| average(said, now, span)).sum()
    }

    /// Requests that there are now where any of them has waited for `patience`: all main functions have what they have room
    /// for, or none runs.
    pub(crate) fn requests_that_wait(&self, now: Duration, patience: Duration) -> Option<f64> {
        let waits = |said: &VecDeque<GatewayReport>| {
            let mut latest = said.iter().rev();
            let Some(last) = latest.next().filter(|last| last.waiting > 0) else { return false };
            let since = latest.take_while(|said| said.waiting > 0).last().map_or(last.at, |first| first.at);
            now.saturating_sub(since) >= patience
        };
        let last = self.gateways.values().filter_map(VecDeque::back);
        self.gateways.values().any(waits).then(|| last.map(|said| f64::from(said.requests)).sum())
    }

    /// Seconds a second in which those of `addresses` computed in the last `span`, on average and all together, for all main
    /// functions, as far as these have said.
    pub(crate) fn busy(&self, addresses: &[String], now: Duration, span: Duration) -> f64 {
        let of = |said: &VecDeque<(Duration, Worked)>| {
            let (_, last) = said.back()?;
            // Words are rare beside a burst: at least the latest two count.
            let begin = now.saturating_sub(span);
            let before = said.iter().rev().skip(1);
            let (_, first) = before.clone().find(|(at, _)| *at <= begin).or_else(|| before.last())?;
            let time = last.age.saturating_sub(first.age).as_secs_f64();
            let computed =
                |worked: &Worked, address| worked.computed.get(address).copied().unwrap_or_default();
            let sum: Duration =
                addresses.iter().map(|it| computed(last, it).saturating_sub(computed(first, it))).sum();
            (time > 0.0).then(|| sum.as_secs_f64() / time)
        };
        self.mains.values().filter_map(of).sum()
    }
}

/// How a word follows the one before.
enum ReportOrder {
    /// It is the same once more.
    Same,
    /// It goes on from there.
    On,
    /// The reporting process began again.
    Nothing,
}

/// Adds `word` to what is `known`, and keeps of that what is not old, the last word before, and no more than there may be.
fn hear<T>(
    known: &mut VecDeque<T>,
    word: T,
    follows: impl Fn(&T) -> ReportOrder,
    is_old: impl Fn(&T) -> bool,
) {
    match known.back().map_or(ReportOrder::On, follows) {
        ReportOrder::Same => {}
        ReportOrder::On => known.push_back(word),
        ReportOrder::Nothing => *known = VecDeque::from([word]),
    }
    while known.len() > MOST_SAID || known.get(1).is_some_and(&is_old) {
        known.pop_front();
    }
}

fn average(said: &VecDeque<GatewayReport>, now: Duration, span: Duration) -> f64 {
    let Some(last) = said.back() else { return 0.0 };
    let begin = now.saturating_sub(span);
    let within = |from: Duration, to: Duration| to.min(now).saturating_sub(from.max(begin)).as_secs_f64();
    let tail = within(last.at, now);
    let (mut sum, mut time) = (f64::from(last.requests) * tail, tail);
    for (before, next) in said.iter().zip(said.iter().skip(1)) {
        let interval = next.at.saturating_sub(before.at).as_secs_f64();
        let requests = next.occupied.saturating_sub(before.occupied).as_secs_f64() / interval;
        let length = within(before.at, next.at);
        (sum, time) = (sum + requests * length, time + length);
    }
    // A clock that is ahead.
    if time > 0.0 { sum / time } else { f64::from(last.requests) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn second(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn said(at: u64, occupied: u64, requests: u32) -> GatewayReport {
        GatewayReport {
            at: second(at),
            occupied: second(occupied),
            requests,
            waiting: 0,
            sequence: at + occupied,
        }
    }

    fn worked(age: u64, computed: &[(&str, u64)]) -> Worked {
        let computed = computed.iter().map(|(address, time)| ((*address).to_owned(), second(*time)));
        Worked { age: second(age), computed: computed.collect() }
    }

    fn close(one: f64, other: f64) -> bool {
        (one - other).abs() < 1e-9
    }

    #[test]
    fn requests_are_averaged_by_time_however_often_gateways_speak() {
        let mut history = History::default();
        // Ten requests for ten seconds, then none, of which nothing is said.
        for (at, occupied, requests) in [(100, 0, 10), (110, 100, 0)] {
            history.note("a", said(at, occupied, requests), MINUTE, second(at));
        }
        assert!(close(history.requests(second(110), second(6)), 10.0));
        assert!(close(history.requests(second(120), second(20)), 5.0));
        assert!(close(history.requests(second(160), MINUTE), 100.0 / 60.0));
        assert!(close(history.requests(second(200), MINUTE), 0.0));
        // What runs goes on until something else is said; several gateways add up.
        history.note("b", said(200, 0, 3), MINUTE, second(200));
        assert!(close(history.requests(second(230), MINUTE), 3.0));
        history.note("a", said(230, 130, 1), MINUTE, second(230));
        // 30 request-seconds in 120 s of a, as far as anybody knows.
        assert!(close(history.requests(second(230), MINUTE), 3.0 + 0.25));
    }

    #[test]
    fn the_same_word_counts_once_and_a_new_start_is_no_load() {
        let mut history = History::default();
        history.note("a", said(100, 50, 1), MINUTE, second(100));
        history.note("a", GatewayReport { requests: 9, ..said(100, 50, 1) }, MINUTE, second(101));
        assert!(close(history.requests(second(110), MINUTE), 1.0));
        history.note("a", said(120, 0, 0), MINUTE, second(120));
        assert!(close(history.requests(second(130), MINUTE), 0.0));
        history.keep(|gateway| gateway != "a", |_| true);
        history.note("b", said(130, 0, 2), MINUTE, second(130));
        assert!(close(history.requests(second(131), MINUTE), 2.0));
    }

    #[test]
    fn function_busyness_sums_over_all_main_functions() {
        let mut history = History::default();
        let busy =
            |history: &History, now| history.busy(&["x".to_owned(), "y".to_owned()], second(now), MINUTE);
        history.note_work("one", worked(1_000, &[("x", 500), ("z", 9)]), MINUTE, second(10));
        assert!(close(busy(&history, 10), 0.0));
        history.note_work("one", worked(1_020, &[("x", 510), ("y", 4), ("z", 29)]), MINUTE, second(30));
        history.note_work("two", worked(7, &[("x", 3)]), MINUTE, second(30));
        history.note_work("two", worked(17, &[("x", 6)]), MINUTE, second(40));
        assert!(close(busy(&history, 40), 0.5 + 0.2 + 0.3));
        // The same report again, and a process that began again.
        history.note_work("one", worked(1_020, &[]), MINUTE, second(50));
        history.note_work("two", worked(2, &[("x", 1)]), MINUTE, second(50));
        assert!(close(busy(&history, 50), 0.7));
        history.keep(|_| true, |main| main != "one");
        assert!(close(busy(&history, 50), 0.0));
    }

    #[test]
    fn nothing_is_taken_away_within_a_window() {
        let mut history = History::default();
        let may = |history: &History, function, now| history.may_lower(function, second(now), MINUTE);
        assert!(!may(&history, "main", 500));
        history.look(second(100));
        history.look(second(130));
        for function in ["main", "g0"] {
            assert!(!may(&history, function, 159) && may(&history, function, 160), "{function}");
        }
        history.raised("g0", second(150));
        assert!(!may(&history, "g0", 209) && may(&history, "g0", 210));
        assert!(may(&history, "main", 160), "nothing was added to it");
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut history = History::default();
        for at in 0..10_000 {
            history.note("a", said(at, at, 1), MINUTE, second(at));
            history.note_work("m", worked(at, &[]), MINUTE, second(at));
        }
        assert!(history.gateways["a"].len() <= 62 && history.mains["m"].len() <= 62);
        for at in 0..10_000_u64 {
            let at = Duration::from_millis(10_000_000 + at);
            let at_once =
                GatewayReport { at, sequence: 100_000 + at.as_millis() as u64, ..said(0, 20_000, 1) };
            history.note("a", at_once, MINUTE, second(10_000));
        }
        assert!(history.gateways["a"].len() <= MOST_SAID);
    }
}
