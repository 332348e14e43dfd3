//! [`main_model_fn::Backend`] by LibTorch, on GPUs and on CPUs.
//!
//! On the CPU the kernels multiply with weights, as without LibTorch. On a device LibTorch computes everything but routed
//! experts.

mod attention;
mod heads;
mod host;
pub mod library;
mod linear;
mod masks;
mod norm;
mod pages;
mod rope;
mod rows;
mod selection;
mod spans;
mod torch;
mod workspace;

pub use torch::{Torch, TorchOn};
