//! Limits of latencies, and what they hold for.

use super::bounds::{LARGEST, SMALLEST, check_above_zero, check_between};
use crate::error::FieldError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Service-level objectives.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Slo {
    /// Seconds to the first token, cold start included.
    #[schemars(range(min = SMALLEST, max = LARGEST))]
    pub ttft_seconds: f64,
    /// Seconds per output token.
    #[schemars(range(min = SMALLEST, max = LARGEST))]
    pub tpot_seconds: f64,
    /// Seconds to the first token of a request that finds everything asleep; no limit where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = SMALLEST, max = LARGEST))]
    pub cold_ttft_seconds: Option<f64>,
    /// Share of requests that may wait for a start, 0 to 1; no limit where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub cold_share: Option<f64>,
    /// Quantile of requests that `ttft_seconds` and `tpot_seconds` limit under [`super::Arrivals`]; the mean where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantile: Option<Quantile>,
    /// Inter-token latency that the engine aims at beside prompts, in seconds; three decode iterations where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = SMALLEST, max = LARGEST))]
    pub target_itl_seconds: Option<f64>,
}

/// A quantile of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Quantile {
    /// The median.
    P50,
    /// The 95th percentile.
    P95,
    /// The 99th percentile.
    P99,
}

impl Quantile {
    /// Name in problems and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::P50 => "p50",
            Self::P95 => "p95",
            Self::P99 => "p99",
        }
    }

    /// Share of requests at or below it.
    pub fn share(self) -> f64 {
        match self {
            Self::P50 => 0.5,
            Self::P95 => 0.95,
            Self::P99 => 0.99,
        }
    }
}

impl Slo {
    /// Limits of what warm functions take.
    #[must_use]
    pub fn new(ttft_seconds: f64, tpot_seconds: f64) -> Self {
        Self {
            ttft_seconds,
            tpot_seconds,
            cold_ttft_seconds: None,
            cold_share: None,
            quantile: None,
            target_itl_seconds: None,
        }
    }

    /// Checks every limit.
    ///
    /// # Errors
    /// The first field with an impossible value.
    pub fn check(&self) -> Result<(), FieldError> {
        check_above_zero("slo.ttft_seconds", self.ttft_seconds, "seconds")?;
        check_above_zero("slo.tpot_seconds", self.tpot_seconds, "seconds")?;
        if let Some(seconds) = self.cold_ttft_seconds {
            check_above_zero("slo.cold_ttft_seconds", seconds, "seconds")?;
        }
        if let Some(seconds) = self.target_itl_seconds {
            check_above_zero("slo.target_itl_seconds", seconds, "seconds")?;
        }
        self.cold_share.map_or(Ok(()), |share| check_between("slo.cold_share", share, 0.0, 1.0, "a share"))
    }
}
