//! Fetching from servers that speak as the real ones do, in this process and in others.

#![allow(clippy::unwrap_used)]

mod egress;
mod network;
mod sources;
mod support;
mod transfers;
