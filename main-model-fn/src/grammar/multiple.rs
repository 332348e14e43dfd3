//! Values of `multipleOf`, with a bounded least common multiple.

use super::schema::MAX_DIVISOR;

/// A decimal number.
#[derive(Clone, Copy)]
pub(super) struct Multiple {
    pub(super) digits: u64,
    places: u32,
}

impl Default for Multiple {
    fn default() -> Self {
        Self { digits: 1, places: 0 }
    }
}

impl Multiple {
    /// Converts a `multipleOf`; `None` if it has more digits than [`MAX_DIVISOR`].
    pub(super) fn of(number: f64) -> Option<Self> {
        let (mut digits, mut places) = (number.abs(), 0);
        while digits.fract() != 0.0 && places < 20 {
            (digits, places) = (digits * 10.0, places + 1);
        }
        (digits <= MAX_DIVISOR).then_some(Self { digits: (digits as u64).max(1), places })
    }

    /// Returns the least common multiple; saturates.
    pub(super) fn with(self, other: Self) -> Self {
        let places = self.places.max(other.places);
        let scaled = |one: Self| one.digits.saturating_mul(10_u64.saturating_pow(places - one.places));
        let (a, b) = (scaled(self), scaled(other));
        let (mut divisor, mut rest) = (a, b);
        while rest != 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        Self { digits: (a / divisor).saturating_mul(b), places }
    }
}
