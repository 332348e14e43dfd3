//! Rate limits: the request and token quotas of tenants. Pure: callers pass the time.

use std::time::{Duration, Instant};

/// Token bucket that refills at a steady rate and holds one minute's amount at most. Spending may exceed what is
/// available. Then requests wait until the debt has been refilled.
#[derive(Debug)]
pub(crate) struct RateLimit {
    per_minute: f64,
    /// Amount that can be spent now; negative: a debt.
    available: f64,
    refilled_at: Instant,
}

impl RateLimit {
    /// Makes a limit of `per_minute`, with all of it available at `now`.
    pub(crate) fn new(per_minute: u64, now: Instant) -> Self {
        let per_minute = per_minute as f64;
        Self { per_minute, available: per_minute, refilled_at: now }
    }

    /// Returns this new limit with no more available than `previous`, the limit that it replaces, has by now.
    pub(crate) fn with_debt_of(mut self, previous: Option<Self>) -> Self {
        if let Some(mut previous) = previous {
            previous.refill(self.refilled_at);
            self.available = self.available.min(previous.available);
            self.refilled_at = previous.refilled_at;
        }
        self
    }

    fn refill(&mut self, now: Instant) {
        let elapsed_seconds = now.saturating_duration_since(self.refilled_at).as_secs_f64();
        self.refilled_at = now.max(self.refilled_at);
        self.available = (self.available + elapsed_seconds * self.per_minute / 60.0).min(self.per_minute);
    }

    /// Returns the time from `now` until `amount` is available; zero if it is already.
    pub(crate) fn time_until_available(&mut self, amount: f64, now: Instant) -> Duration {
        self.refill(now);
        let missing = amount - self.available;
        if missing <= 0.0 {
            return Duration::ZERO;
        }
        // The quotient is finite: a rate is at least 1 per minute, and a debt at most one request's tokens.
        Duration::try_from_secs_f64(missing * 60.0 / self.per_minute).unwrap_or(Duration::MAX)
    }

    /// Spends `amount`, even if less is available.
    pub(crate) fn spend(&mut self, amount: f64, now: Instant) {
        self.refill(now);
        self.available -= amount;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spent_amount_is_refilled_within_a_minute() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut limit = RateLimit::new(60, start);
        assert_eq!(limit.time_until_available(1.0, at(0)), Duration::ZERO);
        limit.spend(100.0, at(0));
        assert_eq!(
            limit.time_until_available(1.0, at(0)),
            Duration::from_secs(41),
            "a debt of 40 and one more"
        );
        assert_eq!(limit.time_until_available(1.0, at(41)), Duration::ZERO);
        limit.spend(0.0, at(1000));
        assert_eq!(limit.time_until_available(60.0, at(1000)), Duration::ZERO);
        assert_eq!(
            limit.time_until_available(61.0, at(1000)),
            Duration::from_secs(1),
            "at most one minute's amount is available"
        );
    }

    #[test]
    fn new_limit_starts_with_what_the_old_one_has_refilled() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let follows = |seconds| {
            let mut spent = RateLimit::new(60, start);
            spent.spend(100.0, start);
            RateLimit::new(120, at(seconds)).with_debt_of(Some(spent))
        };
        assert_eq!(follows(3600).time_until_available(60.0, at(3600)), Duration::ZERO, "an hour later");
        assert_eq!(
            follows(40).time_until_available(1.0, at(40)),
            Duration::from_millis(500),
            "the debt was just paid"
        );
        assert_eq!(
            follows(0).time_until_available(1.0, start),
            Duration::from_millis(20_500),
            "paid at the new rate"
        );
    }
}
