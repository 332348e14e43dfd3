//! Daily spending of tenants and models, at this gateway and at others that share the budgets.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Duration of a day in nanoseconds.
pub(crate) const DAY: u64 = 86_400_000_000_000;
/// Largest number of other gateways whose spending is remembered, including gateways that have ended today.
const MAX_GATEWAYS: usize = 1024;

/// Tenant or model whose spending is limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Payer<'a> {
    /// Tenant, for all models together.
    Tenant(&'a str),
    /// Model, for all tenants together.
    Model(&'a str),
}

impl fmt::Display for Payer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tenant(name) => write!(f, "tenant {name}"),
            Self::Model(name) => write!(f, "model {name}"),
        }
    }
}

/// Returns the daily budget `dollars` in nano-dollars; `None` outside of 1e-9 to 1e9.
pub(crate) fn nanodollars(dollars: f64) -> Option<u64> {
    (1e-9..=1e9).contains(&dollars).then(|| (dollars * 1e9).round() as u64)
}

/// Spending of one day (UTC) in nano-dollars.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaySpending {
    /// Days since 1970.
    pub(crate) day: u64,
    /// Nano-dollars by tenant.
    #[serde(default)]
    pub(crate) tenants: BTreeMap<String, u64>,
    /// Nano-dollars by model.
    #[serde(default)]
    pub(crate) models: BTreeMap<String, u64>,
}

impl DaySpending {
    /// Makes an empty record of the day of `now`, which is in nanoseconds since 1970.
    pub(crate) fn on_day_of(now: u64) -> Self {
        Self { day: now / DAY, ..Self::default() }
    }

    /// Starts over if a new day has begun.
    pub(crate) fn begin_day(&mut self, now: u64) {
        if now / DAY > self.day {
            *self = Self::on_day_of(now);
        }
    }

    /// Adds `amount` nano-dollars, the cost of a request of `tenant` to `model` that ended `at` nanoseconds since
    /// 1970.
    pub(crate) fn add(&mut self, at: u64, model: &str, tenant: &str, amount: u64) {
        self.begin_day(at);
        for (spent, name) in [(&mut self.models, model), (&mut self.tenants, tenant)] {
            match spent.get_mut(name) {
                Some(spent) => *spent = spent.saturating_add(amount),
                None => drop(spent.insert(name.to_owned(), amount)),
            }
        }
    }

    /// Returns what `payer` has spent.
    pub(crate) fn spent_by(&self, payer: Payer<'_>) -> u64 {
        let spent = match payer {
            Payer::Tenant(name) => self.tenants.get(name),
            Payer::Model(name) => self.models.get(name),
        };
        spent.copied().unwrap_or(0)
    }

    /// Returns the spending of `payers` alone.
    pub(crate) fn only<'a>(&self, payers: impl Iterator<Item = Payer<'a>>) -> Self {
        let mut part = Self { day: self.day, ..Self::default() };
        for payer in payers {
            let (spent, name) = match payer {
                Payer::Tenant(name) => (&mut part.tenants, name),
                Payer::Model(name) => (&mut part.models, name),
            };
            spent.insert(name.to_owned(), self.spent_by(payer));
        }
        part
    }
}

/// Spending reported by other gateways, by their names.
#[derive(Debug, Default)]
pub(crate) struct OtherGatewaySpending(BTreeMap<String, DaySpending>);

impl OtherGatewaySpending {
    /// Takes a report of `gateway`. Within a day amounts never fall: a restarted gateway may report less than it did
    /// before.
    pub(crate) fn report(&mut self, gateway: &str, now: u64, reported: DaySpending) {
        self.0.retain(|_, spent| spent.day >= now / DAY);
        if reported.day < now / DAY {
            return;
        }
        if let Some(known) = self.0.get_mut(gateway).filter(|known| known.day == reported.day) {
            for (known, reported) in
                [(&mut known.tenants, reported.tenants), (&mut known.models, reported.models)]
            {
                for (name, spent) in reported {
                    let known = known.entry(name).or_default();
                    *known = spent.max(*known);
                }
            }
            return;
        }
        if self.0.len() < MAX_GATEWAYS || self.0.contains_key(gateway) {
            self.0.insert(gateway.to_owned(), reported);
        }
    }

    /// Returns the nano-dollars that `payer` has spent at other gateways on the day of `now`.
    pub(crate) fn spent_by(&self, payer: Payer<'_>, now: u64) -> u64 {
        let today = self.0.values().filter(|spent| spent.day == now / DAY);
        today.fold(0, |sum, spent| sum.saturating_add(spent.spent_by(payer)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn spent(day: u64, amount: u64) -> DaySpending {
        let mut spent = DaySpending::on_day_of(day * DAY);
        spent.add(day * DAY, "m", "t", amount);
        spent
    }

    #[test]
    fn reports_of_gateways_add_up_and_never_fall() {
        let mut elsewhere = OtherGatewaySpending::default();
        let sum = |elsewhere: &OtherGatewaySpending, day| elsewhere.spent_by(Payer::Tenant("t"), day * DAY);
        elsewhere.report("a", DAY, spent(1, 5));
        elsewhere.report("b", DAY, spent(1, 7));
        elsewhere.report("a", DAY, spent(1, 6));
        elsewhere.report("b", DAY, spent(1, 2));
        assert_eq!((sum(&elsewhere, 1), elsewhere.spent_by(Payer::Model("m"), DAY)), (13, 13));
        assert_eq!(elsewhere.spent_by(Payer::Tenant("other"), DAY), 0);
        assert_eq!(sum(&elsewhere, 2), 0, "a new day");
        elsewhere.report("a", 2 * DAY, spent(1, 100));
        elsewhere.report("b", 2 * DAY, spent(2, 1));
        assert_eq!((sum(&elsewhere, 1), sum(&elsewhere, 2)), (0, 1), "yesterday is forgotten");
    }

    #[test]
    fn gateways_beyond_the_bound_are_left_out() {
        let mut elsewhere = OtherGatewaySpending::default();
        for number in 0..2 * MAX_GATEWAYS {
            elsewhere.report(&number.to_string(), DAY, spent(1, 1));
        }
        assert_eq!(elsewhere.spent_by(Payer::Tenant("t"), DAY), MAX_GATEWAYS as u64);
        elsewhere.report("0", DAY, spent(1, u64::MAX));
        assert_eq!(elsewhere.spent_by(Payer::Tenant("t"), DAY), u64::MAX);
    }

    #[test]
    fn report_names_payers_with_a_budget_alone() {
        let all = spent(1, 5);
        let reported = all.only([Payer::Tenant("t"), Payer::Model("n")].into_iter());
        let text = serde_json::to_string(&reported).unwrap();
        assert_eq!(text, r#"{"day":1,"tenants":{"t":5},"models":{"n":0}}"#);
        assert_eq!(serde_json::from_str::<DaySpending>(&text).unwrap(), reported);
    }
}
