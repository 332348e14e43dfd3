//! Tests of conversion, in one program.
#![allow(clippy::indexing_slicing, clippy::unwrap_used)]

mod gpt2;
