//! Tests of checkpoints, configs, tokenizers and templates, in one program.
#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)]

mod checkpoint;
mod config;
mod hostile;
mod mutated_configs;
mod outlines;
mod python_numbers;
mod rope;
mod short_forms;
mod support;
mod template;
mod template_bounds;
mod template_expressions;
mod templates;
mod tiktoken;
mod tokenizer;
mod tokenizer_fixtures;
