//! State of each replica with its circuit breaker, and the choice of one for a message: the one with the least work in
//! flight, never one that has just been late, in turns where they are equal.

use super::link::Link;
use super::pace::ReplicaPace;
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// A replica that was late gets no work for at least this long ..
const FIRST_REST: Duration = Duration::from_secs(1);
/// .. and, late again and again, for at most this long.
const LONGEST_REST: Duration = Duration::from_secs(30);
/// A replica that was late, and from which nothing has come for this long although it was asked, hangs.
const SILENCE: Duration = Duration::from_secs(10);

/// All replicas that a routing generation names.
#[derive(Default)]
pub(super) struct Replicas {
    by_link: HashMap<u64, Replica>,
    /// Turn among equal replicas, per layer and class of its remote experts.
    turns: HashMap<(usize, usize), usize>,
}

/// One replica.
#[derive(Default)]
struct Replica {
    pace: ReplicaPace,
    /// Units of work that it owes.
    in_flight: u64,
    rest: Option<BreakerPause>,
    /// Since when it has been asked without a sign of life.
    asked: Option<Instant>,
    /// A message that it was late with and that needs no answer any more, with its units: when the
    /// answer comes nevertheless it says how fast the replica is.
    overdue: Option<Overdue>,
}

/// An attempt whose answer only says how fast its replica is.
#[derive(Debug, Clone, Copy)]
struct Overdue {
    id: u64,
    units: u64,
    sent: Instant,
}

/// A pause of a replica that was late.
#[derive(Debug, Clone, Copy)]
struct BreakerPause {
    until: Instant,
    length: Duration,
}

impl Replicas {
    /// Forgets replicas that are not among `links`.
    pub(super) fn keep(&mut self, links: &[Link]) {
        let ids: BTreeSet<u64> = links.iter().map(Link::id).collect();
        self.by_link.retain(|id, _| ids.contains(id));
        self.turns.clear();
    }

    /// A layer call begins: nothing that earlier ones sent is waited for any more.
    pub(super) fn begin(&mut self) {
        self.by_link.values_mut().for_each(|replica| replica.in_flight = 0);
    }

    /// Returns those of `hosts`, indices of links, that can take work and are not in `tried`, with the units that
    /// they owe, best first. Leaves out replicas that rest. `turn_of` names the layer and the class whose hosts they
    /// are.
    pub(super) fn ranked(
        &mut self,
        links: &[Link],
        hosts: &[usize],
        turn_of: (usize, usize),
        tried: &BTreeSet<usize>,
        now: Instant,
    ) -> Vec<(usize, u64)> {
        let hosts = hosts.iter().map(|&index| (index, &links[index]));
        let able = hosts
            .filter(|(index, link)| !tried.contains(index) && link.is_ready() && !self.rests(link.id(), now));
        let able: Vec<(usize, u64)> = able
            .map(|(index, link)| (index, self.by_link.get(&link.id()).map_or(0, |it| it.in_flight)))
            .collect();
        let turn = self.turns.entry(turn_of).or_default();
        *turn = turn.wrapping_add(1);
        rank(able, *turn)
    }

    fn rests(&self, link: u64, now: Instant) -> bool {
        let rest = self.by_link.get(&link).and_then(|replica| replica.rest);
        rest.is_some_and(|rest| now < rest.until)
    }

    /// How fast the slowest of `links` is; not measured where one is not.
    pub(super) fn slowest(&self, links: impl Iterator<Item = u64>) -> ReplicaPace {
        let paces = links.map(|link| self.by_link.get(&link).map_or(ReplicaPace::default(), |it| it.pace));
        let slower = |a: ReplicaPace, b: ReplicaPace| match (a.at_best(1), b.at_best(1)) {
            (None, _) => a,
            (Some(a_best), Some(b_best)) if a_best >= b_best => a,
            _ => b,
        };
        paces.reduce(slower).unwrap_or_default()
    }

