//! LibTorch below the main function: the operations of [`main_model_fn::Backend`] on CUDA devices, and on CPUs, where
//! that code is tested. On the CPU products with weights are the kernels' own.

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
