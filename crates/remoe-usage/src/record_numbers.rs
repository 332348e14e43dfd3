//! Record numbers that ascend in time and are unique among gateways.

use std::hash::{BuildHasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

/// Random low bits of a number, below its milliseconds. Two gateways that number a request in the same millisecond
/// collide once in a million pairs; the second request is then taken for known.
const RANDOM_BITS: u32 = 20;
/// Tolerated clock skew between gateways, in milliseconds.
const MAX_CLOCK_SKEW_MS: u64 = 24 * 3600 * 1000;

/// Generator of ascending record numbers.
#[derive(Debug)]
pub(crate) struct RecordNumberGenerator {
    last: u64,
    hasher: RandomState,
}

impl RecordNumberGenerator {
    pub(crate) fn new() -> Self {
        Self { last: 0, hasher: RandomState::new() }
    }

    /// Returns the next number.
    pub(crate) fn next_number(&mut self) -> u64 {
        let random = self.hasher.hash_one(self.last) & ((1 << RANDOM_BITS) - 1);
        // The increment covers a clock that was set back and a second number in one millisecond.
        self.last = self.last.saturating_add(1).max(milliseconds() << RANDOM_BITS | random);
        self.last
    }

    /// Makes all further numbers larger than `number`, unless `number` is impossible.
    pub(crate) fn advance_past(&mut self, number: u64) {
        if is_possible(number) {
            self.last = self.last.max(number);
        }
    }
}

/// Returns true if the time in `number` is not beyond the tolerated clock skew.
pub(crate) fn is_possible(number: u64) -> bool {
    number >> RANDOM_BITS <= milliseconds().saturating_add(MAX_CLOCK_SKEW_MS)
}

fn milliseconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX) & (u64::MAX >> RANDOM_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_ascend_and_differ_between_gateways() {
        let [mut one, mut other] = [RecordNumberGenerator::new(), RecordNumberGenerator::new()];
        let hundred = |numbers: &mut RecordNumberGenerator| -> Vec<u64> {
            (0..100).map(|_| numbers.next_number()).collect()
        };
        let (ones, others) = (hundred(&mut one), hundred(&mut other));
        assert!(ones.is_sorted_by(|a, b| a < b) && others.is_sorted_by(|a, b| a < b));
        assert_ne!(ones, others);
        assert!(ones.iter().all(|number| is_possible(*number)));
    }

    #[test]
    fn impossible_number_does_not_block_later_ones() {
        let mut numbers = RecordNumberGenerator::new();
        numbers.advance_past(u64::MAX);
        assert!(numbers.next_number() < numbers.next_number());
        let before = numbers.next_number();
        numbers.advance_past(before + (1 << 30));
        assert!(numbers.next_number() > before + (1 << 30), "a clock that was set back");
    }
}
