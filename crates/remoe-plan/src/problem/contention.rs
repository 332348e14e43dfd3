//! How functions of one machine slow each other down.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Neither more functions at the same time nor a larger factor is measured.
const LARGEST: f64 = 1e3;

/// Slowdown of experts while several functions of one machine compute theirs. Cores share the memory that weights are
/// read from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Contention {
    /// Number of functions that computed at the same time when it was measured. Fewer slow each other down by their
    /// part of it, more by no more than it.
    #[schemars(range(min = 2.0, max = LARGEST))]
    pub functions: u32,
    /// Factor of an expert's seconds in a decode step.
    #[schemars(range(min = 1.0, max = LARGEST))]
    pub step: f64,
    /// Factor of an expert's seconds in a prefill.
    #[schemars(range(min = 1.0, max = LARGEST))]
    pub prefill: f64,
}

impl Contention {
    /// Every figure by name, with its least and largest value and its unit.
    #[must_use]
    pub fn figures(&self) -> [(&'static str, f64, f64, f64, &'static str); 3] {
        [
            ("functions", f64::from(self.functions), 2.0, LARGEST, "functions"),
            ("step", self.step, 1.0, LARGEST, "a factor"),
            ("prefill", self.prefill, 1.0, LARGEST, "a factor"),
        ]
    }

    /// `measured` where so many functions compute at the same time.
    pub fn factor_among(self, functions: f64, measured: f64) -> f64 {
        let others = f64::from(self.functions) - 1.0;
        1.0 + (measured - 1.0) * ((functions - 1.0) / others).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contention_grows_up_to_the_measured_function_count() {
        let contention = Contention { functions: 4, step: 1.6, prefill: 1.0 };
        let step = |functions| (10.0 * contention.factor_among(functions, contention.step)).round();
        assert_eq!([0.2, 1.0, 2.0, 3.0, 4.0, 9.0].map(step), [10.0, 10.0, 12.0, 14.0, 16.0, 16.0]);
        assert_eq!(contention.factor_among(4.0, contention.prefill), 1.0);
    }
}
