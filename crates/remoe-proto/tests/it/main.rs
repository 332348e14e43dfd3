//! Tests of the gRPC contracts, in one program.
#![allow(clippy::unwrap_used)]

mod generated_code;
mod trace;
