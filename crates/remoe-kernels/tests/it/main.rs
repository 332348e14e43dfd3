//! Tests of the kernels, in one program.
#![allow(clippy::panic, clippy::unwrap_used, missing_docs)]

mod attention;
mod bits;
mod common;
mod elementwise;
mod fp8;
mod numerics;
mod packing;
mod pools;
mod products;
mod quantised;
mod reference;
