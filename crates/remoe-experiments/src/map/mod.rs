//! Map of regimes: the cheapest strategy to serve a model, over the size of the model and the request rate.
//!
//! A cell takes its costs from the planner: [`compare`] for prices per core, GB and GPU (`unit.rs`), [`rent`] for nodes
//! (`nodes.rs`). It takes each strategy on the platform and window with which it is cheapest.
//!
//! [`compare`]: remoe_planner::compare
//! [`rent`]: remoe_planner::rent

mod nodes;
mod subject;
mod unit;

use crate::error::ExperimentError;
pub use nodes::{ListRegime, rental};
use remoe_planner::{Request, ServingStrategy, Slo};
use serde::Serialize;
pub use subject::Subject;
pub use unit::{Platform, UnitRegime};

/// Request rates per day, from one request to a busy deployment.
pub const PER_DAY: [f64; 6] = [1.0, 10.0, 100.0, 1_000.0, 5_000.0, 15_000.0];

/// Idle window of functions that scale to zero, in seconds.
pub(crate) const IDLE_SECONDS: f64 = 300.0;
/// TPOT limit in seconds for more patient users than [`slo`] assumes.
pub(crate) const PATIENT_SECONDS: f64 = 0.5;
/// TPOT limit in seconds on modest nodes.
pub(crate) const SLOW_SECONDS: f64 = 1.0;
/// Seconds of a day.
pub(crate) const DAY: f64 = 86_400.0;

/// Strategies in the order of the map.
pub const STRATEGIES: [ServingStrategy; 6] = [
    ServingStrategy::Sliced,
    ServingStrategy::Layers,
    ServingStrategy::Mix,
    ServingStrategy::Cpu,
    ServingStrategy::Gpu,
    ServingStrategy::Fetch,
];

/// Returns the typical and largest requests of the map, with a concurrency of eight.
#[must_use]
pub fn request() -> Request {
    Request {
        input_tokens: 128.0,
        output_tokens: 199.0,
        max_input_tokens: Some(4096.0),
        max_output_tokens: Some(1024.0),
        concurrency: 8,
    }
}

/// Returns the limits of the map: 10 s to the first token, 300 ms for each further one.
#[must_use]
pub fn slo() -> Slo {
    Slo::new(10.0, 0.3)
}

/// One strategy at its cheapest within the limits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StrategyOffer {
    /// Strategy.
    pub way: ServingStrategy,
    /// Dollars in an hour; absent if it breaks the limits.
    pub dollars_per_hour: Option<f64>,
    /// Description of its hardware.
    pub on: String,
    /// Set if its functions scale to zero.
    pub sleeps: bool,
    /// Time to first token in seconds.
    pub ttft_seconds: Option<f64>,
    /// Time per output token in seconds.
    pub tpot_seconds: Option<f64>,
    /// Reason that it is infeasible; empty if it is feasible.
    pub why: String,
}

/// Offers for one model at one rate, and the cheapest of them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cell {
    /// The model's name.
    pub model: String,
    /// Mean requests per day.
    pub per_day: f64,
    /// The cheapest strategy; absent if none keeps the limits.
    pub best: Option<ServingStrategy>,
    /// Share of cost that the best strategy with remote experts saves against the best without. Below 0 if it is dearer;
    /// absent if either does not exist within the limits.
    pub saving: Option<f64>,
    /// All strategies, in the order of [`STRATEGIES`].
    pub offers: Vec<StrategyOffer>,
}

/// The cells of one set of prices and limits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Regime {
    /// Name in file names.
    pub name: String,
    /// Title.
    pub title: String,
    /// Description of limits and assumptions.
    pub limits: String,
    /// Cells by model, then by rising rate.
    pub cells: Vec<Cell>,
}

impl Regime {
    /// Computes the cells of all `subjects` at all rates by `cell`.
    fn of(
        name: &str,
        title: &str,
        limits: String,
        subjects: &[Subject],
        cell: impl Fn(&Subject, f64) -> Result<Cell, ExperimentError>,
    ) -> Result<Self, ExperimentError> {
        let cells = subjects.iter().flat_map(|subject| PER_DAY.map(|per_day| (subject, per_day)));
        let cells = cells.map(|(subject, per_day)| cell(subject, per_day)).collect::<Result<_, _>>()?;
        Ok(Self { name: name.to_owned(), title: title.to_owned(), limits, cells })
    }
}

impl Cell {
    /// `offers`: all strategies at their cheapest.
    pub(crate) fn new(subject: &Subject, per_day: f64, offers: Vec<StrategyOffer>) -> Self {
        let dollars = |remote: bool| {
            let selected = offers.iter().filter(|offer| offer.way.has_remote_experts() == remote);
            selected.filter_map(|offer| offer.dollars_per_hour).reduce(f64::min)
        };
        let saving = dollars(true).zip(dollars(false)).map(|(with, without)| 1.0 - with / without);
        // Ties go to the strategy without remote experts, which is simpler.
        let order = |offer: &StrategyOffer| {
            (offer.dollars_per_hour.unwrap_or(f64::INFINITY), u8::from(offer.way.has_remote_experts()))
        };
        let best = offers.iter().filter(|offer| offer.dollars_per_hour.is_some());
        let best = best.min_by(|a, b| order(a).0.total_cmp(&order(b).0).then(order(a).1.cmp(&order(b).1)));
        Self { model: subject.name.clone(), per_day, best: best.map(|offer| offer.way), saving, offers }
    }

    /// Returns the offer of one strategy.
    #[must_use]
    pub fn offer(&self, way: ServingStrategy) -> Option<&StrategyOffer> {
        self.offers.iter().find(|offer| offer.way == way)
    }

    /// Reports if the cheapest strategy has remote experts.
    #[must_use]
    pub fn pays(&self) -> bool {
        self.best.is_some_and(ServingStrategy::has_remote_experts)
    }
}

impl Regime {
    /// Returns the cell in which remote experts save the largest share of the cost.
    #[must_use]
    pub fn largest_saving(&self) -> Option<&Cell> {
        let known = self.cells.iter().filter(|cell| cell.saving.is_some());
        known.max_by(|a, b| a.saving.unwrap_or(0.0).total_cmp(&b.saving.unwrap_or(0.0)))
    }
}

/// Returns the cheaper of two offers of the same strategy.
///
/// If neither is feasible, returns `other`, unless only `other` scales to zero: the reason of the one that is always alive
/// is more general.
pub(crate) fn cheaper(known: StrategyOffer, other: StrategyOffer) -> StrategyOffer {
    match (known.dollars_per_hour, other.dollars_per_hour) {
        (Some(cost), Some(than)) if cost <= than => known,
        (Some(_), None) => known,
        (None, None) if other.sleeps && !known.sleeps => known,
        _ => other,
    }
}
