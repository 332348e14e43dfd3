//! Reference models with what transformers computed for them.

use super::DeviceArgs;
use crate::error::{ErrorContext, Result};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Reference models that are refused.
const REFUSED: [&str; 2] = ["dsv2-bias", "mixtral-gelu"];
/// One of each kind of attention and routing.
const FEW: [&str; 4] = ["olmoe-basic", "dsv2-basic", "gptoss-yarn", "qwen3moe-window"];

/// A reference model.
#[derive(Debug, Clone)]
pub(super) struct Reference {
    pub(super) name: String,
    pub(super) folder: PathBuf,
    pub(super) expected: Expected,
}

/// Values that transformers computed.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Expected {
    pub(super) moe_layers: Vec<u32>,
    pub(super) prompts: Vec<Prompt>,
    /// Results for these prompts in bfloat16, where they are noted.
    #[serde(default)]
    pub(super) bfloat16: Vec<Noted>,
}

/// One prompt.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Prompt {
    pub(super) ids: Vec<u32>,
    pub(super) last_logits: Vec<f32>,
    /// Per layer and token.
    pub(super) routing: Vec<Vec<Token>>,
    pub(super) greedy: Vec<u32>,
}

/// Experts of one token, ascending.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Token {
    pub(super) experts: Vec<u32>,
}

/// Logits of a prompt in another dtype.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Noted {
    pub(super) last_logits: Vec<f32>,
}

/// Reads the served reference models, or a few of them.
pub(super) fn references(args: &DeviceArgs) -> Result<Vec<Reference>> {
    let reading = || format!("reading {}", args.fixtures.display());
    let mut folders = Vec::new();
    for entry in std::fs::read_dir(&args.fixtures).doing(reading)? {
        let folder = entry.doing(reading)?.path();
        let name = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let is_served = folder.join("expected.json").is_file() && !REFUSED.contains(&name.as_str());
        if is_served && (!args.small || FEW.contains(&name.as_str())) {
            folders.push((name, folder));
        }
    }
    folders.sort();
    folders.into_iter().map(|(name, folder)| reference(name, folder)).collect()
}

/// Reads the reference model `name`.
pub(super) fn reference_of(args: &DeviceArgs, name: &str) -> Result<Reference> {
    reference(name.to_owned(), args.fixtures.join(name))
}

fn reference(name: String, folder: PathBuf) -> Result<Reference> {
    let expected = read(&folder.join("expected.json"))?;
    Ok(Reference { name, folder, expected })
}

fn read(path: &Path) -> Result<Expected> {
    let reading = || format!("reading {}", path.display());
    let text = std::fs::read_to_string(path).doing(reading)?;
    serde_json::from_str(&text).doing(reading)
}

/// Largest difference of the two over the largest of `reference`; infinite if the lengths differ or a value is not finite.
pub(super) fn relative_difference(found: &[f32], reference: &[f32]) -> f32 {
    if found.len() != reference.len() || found.iter().any(|value| !value.is_finite()) {
        return f32::INFINITY;
    }
    let largest = reference.iter().fold(f32::MIN_POSITIVE, |largest, value| largest.max(value.abs()));
    let pairs = found.iter().zip(reference);
    pairs.map(|(found, reference)| (found - reference).abs()).fold(0.0, f32::max) / largest
}
