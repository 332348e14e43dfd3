//! Tests of the crate's structure, in one program.
#![allow(clippy::panic, clippy::unwrap_used)]
