//! Times and sizes of a model on a machine, and the planning problem that follows from them.
//!
//! A [`Profile`] holds measured times and sizes with the names of what they were measured on. [`problem`] joins it with
//! the facts of a checkpoint and with [`DeploymentRequirements`]; [`Prices`] are prices as bills state them, [`NodeList`] nodes as they
//! are sold, [`Factors`] what answers say about a profile. Pure: this crate does not measure.

mod attempt;
mod error;
mod function_memory;
mod measured;
mod node_prior;
mod node_timing;
mod nodes;
mod plausible;
mod prices;
mod prior;
mod problem;
mod profile;

pub use attempt::attempted;
pub use error::{NodesError, PricesError, ProblemError, ProfileError};
pub use measured::{Factor, Factors, Ratio, TimeRatios};
pub use node_prior::{ResidentWeights, node_shape, node_shapes};
pub use node_timing::NodeTiming;
pub use nodes::{Commitment, ListedNode, NodeList, Owned, PriceSource, date_of};
pub use plausible::Slower;
pub use prices::{Prices, PricesBilling, number_schema};
pub use problem::{DeploymentRequirements, problem};
pub use profile::{
    CpuLimit, DeviceTimes, Kernels, MEASUREMENTS, Machine, Made, Memory, ModelId, Origin, Profile, STEP_ROWS,
    Transport,
};
pub use remoe_planner::{Start, Starts};
