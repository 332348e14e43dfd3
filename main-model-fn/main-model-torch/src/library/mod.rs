//! Calls of LibTorch. No other module of the crate calls it.
//!
//! [`Tensor`] has every operation. Its device records launches, copies, synchronisations and memory. So tests count what an
//! iteration asks of a GPU on a machine without one: a simulated device computes on the CPU, and modules above this one treat
//! it as a GPU.

mod device;
mod recording;
mod staging;
mod tensor;

pub use device::{DeviceOpener, InstalledDevices, TorchDevice};
pub(crate) use device::{forbid_gradients, set_threads};
pub use recording::{DeviceCounts, DeviceRecording};
pub(crate) use tch::Kind;
pub use tensor::Tensor;
