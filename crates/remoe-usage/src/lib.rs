//! Prediction of the experts that requests will use, while they wait and run.
//!
//! ```text
//! a request comes ──▶ tokens ──▶ prediction ─▶ Mix: who is here, and what that takes ──▶ a wake's plan
//!
//! an answer ends ──▶ activations ──▶ Observed: what was used of late ──▶ a revision of what runs
//!                          └───────▶ memory, by tenant ──▶ Store: one file
//!                                       ▲
//!            files of other gateways ───┘ Exchange
//! ```
//!
//! [`Foresight`] joins them. It takes values and returns values; only [`Store`] and [`Exchange`] touch the disk. A
//! [`Watch`] gives it a thread, so that no request waits for it. A [`UsageLearner`] is what a gateway tells of requests. Nothing of a prompt's text is kept: a request is
//! remembered by the vector of its prompt and by how its tokens spread over the experts.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod body;
mod calibration;
mod exchange;
mod foresight;
mod frame;
mod growth;
mod learner;
mod memory;
mod metrics;
mod mix;
mod numbers;
mod observed;
mod primer;
mod prior;
mod quality;
mod steps;
mod store;
mod tenant;
mod unremembered;
mod watch;

pub use body::Prompts;
pub use calibration::{Calibration, LAYER_GROUPS, PARTS, Part};
pub use exchange::Exchange;
pub use foresight::{Arrival, Foresight, ForesightOptions, Keeps, MEMORY};
pub use learner::{AnsweredMix, UsageLearner};
pub use metrics::{ForesightMetrics, ModelForesightMetrics};
pub use mix::Mix;
pub use observed::Observed;
pub use primer::{MAX_PRIMER, Primer, PrimerError, write_primer};
pub use quality::{PhaseQuality, Quality, Third};
pub use store::{Store, StoreError, Stored};
pub use tenant::Tenant;
pub use watch::{Ended, News, Open, Opened, Peers, Watch};
