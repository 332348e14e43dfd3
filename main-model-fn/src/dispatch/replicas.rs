//! Load and circuit breaker of each replica, and the choice of replicas for a message.
//!
//! The replica with the least work in flight is best. Replicas that were late are left out for a while. Equally loaded
//! replicas take turns.

use super::link::Link;
use super::pace::ReplicaPace;
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// First pause of a replica that was late.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause: the pause doubles each time that the replica is late again.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Time without any answer after which a late replica counts as hanging.
const HANG_TIMEOUT: Duration = Duration::from_secs(10);

/// State of all replicas of the routing generation in force.
#[derive(Default)]
pub(super) struct Replicas {
    by_link: HashMap<u64, Replica>,
    /// Rotation among equally loaded replicas, by layer and host class.
    rotations: HashMap<(usize, usize), usize>,
}

/// State of one replica.
#[derive(Default)]
struct Replica {
    pace: ReplicaPace,
    /// Units of work that it has not answered.
    in_flight: u64,
    pause: Option<BreakerPause>,
    /// Time of the oldest message since its last answer.
    silent_since: Option<Instant>,
    /// Late message that is no longer needed. Its answer still tells how fast the replica is.
    measured_late: Option<LateMessage>,
}

/// Late message whose answer is awaited only to measure the replica.
#[derive(Debug, Clone, Copy)]
struct LateMessage {
    id: u64,
    units: u64,
    sent: Instant,
}

/// Pause of a replica that was late: the circuit is open.
#[derive(Debug, Clone, Copy)]
struct BreakerPause {
    until: Instant,
    length: Duration,
}

impl Replicas {
    /// Drops the state of replicas that are not among `links`.
    pub(super) fn retain_links(&mut self, links: &[Link]) {
        let ids: BTreeSet<u64> = links.iter().map(Link::id).collect();
        self.by_link.retain(|id, _| ids.contains(id));
        self.rotations.clear();
    }

    /// Begins a layer call: messages of earlier calls are no longer in flight.
    pub(super) fn begin_call(&mut self) {
        self.by_link.values_mut().for_each(|replica| replica.in_flight = 0);
    }

    /// Returns the `hosts` that can take work, best first: link index and units in flight.
    ///
    /// Leaves out hosts in `tried` and paused ones. `rotation` is the layer and host class.
    pub(super) fn rank_available(
        &mut self,
        links: &[Link],
        hosts: &[usize],
        rotation: (usize, usize),
        tried: &BTreeSet<usize>,
        now: Instant,
    ) -> Vec<(usize, u64)> {
        let hosts = hosts.iter().map(|&index| (index, &links[index]));
        let available = hosts.filter(|(index, link)| {
            !tried.contains(index) && link.is_ready() && !self.is_paused(link.id(), now)
        });
        let available: Vec<(usize, u64)> = available
            .map(|(index, link)| (index, self.by_link.get(&link.id()).map_or(0, |replica| replica.in_flight)))
            .collect();
        let turn = self.rotations.entry(rotation).or_default();
        *turn = turn.wrapping_add(1);
        rank(available, *turn)
    }

    fn is_paused(&self, link: u64, now: Instant) -> bool {
        let pause = self.by_link.get(&link).and_then(|replica| replica.pause);
        pause.is_some_and(|pause| now < pause.until)
    }

    /// Returns the pace of the slowest of `links`; unmeasured if one of them is.
    pub(super) fn slowest_pace(&self, links: impl Iterator<Item = u64>) -> ReplicaPace {
        let paces =
            links.map(|link| self.by_link.get(&link).map_or(ReplicaPace::default(), |replica| replica.pace));
        let slower = |a: ReplicaPace, b: ReplicaPace| match (a.best_seconds(1), b.best_seconds(1)) {
            (None, _) => a,
            (Some(a_best), Some(b_best)) if a_best >= b_best => a,
            _ => b,
        };
        paces.reduce(slower).unwrap_or_default()
    }

    /// Records that `units` of work were sent to `link`.
    pub(super) fn record_sent(&mut self, link: u64, units: u64, now: Instant) {
        let replica = self.by_link.entry(link).or_default();
        // If nothing is in flight or awaited, earlier messages were cancelled: silence about them means nothing.
        if replica.in_flight == 0 && replica.measured_late.is_none() {
            replica.silent_since = None;
        }
        replica.in_flight += units;
        replica.silent_since.get_or_insert(now);
    }

