//! Changes of one figure that change whether remote experts pay.

use remoe_plan::serving_strategy::ServingStrategy;
use serde::Serialize;

/// Figure of a problem that is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FlipFigure {
    /// Arrival rate of requests.
    ArrivalRate,
    /// Price of the GPU.
    GpuPrice,
    /// Bytes and seconds of the experts.
    ModelSize,
    /// Limit of the time per output token.
    Tpot,
}

/// Change of one figure that changes whether remote experts pay.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ComparisonFlip {
    /// Figure that is changed.
    pub cause: FlipFigure,
    /// The factor nearest to 1 that was found.
    pub factor: f64,
    /// Changed value: requests per hour or seconds; for prices and sizes the factor itself.
    pub at: f64,
    /// The cheapest strategy after the change, as far as work was left to search it.
    pub best: ServingStrategy,
    /// Description, as the end of a sentence.
    pub words: String,
}

/// All changes that change whether remote experts pay.
#[derive(Debug, Default)]
pub(crate) struct ComparisonFlips {
    pub(crate) found: Vec<ComparisonFlip>,
    /// Figures for which that is unknown.
    pub(crate) undecided: Vec<FlipFigure>,
}
