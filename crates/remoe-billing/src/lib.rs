//! Cost of requests: integer amounts, the ledger that stores them, and its totals.
//!
//! ```text
//! engine: nanoseconds of iterations, split by work ([`Attribution`]) ─▶ [`Meter`]: x rate ─▶ [`ReportedCost`], with the answer
//! launcher: functions start, serve, stop ([`FunctionEvent`]) ─┐                             │
//!                                                             ▼                             ▼
//!                                            [`Ledger`]: one checked line per record, in a folder
//!                                                             ▼
//!                                  [`LedgerTotals`]: paid = requests + failed + idle + starts + .. + residual
//! ```
//!
//! Amounts are integer nano-dollars and times integer nanoseconds everywhere, so that parts add up exactly. This
//! crate neither starts functions nor speaks HTTP.

mod account;
mod attribution;
mod export;
mod life;
mod line;
mod lives;
mod meter;
mod money;
mod read;
mod record;
mod share;
mod writer;

pub use account::{FunctionTotals, LedgerTotals, LedgerTotalsError, RequestTotals, SIGN_OF_LIFE, TierTotals};
pub use attribution::{Attribution, BilledRequest, IterationTime, PairCounts};
pub use export::{export_csv, export_json};
pub use life::FunctionLife;
pub use lives::{FunctionLives, LifeChange, PresentFunction, TierCharge};
pub use meter::{Meter, RIVALS, Rates, ReportedCost, RequestWork, WorkShare};
pub use money::{Carry, Rate, split};
pub use read::{LedgerError, LedgerRecords, records, records_since};
pub use record::{FunctionEvent, FunctionRecord, Record, RequestCost, RequestRecord};
pub use share::{Basis, Phase, Phases, Share};
pub use writer::{LOCK_FILE, Ledger, LedgerLimits};
