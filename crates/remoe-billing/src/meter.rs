//! Conversion of nanoseconds of work to nano-dollars, in the main function that reports the cost.

use crate::money::{Carry, Rate};
use crate::share::{Phases, Share};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

/// Name of the main function in rates and shares. Remote functions are named by their addresses.
const MAIN: &str = "main";

/// Names of counterfactuals, other ways of serving whose cost is compared. Other names are dropped, because each name
/// is a metric series and a line of `remoe cost`.
pub const RIVALS: [&str; 4] = ["mix", "cpu", "gpu", "fetch"];

/// Reports if `name` is one of [`RIVALS`].
pub(crate) fn is_rival(name: &str) -> bool {
    RIVALS.contains(&name)
}

/// Prices of a deployment's functions, by `main` and the addresses of remote functions.
///
/// Written as text in nano-dollars per hour: `main=44000000;127.0.0.1:4001=9000000`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rates(pub BTreeMap<String, Rate>);

impl fmt::Display for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (name, rate)) in self.0.iter().enumerate() {
            let separator = if number == 0 { "" } else { ";" };
            write!(f, "{separator}{name}={}", rate.0)?;
        }
        Ok(())
    }
}

impl FromStr for Rates {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split(';').filter_map(|part| part.split_once('='));
        parts
            .map(|(name, rate)| Ok((name.to_owned(), Rate(rate.parse()?))))
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

/// Work of all functions for a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestWork {
    /// Work of the main function.
    pub main: WorkShare,
    /// Work of remote functions, by address.
    pub remote: BTreeMap<Arc<str>, WorkShare>,
    /// Nanoseconds since the main function began to serve.
    pub served: u64,
}

/// Work of one function for a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WorkShare {
    /// Nanoseconds of work for the request.
    pub share: Phases,
    /// Nanoseconds that the function has worked for all requests since it began to serve.
    pub busy: u64,
}

impl WorkShare {
    fn join(&mut self, other: Self) {
        self.share += other.share;
        self.busy = self.busy.max(other.busy);
    }
}

impl RequestWork {
    /// Adds the work of another prompt of the same request.
    pub fn join(&mut self, other: Self) {
        self.main.join(other.main);
        for (address, worked) in other.remote {
            self.remote.entry(address).or_default().join(worked);
        }
        self.served = self.served.max(other.served);
    }
}

/// Cost of a request, as its main function reports it to the writer of the ledger.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedCost {
    /// Shares by `main` and the addresses of remote functions. Their tiers are empty.
    pub shares: BTreeMap<String, Share>,
    /// Counterfactual costs in nano-dollars, by name.
    #[serde(default)]
    pub rivals: BTreeMap<String, u64>,
    /// Nanoseconds since the main function began to serve.
    pub served: u64,
}

impl ReportedCost {
    /// Removes counterfactuals other than [`RIVALS`], and bounds the costs of the rest by `max`. Returns the number
    /// of removed and bounded ones.
    pub fn bound_rivals(&mut self, max: u64) -> usize {
        let reported = self.rivals.len();
        self.rivals.retain(|name, _| is_rival(name));
        let mut changed = reported - self.rivals.len();
        for cost in self.rivals.values_mut().filter(|cost| **cost > max) {
            *cost = max;
            changed += 1;
        }
        changed
    }
}

/// Computes the cost of requests. Fractions of a nano-dollar are carried from one request to the next, so that all
/// requests together cost exactly what their total time costs.
#[derive(Debug, Default)]
pub struct Meter(Mutex<BTreeMap<String, Carry>>);

impl Meter {
    /// Returns the cost of `work` at `rates`. A function without a rate costs nothing.
    pub fn report(&self, work: &RequestWork, rates: &Rates) -> ReportedCost {
        // A panic cannot leave the carries inconsistent, so a poisoned lock is used as it is.
        let mut carries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Drops the carries of functions that have ended.
        carries.retain(|name, _| rates.0.contains_key(name));
        let mut share = |name: &str, worked: &WorkShare| {
            let WorkShare { share: work, busy } = *worked;
            let rate = rates.0.get(name).copied().unwrap_or_default();
            let carry = carries.entry(name.to_owned()).or_default();
            let prefill = carry.charge(rate, work.prefill);
            let cost = Phases { prefill, decode: carry.charge(rate, work.decode) };
            (name.to_owned(), Share { tier: String::new(), work, cost, busy })
        };
        let remote = work.remote.iter();
        let mut shares: BTreeMap<_, _> = remote.map(|(address, worked)| share(address, worked)).collect();
        shares.extend([share(MAIN, &work.main)]);
        ReportedCost { shares, rivals: BTreeMap::new(), served: work.served }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_text_and_back() {
        let rates = Rates([("main".to_owned(), Rate(5)), ("[::1]:80".to_owned(), Rate(7))].into());
        assert_eq!(rates.to_string(), "[::1]:80=7;main=5");
        assert_eq!(rates.to_string().parse::<Rates>().unwrap(), rates);
        assert!("main=x".parse::<Rates>().is_err());
    }

    #[test]
    fn requests_together_cost_what_their_time_costs() {
        let meter = Meter::default();
        let rates = Rates([("main".to_owned(), Rate(44_000_001)), ("a:1".to_owned(), Rate(9))].into());
        let work = RequestWork {
            main: WorkShare { share: Phases { prefill: 7_777, decode: 1_234_567 }, busy: 0 },
            remote: [("a:1".into(), WorkShare { share: Phases { prefill: 999, decode: 0 }, busy: 0 })].into(),
            served: 0,
        };
        let mut sum = Phases::default();
        for _ in 0..1000 {
            sum += meter.report(&work, &rates).shares[MAIN].cost;
        }
        assert_eq!(sum.sum(), Rate(44_000_001).cost(1000 * (7_777 + 1_234_567)));
        assert_eq!(
            meter.report(&work, &Rates::default()).shares[MAIN].cost,
            Phases::default(),
            "without a price nothing costs"
        );
    }

    #[test]
    fn rivals_have_known_names_and_bounded_costs() {
        let names = (0..20_000).map(|number| (format!("rival-{number}"), 1));
        let known = [("mix", 7), ("gpu", u64::MAX)].map(|(name, cost)| (name.to_owned(), cost));
        let mut reported = ReportedCost { rivals: names.chain(known).collect(), ..ReportedCost::default() };
        assert_eq!(reported.bound_rivals(1000), 20_001);
        assert_eq!(reported.rivals, [("mix".to_owned(), 7), ("gpu".to_owned(), 1000)].into());
        assert_eq!(reported.bound_rivals(1000), 0);
    }
}
