//! Times and sizes of a model on a machine, and the planning problem that follows from them.
//!
//! A [`Profile`] holds the measured times and sizes of one model on one machine. [`problem`] combines it with the facts
//! of a checkpoint and the [`DeploymentRequirements`]. [`Prices`] is a price list of CPU, memory and GPUs, and
//! [`NodeList`] is one of whole nodes. [`TimeFactors`] corrects a profile by the latencies that responses report. This
//! crate does no measurements and no I/O.

mod error;
mod function_memory;
mod measured;
mod node_prior;
mod node_timing;
mod nodes;
mod prices;
mod prior;
mod problem;
mod profile;
mod search_by_origin;
mod vcpu_slowdown;

pub use error::{NodesError, PricesError, ProblemError, ProfileError};
pub use measured::{TimeFactor, TimeFactors, TimeRatio, TimeRatios};
pub use node_prior::{ResidentWeights, node_shape, node_shapes};
pub use node_timing::NodeTiming;
pub use nodes::{Commitment, ListedNode, NodeList, Owned, PriceSource, date_of};
pub use prices::{Prices, PricesBilling, number_schema};
pub use problem::{DeploymentRequirements, problem};
pub use profile::{
    CpuLimit, DeviceTimes, Kernels, MEASUREMENTS, Machine, Made, Memory, ModelId, Origin, Profile, STEP_ROWS,
    Transport,
};
pub use remoe_planner::{Start, Starts};
pub use search_by_origin::search_by_origin;
pub use vcpu_slowdown::VcpuSlowdown;
