//! Control plane of models on one machine. It keeps the functions of each model as the gateway orders, learns expert
//! usage from requests, replans, and accounts for costs. It does not know commands, flags or terminals.
//!
//! ```text
//! gateway: wakes, sleeps ─▶ [`ModelSupervisor`] ─▶ supervisor of the functions
//!                             ▲   │
//!   [`ModelUsage`]: requests ─┘   ├─▶ [`Reporter`]: what changes, for people
//!                                 └─▶ [`CostRecorder`]: what it costs, for the ledger
//! ```

mod cost;
mod deployment;
mod error;
mod following;
mod groups;
mod rates;
mod replan;
mod report;
mod supervisor;
mod usage;

pub use cost::CostRecorder;
pub use deployment::{DesiredDeployment, MainBackend, MainReport, Ratio, default_dtype, fallback_bytes};
pub use error::LocalError;
pub use following::PlacementFollower;
pub use rates::FunctionPrices;
pub use replan::{BetterPlacement, Measured, PlacementBasis, STURDY};
pub use report::{Report, Reporter};
pub use supervisor::{ModelSupervisor, ShutdownSignal};
pub use usage::{ModelFiles, ModelUsage, UsageHistory};
