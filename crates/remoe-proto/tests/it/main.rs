//! Tests of the gRPC contracts, in one test program.
#![allow(clippy::unwrap_used)]

mod generated_code;
mod trace;
