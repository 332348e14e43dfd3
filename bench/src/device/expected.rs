//! Reference models with the results of transformers.

use super::DeviceArgs;
use crate::error::{ErrorContext, Result};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Reference models that are not served.
const UNSERVED: [&str; 2] = ["dsv2-bias", "mixtral-gelu"];
/// Reference models of small runs: one of each kind of attention and routing.
const SMALL_RUN: [&str; 4] = ["olmoe-basic", "dsv2-basic", "gptoss-yarn", "qwen3moe-window"];

/// A reference model.
#[derive(Debug, Clone)]
pub(super) struct ReferenceModel {
    pub(super) name: String,
    pub(super) folder: PathBuf,
    pub(super) expected: ExpectedResults,
}

/// Results of transformers.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct ExpectedResults {
    pub(super) moe_layers: Vec<u32>,
    pub(super) prompts: Vec<Prompt>,
    /// Results for these prompts in bfloat16, if the reference has them.
    #[serde(default)]
    pub(super) bfloat16: Vec<Bfloat16Result>,
}

/// Results for one prompt in float32.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Prompt {
    pub(super) ids: Vec<u32>,
    pub(super) last_logits: Vec<f32>,
    /// Experts by layer and token.
    pub(super) routing: Vec<Vec<TokenExperts>>,
    pub(super) greedy: Vec<u32>,
}

/// Selected experts of one token.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct TokenExperts {
    /// Ascending ids.
    pub(super) experts: Vec<u32>,
}

/// Results for one prompt in bfloat16.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Bfloat16Result {
    pub(super) last_logits: Vec<f32>,
}

/// Reads the served reference models, in small runs a few of them.
pub(super) fn reference_models(args: &DeviceArgs) -> Result<Vec<ReferenceModel>> {
    let reading = || format!("reading {}", args.fixtures.display());
    let mut folders = Vec::new();
    for entry in std::fs::read_dir(&args.fixtures).doing(reading)? {
        let folder = entry.doing(reading)?.path();
        let name = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let is_served = folder.join("expected.json").is_file() && !UNSERVED.contains(&name.as_str());
        if is_served && (!args.small || SMALL_RUN.contains(&name.as_str())) {
            folders.push((name, folder));
        }
    }
    folders.sort();
    folders.into_iter().map(|(name, folder)| reference(name, folder)).collect()
}

/// Reads the reference model `name`.
pub(super) fn reference_model(args: &DeviceArgs, name: &str) -> Result<ReferenceModel> {
    reference(name.to_owned(), args.fixtures.join(name))
}

fn reference(name: String, folder: PathBuf) -> Result<ReferenceModel> {
    let expected = read(&folder.join("expected.json"))?;
    Ok(ReferenceModel { name, folder, expected })
}

fn read(path: &Path) -> Result<ExpectedResults> {
    let reading = || format!("reading {}", path.display());
    let text = std::fs::read_to_string(path).doing(reading)?;
    serde_json::from_str(&text).doing(reading)
}

/// Returns the largest difference over the largest absolute value of `reference`. It is infinite if lengths differ or a value
/// is not finite.
pub(super) fn relative_difference(found: &[f32], reference: &[f32]) -> f32 {
    if found.len() != reference.len() || found.iter().any(|value| !value.is_finite()) {
        return f32::INFINITY;
    }
    let largest = reference.iter().fold(f32::MIN_POSITIVE, |largest, value| largest.max(value.abs()));
    let pairs = found.iter().zip(reference);
    pairs.map(|(found, reference)| (found - reference).abs()).fold(0.0, f32::max) / largest
}