    /// `units` of work leave for `link`.
    pub(super) fn sent(&mut self, link: u64, units: u64, now: Instant) {
        let replica = self.by_link.entry(link).or_default();
        // What was asked before and is neither owed nor waited for any more was cancelled: it says nothing.
        if replica.in_flight == 0 && replica.overdue.is_none() {
            replica.asked = None;
        }
        replica.in_flight += units;
        replica.asked.get_or_insert(now);
    }

    /// How long to wait for what `link` owes.
    pub(super) fn patience(&self, link: u64, least: Duration) -> Duration {
        let replica = self.by_link.get(&link);
        replica.map_or_else(
            || ReplicaPace::default().patience(0, least),
            |replica| replica.pace.patience(replica.in_flight, least),
        )
    }

    /// Records that the answer `id` came from `link`, wanted or not; `took` is how long its rows were computed.
    pub(super) fn heard(&mut self, link: u64, id: u64, took: Option<Duration>) {
        if let Some(replica) = self.by_link.get_mut(&link) {
            replica.asked = None;
            if let Some(Overdue { units, sent, .. }) = replica.overdue.take_if(|overdue| overdue.id == id) {
                if let Some(took) = took {
                    // No function computes for longer than it was waited for, whatever it says.
                    replica.pace.observe(units, took.min(sent.elapsed()));
                }
                replica.wake();
            }
        }
    }

    /// Abandons the answer `id` of `link`, which is late; `units` is the work, `sent` when it left. Returns true if
    /// the answer is awaited nevertheless, to learn from it: once at a time.
    pub(super) fn learns_from(&mut self, link: u64, id: u64, units: u64, sent: Instant) -> bool {
        let replica = self.by_link.entry(link).or_default();
        let learns = replica.overdue.is_none();
        replica.overdue.get_or_insert(Overdue { id, units, sent });
        learns
    }

    /// `units` of work will not come from `link` any more.
    pub(super) fn gone(&mut self, link: u64, units: u64) {
        if let Some(replica) = self.by_link.get_mut(&link) {
            replica.in_flight = replica.in_flight.saturating_sub(units);
        }
    }

    /// `link` has answered `units` that it computed in `took`; `late`: after another was asked.
    pub(super) fn answered(&mut self, link: u64, units: u64, took: Duration, late: bool) {
        self.gone(link, units);
        if let Some(replica) = self.by_link.get_mut(&link) {
            replica.pace.observe(units, took);
            match late {
                // That it was late is only forgotten when it is not.
                true => replica.wake(),
                false => replica.rest = None,
            }
        }
    }

    /// `link` has not answered in time: it rests, and longer each time. True when nothing has come
    /// from it for so long that it must be given up.
    pub(super) fn late(&mut self, link: u64, now: Instant) -> bool {
        let replica = self.by_link.entry(link).or_default();
        let from_now = |length: Duration| BreakerPause { until: now + length, length };
        replica.rest = Some(match replica.rest {
            // The messages of one call are late together.
            Some(rest) if now < rest.until => rest,
            Some(rest) => from_now((rest.length * 2).min(LONGEST_REST)),
            None => from_now(FIRST_REST),
        });
        let silent = replica.asked.is_some_and(|asked| now.duration_since(asked) >= SILENCE);
        if silent {
            replica.asked = None;
        }
        silent
    }

    /// The stream of `link` has ended, and with it all that was owed.
    pub(super) fn broken(&mut self, link: u64) {
        if let Some(replica) = self.by_link.get_mut(&link) {
            replica.in_flight = 0;
            replica.asked = None;
            replica.overdue = None;
        }
    }
}

impl Replica {
    /// It works after all: nothing is gained by leaving it alone.
    fn wake(&mut self) {
        if let Some(rest) = &mut self.rest {
            rest.until = rest.until.min(Instant::now());
        }
    }
}

