//! Integer amounts: prices, the cost of time, and shares that add up exactly.

use serde::{Deserialize, Serialize};

/// Nanoseconds per hour.
const HOUR_NANOSECONDS: u128 = 3_600_000_000_000;

/// Price of a function in nano-dollars per hour.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rate(pub u64);

impl Rate {
    /// Returns the rate of `dollars` per second; 0 for negative numbers and NaN.
    #[must_use]
    pub fn per_second(dollars: f64) -> Self {
        // The conversion saturates, and takes NaN for 0.
        Self((dollars * 3600.0 * 1e9).round() as u64)
    }

    /// Returns the cost of `nanoseconds` in nano-dollars, rounded down.
    #[must_use]
    pub fn cost(self, nanoseconds: u64) -> u64 {
        Carry::default().charge(self, nanoseconds)
    }
}

/// Fraction of a nano-dollar that was not charged yet. With it, successive charges add up to the cost of their total
/// time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Carry(u64);

impl Carry {
    /// Returns the nano-dollars of `nanoseconds` at `rate` and of the carried fraction, rounded down. Carries the
    /// remainder.
    pub fn charge(&mut self, rate: Rate, nanoseconds: u64) -> u64 {
        let owed = u128::from(rate.0) * u128::from(nanoseconds) + u128::from(self.0);
        // The remainder is below HOUR_NANOSECONDS, and so fits.
        self.0 = (owed % HOUR_NANOSECONDS) as u64;
        u64::try_from(owed / HOUR_NANOSECONDS).unwrap_or(u64::MAX)
    }
}

/// Splits `total` in proportion to `weights`. The shares add up to `total`, and each differs from its exact value by
/// less than 1. If all weights are 0, all shares are 0.
pub fn split(total: u64, weights: impl Iterator<Item = u64> + Clone) -> impl Iterator<Item = u64> {
    let total_weight: u128 = weights.clone().map(u128::from).sum();
    let mut shared = 0_u64;
    let mut weight_so_far = 0_u128;
    weights.map(move |weight| {
        weight_so_far += u128::from(weight);
        // At most `total`, and the product of two 64-bit numbers and a count fits 128 bits.
        let share_so_far = (u128::from(total) * weight_so_far).checked_div(total_weight).unwrap_or(0) as u64;
        let share = share_so_far - shared;
        shared = share_so_far;
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
            let total_weight: u128 = weights.iter().map(|&weight| u128::from(weight)).sum();
            prop_assert_eq!(shares.iter().sum::<u64>(), if total_weight > 0 { total } else { 0 });
            for (share, weight) in shares.iter().zip(&weights).filter(|_| total_weight > 0) {
                let exact = u128::from(total) * u128::from(*weight) / total_weight;
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
    fn hour_costs_the_rate() {
        assert_eq!(Rate::per_second(0.044 / 3600.0), Rate(44_000_000));
        assert_eq!(Rate(44_000_000).cost(3_600_000_000_000), 44_000_000);
        assert_eq!(Rate::per_second(f64::NAN), Rate(0));
    }
}
