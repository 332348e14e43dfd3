//! Experts of a layer, wherever they are: local kernels and remote functions at the same time.
//!
//! Per layer: routed rows -> split the remote pairs by who hosts them and into messages (pure) -> they leave ->
//! local kernels, for what is still being read as soon as it is there -> answers are joined; for what fails or is
//! late the next replica is asked, then the experts are loaded and computed here -> one reduction in a fixed order.
//! Nothing but the reduction sums, so that placement cannot change the answer.

mod activity;
mod answers;
mod arrivals;
mod calls;
mod counting;
mod error;
mod exchange;
mod fallback;
mod finite;
mod hosts;
mod join;
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
pub(crate) use arrivals::{Arrivals, patiently};
pub(crate) use calls::{Calls, TracedRequest};
pub(crate) use error::ExpertError;
pub(crate) use join::{ExpertParts, Experts, LayerCall};
pub(crate) use link::{Link, LinkEvent, LinkState, RemoteRequirements};
pub(crate) use metrics::ExpertMetrics;
pub(crate) use placement::{LocalExperts, Placement};
pub(crate) use portions::{Portions, RemoteUnits};
pub use tally::{ExpertTally, ExpertTime};