    /// Returns how long to wait for the work in flight on `link`, at least `least`.
    pub(super) fn timeout(&self, link: u64, least: Duration) -> Duration {
        let replica = self.by_link.get(&link);
        replica.map_or_else(
            || ReplicaPace::default().timeout(0, least),
            |replica| replica.pace.timeout(replica.in_flight, least),
        )
    }

    /// Records that an answer to message `id` came from `link`, needed or not. `took` is the compute time that it reports.
    pub(super) fn record_reply(&mut self, link: u64, id: u64, took: Option<Duration>) {
        if let Some(replica) = self.by_link.get_mut(&link) {
            replica.silent_since = None;
            let late = replica.measured_late.take_if(|late| late.id == id);
            if let Some(LateMessage { units, sent, .. }) = late {
                if let Some(took) = took {
                    // A reported time above the time since sending is wrong.
                    replica.pace.observe(units, took.min(sent.elapsed()));
                }
                replica.end_pause();
            }
        }
    }

    /// Records that the late message `id` is no longer needed. Returns true if its answer is awaited nevertheless, to
    /// measure the replica; this happens for one message at a time.
    pub(super) fn keeps_for_measurement(&mut self, link: u64, id: u64, units: u64, sent: Instant) -> bool {
        let replica = self.by_link.entry(link).or_default();
        let is_kept = replica.measured_late.is_none();
        replica.measured_late.get_or_insert(LateMessage { id, units, sent });
        is_kept
    }

    /// Removes `units` of work from those in flight on `link`.
    pub(super) fn release(&mut self, link: u64, units: u64) {
        if let Some(replica) = self.by_link.get_mut(&link) {
            replica.in_flight = replica.in_flight.saturating_sub(units);
        }
    }

    /// Records that `link` answered `units` of work, computed in `took`. `is_late`: after its timeout.
    pub(super) fn record_answer(&mut self, link: u64, units: u64, took: Duration, is_late: bool) {
        self.release(link, units);
        if let Some(replica) = self.by_link.get_mut(&link) {
            replica.pace.observe(units, took);
            match is_late {
                // The next pause still doubles: only an answer in time resets the circuit breaker.
                true => replica.end_pause(),
                false => replica.pause = None,
            }
        }
    }

    /// Records that `link` has not answered in time, and pauses it, longer each time. Returns true if it hangs: nothing has
    /// come from it for [`HANG_TIMEOUT`].
    pub(super) fn mark_late(&mut self, link: u64, now: Instant) -> bool {
        let replica = self.by_link.entry(link).or_default();
        let from_now = |length: Duration| BreakerPause { until: now + length, length };
        replica.pause = Some(match replica.pause {
            // The messages of one call are late together.
            Some(pause) if now < pause.until => pause,
            Some(pause) => from_now((pause.length * 2).min(MAX_PAUSE)),
            None => from_now(FIRST_PAUSE),
        });
        let hangs = replica.silent_since.is_some_and(|since| now.duration_since(since) >= HANG_TIMEOUT);
        if hangs {
            replica.silent_since = None;
        }
        hangs
    }

    /// Records that the stream of `link` has ended: nothing in flight will be answered.
    pub(super) fn record_broken(&mut self, link: u64) {
        if let Some(replica) = self.by_link.get_mut(&link) {
            replica.in_flight = 0;
            replica.silent_since = None;
            replica.measured_late = None;
        }
    }
}

impl Replica {
    /// Ends the pause, because an answer shows that the replica works.
    fn end_pause(&mut self) {
        if let Some(pause) = &mut self.pause {
            pause.until = pause.until.min(Instant::now());
        }
    }
}

