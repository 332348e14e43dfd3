//! Cost of requests: integer money, the ledger that keeps it, and how it adds up.
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
//! Money is integer nano-dollars and time integer nanoseconds everywhere: parts add up to their whole exactly.
//! Nothing here knows who starts functions or speaks HTTP.

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

pub use account::{AccountError, Amounts, Functions, LedgerTotals, SIGN_OF_LIFE, Tier};
pub use attribution::{Attribution, Billed, Pairs, Passed};
pub use export::{export_csv, export_json};
pub use life::FunctionLife;
pub use lives::{LifeChange, Lives, PresentFunction, TierCharge};
pub use meter::{Meter, RIVALS, Rates, ReportedCost, RequestWork, Worked};
pub use money::{Carry, Rate, split};
pub use read::{Entries, LedgerError, records, records_since};
pub use record::{FunctionEvent, FunctionRecord, Record, RequestCost, RequestRecord};
pub use share::{Basis, Phase, Phases, Share};
pub use writer::{LOCK, Ledger, LedgerLimits};
