//! Tests of the real programs, end to end, in one program.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod batch;
mod cache;
mod commands;
mod conversion;
mod cost;
mod door;
mod ending;
mod failure;
mod fetch;
mod following;
mod groups;
mod hostile_clients;
mod http;
mod identity;
mod instructions;
mod joining;
mod large;
mod late;
mod limits;
mod memory;
mod openai;
mod order;
mod overload;
mod parity;
mod placement;
mod planned;
mod records;
mod remote_function;
mod routing;
mod shortage;
mod sleep;
mod structured;
mod tiers;
mod traces;
mod unfinished;
