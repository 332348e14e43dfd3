//! LibTorch, the only module of the crate that calls it.
//!
//! Every operation passes [`Tensor`], whose device records launches, copies, synchronisations and memory. So what an
//! iteration costs a GPU can be counted where there is none: on a simulated device, which computes on the CPU and is
//! treated as a device everywhere above this module.

mod device;
mod recording;
mod staging;
mod tensor;

pub use device::{Driver, Installed, TorchDevice};
pub(crate) use device::{forbid_gradients, set_threads};
pub use recording::{Counts, Recording};
pub(crate) use tch::Kind;
pub use tensor::Tensor;
