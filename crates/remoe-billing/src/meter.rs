//! From nanoseconds of work to nano-dollars, where an answer is told what it cost.

use crate::money::{Carry, Rate};
use crate::share::{Phases, Share};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

/// The main function's own name among those that work for a request; remote ones are named by their address.
const MAIN: &str = "main";

/// Ways of serving whose counterfactual costs are stated. Records of others are left out: a name is a series of metrics and a
/// line of `remoe cost`.
pub const RIVALS: [&str; 4] = ["mix", "cpu", "gpu", "fetch"];

/// Returns true for the names in [`RIVALS`].
pub(crate) fn is_rival(name: &str) -> bool {
    RIVALS.contains(&name)
}

/// Cost of a deployment's functions while they are alive, by `main` and the addresses of remote ones.
///
/// As text: `main=44000000;127.0.0.1:4001=9000000`.
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

/// Work of functions for a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestWork {
    /// The main function.
    pub main: Worked,
    /// Remote functions, by address.
    pub remote: BTreeMap<Arc<str>, Worked>,
    /// Nanoseconds since the main function serves.
    pub served: u64,
}

/// Work of one function for a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Worked {
    /// Nanoseconds.
    pub share: Phases,
    /// Nanoseconds that it has worked for anybody since it serves.
    pub busy: u64,
}

impl Worked {
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
    /// By `main` and the addresses of remote functions; without tiers, which it does not know.
    pub shares: BTreeMap<String, Share>,
    /// Counterfactual costs, by the rival's name.
    #[serde(default)]
    pub rivals: BTreeMap<String, u64>,
    /// Nanoseconds since the main function serves.
    pub served: u64,
}

impl ReportedCost {
    /// Leaves out all but [`RIVALS`], and bounds their costs by `most`. Returns how many were left out or bounded.
    pub fn bound_rivals(&mut self, most: u64) -> usize {
        let told = self.rivals.len();
        self.rivals.retain(|name, _| is_rival(name));
        let mut wrong = told - self.rivals.len();
        for cost in self.rivals.values_mut().filter(|cost| **cost > most) {
            *cost = most;
            wrong += 1;
        }
        wrong
    }
}

/// Tells requests what they cost. Fractions of a nano-dollar are carried from one request to the next, so that all of
/// them together cost what the time of all of them together does.
#[derive(Debug, Default)]
pub struct Meter(Mutex<BTreeMap<String, Carry>>);

impl Meter {
    /// Returns the cost of `work` at `rates`; a function without a rate costs nothing.
    pub fn tell(&self, work: &RequestWork, rates: &Rates) -> ReportedCost {
        // Numbers that are right after every step.
        let mut carries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Functions that are gone leave what they carried.
        carries.retain(|name, _| rates.0.contains_key(name));
        let mut share = |name: &str, worked: &Worked| {
            let Worked { share: work, busy } = *worked;
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
            main: Worked { share: Phases { prefill: 7_777, decode: 1_234_567 }, busy: 0 },
            remote: [("a:1".into(), Worked { share: Phases { prefill: 999, decode: 0 }, busy: 0 })].into(),
            served: 0,
        };
        let mut sum = Phases::default();
        for _ in 0..1000 {
            sum += meter.tell(&work, &rates).shares[MAIN].cost;
        }
        assert_eq!(sum.sum(), Rate(44_000_001).cost(1000 * (7_777 + 1_234_567)));
        assert_eq!(
            meter.tell(&work, &Rates::default()).shares[MAIN].cost,
            Phases::default(),
            "without a price nothing costs"
        );
    }

    #[test]
    fn rivals_have_known_names_and_bounded_costs() {
        let names = (0..20_000).map(|number| (format!("rival-{number}"), 1));
        let known = [("mix", 7), ("gpu", u64::MAX)].map(|(name, cost)| (name.to_owned(), cost));
        let mut told = ReportedCost { rivals: names.chain(known).collect(), ..ReportedCost::default() };
        assert_eq!(told.bound_rivals(1000), 20_001);
        assert_eq!(told.rivals, [("mix".to_owned(), 7), ("gpu".to_owned(), 1000)].into());
        assert_eq!(told.bound_rivals(1000), 0);
    }
}
