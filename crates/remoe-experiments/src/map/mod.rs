//! The map of regimes: who serves a model at the least cost, over how large it is and how often it is asked.
//!
//! Every cell is answers of the planner to problems that differ in model, rate and place only: [`compare`] for
//! prices by the core, the GB and the GPU (`unit.rs`), [`rent`] for nodes as they are sold (`nodes.rs`). A cell
//! adds nothing to their costs; it takes each way where it is cheapest.
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

/// Requests per day, from once to as many as keep one deployment busy.
pub const PER_DAY: [f64; 6] = [1.0, 10.0, 100.0, 1_000.0, 5_000.0, 15_000.0];

/// Where functions may sleep, they end after so many seconds without requests.
pub(crate) const IDLE_SECONDS: f64 = 300.0;
/// Seconds per output token for users who wait longer than [`slo`] says.
pub(crate) const PATIENT_SECONDS: f64 = 0.5;
/// Seconds per output token on modest nodes.
pub(crate) const SLOW_SECONDS: f64 = 1.0;
/// Seconds of a day.
pub(crate) const DAY: f64 = 86_400.0;

/// Ways in the order of the map.
pub const WAYS: [ServingStrategy; 6] = [
    ServingStrategy::Sliced,
    ServingStrategy::Layers,
    ServingStrategy::Mix,
    ServingStrategy::Cpu,
    ServingStrategy::Gpu,
    ServingStrategy::Fetch,
];

/// Typical and largest requests of the map: eight at once.
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

/// One way to serve a model, at its cheapest within the limits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Offer {
    /// Which.
    pub way: ServingStrategy,
    /// Dollars in an hour; absent where it does not keep the limits.
    pub dollars_per_hour: Option<f64>,
    /// Hardware that it runs on, for people.
    pub on: String,
    /// Set if its functions end without requests.
    pub sleeps: bool,
    /// Time to first token in seconds.
    pub ttft_seconds: Option<f64>,
    /// Time per output token in seconds.
    pub tpot_seconds: Option<f64>,
    /// Reason that keeps it out; empty where nothing does.
    pub why: String,
}

/// Offers for one model at one rate, and the cheapest of them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cell {
    /// The model's name.
    pub model: String,
    /// Requests per day, in the mean.
    pub per_day: f64,
    /// The cheapest way; absent where none keeps the limits.
    pub best: Option<ServingStrategy>,
    /// Share of its cost that the best way with remote experts saves against the best without; below 0 where it is
    /// dearer, absent where one of both does not keep the limits.
    pub saving: Option<f64>,
    /// All ways, in the order of [`WAYS`].
    pub offers: Vec<Offer>,
}

/// The cells of one set of prices and limits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Regime {
    /// For files.
    pub name: String,
    /// For people.
    pub title: String,
    /// Limits and assumptions, for people.
    pub limits: String,
    /// Model by model, by rising rate.
    pub cells: Vec<Cell>,
}

impl Regime {
    /// The cells that `cell` makes of every one of `subjects` at every rate.
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
    /// `offers`: all ways at their cheapest.
    pub(crate) fn new(subject: &Subject, per_day: f64, offers: Vec<Offer>) -> Self {
        let dollars = |remote: bool| {
            let of = offers.iter().filter(|offer| offer.way.has_remote_experts() == remote);
            of.filter_map(|offer| offer.dollars_per_hour).reduce(f64::min)
        };
        let saving = dollars(true).zip(dollars(false)).map(|(with, without)| 1.0 - with / without);
        // Equal costs go to the way without remote experts: it is the simpler one.
        let order = |offer: &Offer| {
            (offer.dollars_per_hour.unwrap_or(f64::INFINITY), u8::from(offer.way.has_remote_experts()))
        };
        let best = offers.iter().filter(|offer| offer.dollars_per_hour.is_some());
        let best = best.min_by(|a, b| order(a).0.total_cmp(&order(b).0).then(order(a).1.cmp(&order(b).1)));
        Self { model: subject.name.clone(), per_day, best: best.map(|offer| offer.way), saving, offers }
    }

    /// One way's offer.
    #[must_use]
    pub fn offer(&self, way: ServingStrategy) -> Option<&Offer> {
        self.offers.iter().find(|offer| offer.way == way)
    }

    /// Reports if remote experts are the cheapest here.
    #[must_use]
    pub fn pays(&self) -> bool {
        self.best.is_some_and(ServingStrategy::has_remote_experts)
    }
}

impl Regime {
    /// The cell in which remote experts save the largest share, among those where something else keeps the
    /// limits.
    #[must_use]
    pub fn largest_saving(&self) -> Option<&Cell> {
        let known = self.cells.iter().filter(|cell| cell.saving.is_some());
        known.max_by(|a, b| a.saving.unwrap_or(0.0).total_cmp(&b.saving.unwrap_or(0.0)))
    }
}

/// The cheaper of two offers of the same way. Of two that are none the later one says why, unless it sleeps and the
/// known one does not: what would have to start in time is no reason against a way that may always be there.
pub(crate) fn cheaper(known: Offer, other: Offer) -> Offer {
    match (known.dollars_per_hour, other.dollars_per_hour) {
        (Some(cost), Some(than)) if cost <= than => known,
        (Some(_), None) => known,
        (None, None) if other.sleeps && !known.sleeps => known,
        _ => other,
    }
}
