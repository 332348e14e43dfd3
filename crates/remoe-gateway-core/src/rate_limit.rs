//! Rate limits, the request and token quota of tenants. Pure: the time is given.

use std::time::{Duration, Instant};

/// Rate limit as a bucket that fills at a steady rate, up to what a minute brings. It is paid afterwards: what is spent may
/// exceed what is left, and nothing is allowed until the debt is paid.
#[derive(Debug)]
pub(crate) struct RateLimit {
    per_minute: f64,
    left: f64,
    since: Instant,
}

impl RateLimit {
    /// Returns a limit of `per_minute`, all of it left at `now`.
    pub(crate) fn new(per_minute: u64, now: Instant) -> Self {
        let per_minute = per_minute as f64;
        Self { per_minute, left: per_minute, since: now }
    }

    /// Returns this limit, which begins now, with no more left than by now of the one `before` that it replaces.
    pub(crate) fn after(mut self, before: Option<Self>) -> Self {
        if let Some(mut before) = before {
            before.fill(self.since);
            (self.left, self.since) = (self.left.min(before.left), before.since);
        }
        self
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.since).as_secs_f64();
        self.since = now.max(self.since);
        self.left = (self.left + passed * self.per_minute / 60.0).min(self.per_minute);
    }

    /// Zero where `least` is left at `now`, else how long until it will be.
    pub(crate) fn wait(&mut self, least: f64, now: Instant) -> Duration {
        self.fill(now);
        let missing = least - self.left;
        if missing <= 0.0 {
            return Duration::ZERO;
        }
        // A rate is at least 1 a minute, a debt at most what a request may take.
        Duration::try_from_secs_f64(missing * 60.0 / self.per_minute).unwrap_or(Duration::MAX)
    }

    /// Takes `amount` away.
    pub(crate) fn spend(&mut self, amount: f64, now: Instant) {
        self.fill(now);
        self.left -= amount;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_spent_comes_back_within_a_minute() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut limit = RateLimit::new(60, start);
        assert_eq!(limit.wait(1.0, at(0)), Duration::ZERO);
        limit.spend(100.0, at(0));
        assert_eq!(limit.wait(1.0, at(0)), Duration::from_secs(41), "a debt of 40 and one more");
        assert_eq!(limit.wait(1.0, at(41)), Duration::ZERO);
        limit.spend(0.0, at(1000));
        assert_eq!(limit.wait(60.0, at(1000)), Duration::ZERO);
        assert_eq!(limit.wait(61.0, at(1000)), Duration::from_secs(1), "never more than a minute's");
    }

    #[test]
    fn what_had_come_back_is_there_for_the_limit_that_follows() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let follows = |seconds| {
            let mut spent = RateLimit::new(60, start);
            spent.spend(100.0, start);
            RateLimit::new(120, at(seconds)).after(Some(spent))
        };
        assert_eq!(follows(3600).wait(60.0, at(3600)), Duration::ZERO, "an hour later");
        assert_eq!(follows(40).wait(1.0, at(40)), Duration::from_millis(500), "the debt was just paid");
        assert_eq!(follows(0).wait(1.0, start), Duration::from_millis(20_500), "paid at the new rate");
    }
}
