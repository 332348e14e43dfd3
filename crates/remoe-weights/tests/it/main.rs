//! Tests of packed experts, in one program.
#![allow(clippy::unwrap_used, missing_docs)]

mod stay_fp8;
