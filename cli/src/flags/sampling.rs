//! Flags of token sampling, with the ranges that the engine accepts.

use clap::Args;
use std::ops::RangeInclusive;

/// Sampling of a conversation. The defaults are those of the model.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct ChatSamplingArgs {
    /// Sampling temperature; 0 takes the most likely token [default: that of the model's generation_config.json, else
    /// 0]
    #[arg(long, value_name = "T", value_parser = temperature, allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Nucleus sampling: sample from the most likely tokens up to this probability mass [default: that of
    /// generation_config.json, else all tokens]
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Sample from the K most likely tokens; 0 for all [default: that of generation_config.json, else all tokens]
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<u32>,
    /// Leave out tokens that are less likely than this share of the most likely one [default: that of
    /// generation_config.json, else none]
    #[arg(long, value_name = "P", value_parser = min_p, allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Make tokens that were there already less likely by this factor; 1 for none [default: that of
    /// generation_config.json, else 1]
    #[arg(long, value_name = "X", value_parser = repetition_penalty, allow_negative_numbers = true)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Random seed; equal seeds give equal answers
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
}

/// Sampling of a completion.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct SamplingArgs {
    /// Sampling temperature; 0 takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature, allow_negative_numbers = true)]
    pub(crate) temperature: f32,
    /// Nucleus sampling: sample from the most likely tokens up to this probability mass [default: all tokens]
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Sample from the K most likely tokens [default: all tokens]
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<u32>,
    /// Random seed; equal seeds give equal answers
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
}

// Limits of the engine, which would refuse other values only after the model has been loaded.
const MAX_TEMPERATURE: f32 = 2.0;
const MAX_STOP_BYTES: usize = 1024;

pub(crate) fn temperature(text: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if (0.0..=MAX_TEMPERATURE).contains(&value) {
        Ok(value)
    } else {
        Err(format!("expected 0 to {MAX_TEMPERATURE}"))
    }
}

pub(crate) fn stop_string(text: &str) -> Result<String, String> {
    if (1..=MAX_STOP_BYTES).contains(&text.len()) {
        Ok(text.to_owned())
    } else {
        Err(format!("expected 1 to {MAX_STOP_BYTES} bytes"))
    }
}

pub(crate) fn min_p(text: &str) -> Result<f32, String> {
    number_within(text, 0.0..=1.0)
}

pub(crate) fn repetition_penalty(text: &str) -> Result<f32, String> {
    number_within(text, 0.01..=100.0)
}

fn number_within(text: &str, range: RangeInclusive<f32>) -> Result<f32, String> {
    let expected = || format!("expected a number from {} to {}, got {text}", range.start(), range.end());
    let value: f32 = text.parse().map_err(|_| expected())?;
    if range.contains(&value) { Ok(value) } else { Err(expected()) }
}

pub(crate) fn probability(text: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if value > 0.0 && value <= 1.0 {
        Ok(value)
    } else {
        Err("expected a number above 0 and up to 1".to_owned())
    }
}
