//! Tests of the fetcher with test servers of the real protocols, in this process and in others.

#![allow(clippy::unwrap_used)]

mod egress;
mod network;
mod sources;
mod support;
mod transfers;
