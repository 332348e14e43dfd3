//! Changes that turn a verdict.

use remoe_plan::way::Way;
use serde::Serialize;

/// Figure that is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FlipFigure {
    /// Rate of requests.
    ArrivalRate,
    /// Price of the GPU.
    GpuPrice,
    /// Bytes of the experts, and the time that they take.
    ModelSize,
    /// The limit of the time per output token.
    Tpot,
}

/// A change that turns the verdict.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VerdictFlip {
    /// Figure that is changed.
    pub cause: FlipFigure,
    /// Factor: the nearest that was found to turn it.
    pub factor: f64,
    /// Value there: requests per hour, seconds; the factor itself for prices and sizes.
    pub at: f64,
    /// The cheapest way then, as far as work was left to search it.
    pub best: Way,
    /// In words, as the end of a sentence.
    pub words: String,
}

/// Changes that turn a verdict.
#[derive(Debug, Default)]
pub(crate) struct VerdictFlips {
    pub(crate) found: Vec<VerdictFlip>,
    /// Causes of which that is not known.
    pub(crate) undecided: Vec<FlipFigure>,
}