/// Sorts (link index, units in flight) by units. Equally loaded replicas start at another one with each `turn`.
fn rank(mut available: Vec<(usize, u64)>, turn: usize) -> Vec<(usize, u64)> {
    if !available.is_empty() {
        let first = turn % available.len();
        available.rotate_left(first);
    }
    available.sort_by_key(|&(_, in_flight)| in_flight);
    available
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn least_loaded_replica_is_first_and_equal_ones_take_turns() {
        assert_eq!(rank(vec![(0, 5), (1, 2), (2, 9)], 1), [(1, 2), (0, 5), (2, 9)]);
        let turns: Vec<_> = (0..4).map(|turn| rank(vec![(0, 7), (3, 7), (5, 7)], turn)[0].0).collect();
        assert_eq!(turns, [0, 3, 5, 0]);
        assert!(rank(Vec::new(), 3).is_empty());
    }

    #[test]
    fn circuit_breaker_doubles_until_replica_answers_in_time() {
        let mut replicas = Replicas::default();
        let mut now = Instant::now();
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            assert!(!replicas.is_paused(7, now));
            // Two messages of the same call.
            replicas.mark_late(7, now);
            replicas.mark_late(7, now);
            now += Duration::from_secs(seconds);
            assert!(replicas.is_paused(7, now - Duration::from_millis(1)), "{seconds} s");
        }
        replicas.mark_late(7, now);
        replicas.record_answer(7, 1, Duration::from_millis(1), true);
        assert!(!replicas.is_paused(7, Instant::now()), "it works");
        replicas.record_answer(7, 1, Duration::from_millis(1), false);
        replicas.mark_late(7, now);
        assert!(!replicas.is_paused(7, now + FIRST_PAUSE), "the next pause is short again");
    }

    #[test]
    fn only_a_silent_replica_hangs() {
        let mut replicas = Replicas::default();
        let start = Instant::now();
        let before = HANG_TIMEOUT.checked_sub(Duration::from_millis(1)).map(|before| start + before);
        replicas.record_sent(7, 1, start);
        assert!(!replicas.mark_late(7, before.unwrap_or(start)));
        replicas.record_reply(7, 1, None);
        assert!(!replicas.mark_late(7, start + HANG_TIMEOUT), "an answer to any message counts");
        replicas.record_sent(7, 1, start);
        replicas.record_sent(7, 1, start + HANG_TIMEOUT);
        assert!(replicas.mark_late(7, start + HANG_TIMEOUT));
        assert!(!replicas.mark_late(7, start + HANG_TIMEOUT), "reported once");
    }

    #[test]
    fn cancelled_work_does_not_count_as_silence() {
        let mut replicas = Replicas::default();
        let start = Instant::now();
        replicas.record_sent(7, 1, start);
        replicas.release(7, 1);
        replicas.record_sent(7, 1, start + HANG_TIMEOUT);
        assert!(
            !replicas.mark_late(7, start + HANG_TIMEOUT + Duration::from_secs(1)),
            "last message: 1 s ago"
        );
        // A message that is awaited for measurement still counts.
        replicas.record_sent(8, 1, start);
        assert!(replicas.keeps_for_measurement(8, 1, 1, start));
        replicas.release(8, 1);
        replicas.record_sent(8, 1, start + HANG_TIMEOUT);
        assert!(replicas.mark_late(8, start + HANG_TIMEOUT + Duration::from_secs(1)));
    }

    #[test]
    fn late_answer_still_updates_the_pace() {
        let mut replicas = Replicas::default();
        // Early enough for the compute times below.
        let now = Instant::now().checked_sub(Duration::from_secs(2)).unwrap();
        let least = Duration::from_millis(1);
        replicas.record_sent(7, 10, now);
        replicas.mark_late(7, Instant::now());
        assert!(replicas.keeps_for_measurement(7, 1, 10, now));
        assert!(!replicas.keeps_for_measurement(7, 2, 10, now), "one at a time");
        replicas.record_reply(7, 2, Some(Duration::from_secs(9)));
        assert!(replicas.is_paused(7, Instant::now()));
        replicas.record_reply(7, 1, Some(Duration::from_secs(1)));
        assert!(!replicas.is_paused(7, Instant::now()), "it works");
        assert_eq!(replicas.timeout(7, least), Duration::from_secs(8));
        assert!(replicas.keeps_for_measurement(7, 3, 10, now));
        replicas.record_broken(7);
        assert!(replicas.keeps_for_measurement(7, 4, 10, now), "a broken stream answers nothing");
    }

    #[test]
    fn work_in_flight_lengthens_the_timeout() {
        let mut replicas = Replicas::default();
        let now = Instant::now();
        let least = Duration::from_millis(1);
        replicas.record_sent(1, 10, now);
        replicas.record_answer(1, 10, Duration::from_secs(1), false);
        replicas.record_sent(1, 10, now);
        let one = replicas.timeout(1, least);
        replicas.record_sent(1, 10, now);
        assert_eq!(replicas.timeout(1, least), 2 * one);
        replicas.release(1, 10);
        assert_eq!(replicas.timeout(1, least), one);
        replicas.begin_call();
        assert_eq!(replicas.timeout(1, least), least);
    }
}
