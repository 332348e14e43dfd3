//! Experts of a layer, wherever they are: local kernels and remote functions at the same time.
//!
//! Per layer: route (pure) -> split the remote pairs into messages (pure) -> they leave -> local
//! kernels -> answers are joined, failed ones go to the next replica or are computed from a local
//! load -> one reduction in a fixed order. Nothing but the reduction sums, so that placement
//! cannot change the answer.

mod counting;
mod error;
mod exchange;
mod fallback;
mod join;
mod link;
mod metrics;
mod placement;
mod reduce;
mod routing;
mod split;

pub(crate) use error::ExpertError;
pub(crate) use join::{ExpertParts, Experts, LayerCall};
pub(crate) use link::{Expected, Link, LinkEvent, LinkState};
pub(crate) use metrics::ExpertMetrics;
pub(crate) use placement::{LocalExperts, Placement};
pub(crate) use routing::{Routed, route};

use std::time::Duration;

/// What a layer may take in all: every attempt at remote functions, and local loads.
const LAYER_LIMIT: Duration = Duration::from_secs(10);
