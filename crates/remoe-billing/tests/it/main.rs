//! Tests of the ledger, in one program.
#![allow(clippy::unwrap_used)]

mod absurd;
mod idle;
mod kills;
mod suffixes;
