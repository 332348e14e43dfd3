//! Numbers of requests that several gateways remember: by time, and hardly ever the same twice.

use std::hash::{BuildHasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

/// Bits of a number that are drawn, below those of the time. Two gateways that number requests in the same millisecond give
/// the same number to one pair in a million, of which the second is then taken for known.
const DRAWN: u32 = 20;
/// Milliseconds by which another gateway's clock may be ahead.
const CLOCKS: u64 = 24 * 3600 * 1000;

/// Gives numbers, each larger than the one before.
#[derive(Debug)]
pub(crate) struct RecordNumbers {
    last: u64,
    draw: RandomState,
}

impl RecordNumbers {
    pub(crate) fn new() -> Self {
        Self { last: 0, draw: RandomState::new() }
    }

    /// The next one.
    pub(crate) fn draw(&mut self) -> u64 {
        let drawn = self.draw.hash_one(self.last) & ((1 << DRAWN) - 1);
        // A clock that was set back, or a second number in a millisecond.
        self.last = self.last.saturating_add(1).max(milliseconds() << DRAWN | drawn);
        self.last
    }

    /// Makes all further numbers larger than `number`.
    pub(crate) fn passed(&mut self, number: u64) {
        if is_possible(number) {
            self.last = self.last.max(number);
        }
    }
}

/// Reports if a gateway may have drawn `number` by now.
pub(crate) fn is_possible(number: u64) -> bool {
    number >> DRAWN <= milliseconds().saturating_add(CLOCKS)
}

fn milliseconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX) & (u64::MAX >> DRAWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_grow_and_two_gateways_give_different_ones() {
        let [mut one, mut other] = [RecordNumbers::new(), RecordNumbers::new()];
        let of = |numbers: &mut RecordNumbers| -> Vec<u64> { (0..100).map(|_| numbers.draw()).collect() };
        let (ones, others) = (of(&mut one), of(&mut other));
        assert!(ones.is_sorted_by(|a, b| a < b) && others.is_sorted_by(|a, b| a < b));
        assert_ne!(ones, others);
        assert!(ones.iter().all(|number| is_possible(*number)));
    }

    #[test]
    fn impossible_number_holds_up_no_other() {
        let mut numbers = RecordNumbers::new();
        numbers.passed(u64::MAX);
        assert!(numbers.draw() < numbers.draw());
        let before = numbers.draw();
        numbers.passed(before + (1 << 30));
        assert!(numbers.draw() > before + (1 << 30), "a clock that was set back");
    }
}
