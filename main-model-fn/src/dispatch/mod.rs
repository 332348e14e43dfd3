//! Expert dispatch: computes the routed experts of a layer with local kernels and remote functions at the same time.
//!
//! Steps of one layer call:
//!
//! 1. The remote (token, expert) pairs are split by the replicas that host the experts, and into messages ([`split`]).
//! 2. The messages leave. Local kernels compute the local experts meanwhile.
//! 3. Answers are collected. If a replica fails or is late, another one gets the message (retry, hedged request); if none
//!    is left, the engine loads the experts and computes them itself (local fallback).
//! 4. One reduction sums all rows in a fixed order ([`reduce`]). Nothing else sums, so the placement of experts cannot
//!    change an answer.

mod activity;
mod answers;
mod background_loads;
mod calls;
mod counting;
mod dispatcher;
mod error;
mod exchange;
mod fallback;
mod finite;
mod hosts;
mod link;
mod metrics;
mod outstanding;
mod pace;
mod placement;
mod portions;
mod reduce;
mod replicas;
mod split;
mod tally;

pub(crate) use activity::Activity;
pub(crate) use background_loads::{BackgroundLoads, with_retries};
pub(crate) use calls::{CallTotals, TracedRequest};
pub(crate) use dispatcher::{DispatcherParts, ExpertDispatcher, LayerCall};
pub(crate) use error::ExpertError;
pub(crate) use link::{Link, LinkEvent, LinkState, RemoteRequirements};
pub(crate) use metrics::ExpertMetrics;
pub(crate) use placement::{LocalExperts, Placement};
pub(crate) use portions::{Portions, RemoteUnits};
pub use tally::{ExpertTally, ExpertTime};