/// (index, units in flight) by work in flight; equals in an order that begins another time each turn.
fn rank(mut able: Vec<(usize, u64)>, turn: usize) -> Vec<(usize, u64)> {
    if !able.is_empty() {
        let first = turn % able.len();
        able.rotate_left(first);
    }
    able.sort_by_key(|&(_, in_flight)| in_flight);
    able
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_least_work_comes_first_and_equals_take_turns() {
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
            assert!(!replicas.rests(7, now));
            // Two messages of the same call.
            replicas.late(7, now);
            replicas.late(7, now);
            now += Duration::from_secs(seconds);
            assert!(replicas.rests(7, now - Duration::from_millis(1)), "{seconds} s");
        }
        replicas.late(7, now);
        replicas.answered(7, 1, Duration::from_millis(1), true);
        assert!(!replicas.rests(7, Instant::now()), "it works after all");
        replicas.answered(7, 1, Duration::from_millis(1), false);
        replicas.late(7, now);
        assert!(!replicas.rests(7, now + FIRST_REST), "the next rest is short again");
    }

    #[test]
    fn only_what_keeps_silent_hangs() {
        let mut replicas = Replicas::default();
        let start = Instant::now();
        let before = SILENCE.checked_sub(Duration::from_millis(1)).map(|before| start + before);
        replicas.sent(7, 1, start);
        assert!(!replicas.late(7, before.unwrap_or(start)));
        replicas.heard(7, 1, None);
        assert!(!replicas.late(7, start + SILENCE), "an answer, however old the question");
        replicas.sent(7, 1, start);
        replicas.sent(7, 1, start + SILENCE);
        assert!(replicas.late(7, start + SILENCE));
        assert!(!replicas.late(7, start + SILENCE), "it is given up once");
    }

    #[test]
    fn cancelled_work_is_no_silence() {
        let mut replicas = Replicas::default();
        let start = Instant::now();
        replicas.sent(7, 1, start);
        replicas.gone(7, 1);
        replicas.sent(7, 1, start + SILENCE);
        assert!(!replicas.late(7, start + SILENCE + Duration::from_secs(1)), "it was asked a second ago");
        // What is waited for, to learn from it, still counts.
        replicas.sent(8, 1, start);
        assert!(replicas.learns_from(8, 1, 1, start));
        replicas.gone(8, 1);
        replicas.sent(8, 1, start + SILENCE);
        assert!(replicas.late(8, start + SILENCE + Duration::from_secs(1)));
    }

    #[test]
    fn late_answer_still_updates_speed_of_its_replica() {
        let mut replicas = Replicas::default();
        // Long enough ago for what the answer will say.
        let now = Instant::now().checked_sub(Duration::from_secs(2)).unwrap();
        let least = Duration::from_millis(1);
        replicas.sent(7, 10, now);
        replicas.late(7, Instant::now());
        assert!(replicas.learns_from(7, 1, 10, now));
        assert!(!replicas.learns_from(7, 2, 10, now), "one is enough");
        replicas.heard(7, 2, Some(Duration::from_secs(9)));
        assert!(replicas.rests(7, Instant::now()));
        replicas.heard(7, 1, Some(Duration::from_secs(1)));
        assert!(!replicas.rests(7, Instant::now()), "it works after all");
        assert_eq!(replicas.patience(7, least), Duration::from_secs(8));
        assert!(replicas.learns_from(7, 3, 10, now));
        replicas.broken(7);
        assert!(replicas.learns_from(7, 4, 10, now), "nothing comes over a broken stream");
    }

    #[test]
    fn what_is_in_flight_lengthens_patience() {
        let mut replicas = Replicas::default();
        let now = Instant::now();
        let least = Duration::from_millis(1);
        replicas.sent(1, 10, now);
        replicas.answered(1, 10, Duration::from_secs(1), false);
        replicas.sent(1, 10, now);
        let one = replicas.patience(1, least);
        replicas.sent(1, 10, now);
        assert_eq!(replicas.patience(1, least), 2 * one);
        replicas.gone(1, 10);
        assert_eq!(replicas.patience(1, least), one);
        replicas.begin();
        assert_eq!(replicas.patience(1, least), least);
    }
}
