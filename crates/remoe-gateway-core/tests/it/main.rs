//! Tests of the gateway over real connections, in one program.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod budgets;
mod front;
mod hostile;
mod identity;
mod messages;
mod money;
mod overload;
mod page;
mod responses;
mod stage;
mod traces;
mod usage_observer;
