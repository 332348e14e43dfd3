//! Tests of profiles, prices and nodes, in one program.
#![allow(clippy::unwrap_used)]

mod common;
mod measured;
mod nodes;
mod profiles;
mod published;
