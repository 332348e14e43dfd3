//! Tests of predictors and activation records, in one test program.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod effort;
mod layers;
mod phases;
mod portable;
mod predictions;
mod records;
mod similarity;
mod support;
mod trees;
