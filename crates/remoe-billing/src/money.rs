//! Integer money: rates, what a time costs, and shares that add up to their whole.

use serde::{Deserialize, Serialize};

/// Nanoseconds of an hour, in which rates are stated.
const HOUR: u128 = 3_600_000_000_000;

/// Cost of a function while it is alive, in nano-dollars per hour.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rate(pub u64);

impl Rate {
    /// The rate of so many dollars per second; 0 for what is no price.
    #[must_use]
    pub fn per_second(dollars: f64) -> Self {
        // The conversion saturates, and takes NaN for 0.
        Self((dollars * 3600.0 * 1e9).round() as u64)
    }

    /// Nano-dollars of `nanoseconds`, rounded down.
    #[must_use]
    pub fn cost(self, nanoseconds: u64) -> u64 {
        Carry::default().charge(self, nanoseconds)
    }
}

/// The part of a nano-dollar that has not been charged yet: charges one after the other add up to what their times
/// cost together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Carry(u64);

impl Carry {
    /// Nano-dollars of `nanoseconds`, with what was left over before.
    pub fn charge(&mut self, rate: Rate, nanoseconds: u64) -> u64 {
        let owed = u128::from(rate.0) * u128::from(nanoseconds) + u128::from(self.0);
        // Less than an hour's nanoseconds are left; what is charged is at most what 600 years cost.
        self.0 = (owed % HOUR) as u64;
        u64::try_from(owed / HOUR).unwrap_or(u64::MAX)
    }
}

/// Splits `total` in proportion to `weights`: shares that add up to it, each less than 1 off its exact value. If all
/// weights are 0, so are all shares.
pub fn split(total: u64, weights: impl Iterator<Item = u64> + Clone) -> impl Iterator<Item = u64> {
    let whole: u128 = weights.clone().map(u128::from).sum();
    let mut before = 0_u64;
    let mut weight = 0_u128;
    weights.map(move |one| {
        weight += u128::from(one);
        // At most `total`. A product of two 64-bit numbers and a count of them fits.
        let until = (u128::from(total) * weight).checked_div(whole).unwrap_or(0) as u64;
        let share = until - before;
        before = until;
        share
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shares_add_up_and_are_fair(total in 0_u64..1 << 60, weights in prop::collection::vec(0_u64..1 << 40, 0..40)) {
            let shares: Vec<u64> = split(total, weights.iter().copied()).collect();
            let whole: u128 = weights.iter().map(|&weight| u128::from(weight)).sum();
            prop_assert_eq!(shares.iter().sum::<u64>(), if whole > 0 { total } else { 0 });
            for (share, weight) in shares.iter().zip(&weights).filter(|_| whole > 0) {
                let exact = u128::from(total) * u128::from(*weight) / whole;
                prop_assert!(u128::from(*share).abs_diff(exact) <= 1, "{} {}", share, exact);
            }
        }

        #[test]
        fn charges_add_up_to_what_their_times_cost_together(
            rate in 0_u64..1 << 50, times in prop::collection::vec(0_u64..1 << 40, 0..60),
        ) {
            let mut carry = Carry::default();
            let charged: u64 = times.iter().map(|time| carry.charge(Rate(rate), *time)).sum();
            prop_assert_eq!(charged, Rate(rate).cost(times.iter().sum()));
        }
    }

    #[test]
    fn an_hour_costs_its_rate() {
        assert_eq!(Rate::per_second(0.044 / 3600.0), Rate(44_000_000));
        assert_eq!(Rate(44_000_000).cost(3_600_000_000_000), 44_000_000);
        assert_eq!(Rate::per_second(f64::NAN), Rate(0));
    }
}
