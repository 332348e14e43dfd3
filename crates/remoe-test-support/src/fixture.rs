//! The reference models with what transformers computed for them, and the demo model.

use crate::binaries::workspace;
use remoe_model::Checkpoint;
use serde::Deserialize;
use std::path::PathBuf;
use tempfile::TempDir;

/// Reference models that are refused, with the config field that the refusal names.
pub const REFUSED: [(&str, &str); 2] = [("dsv2-bias", "mlp_bias"), ("mixtral-gelu", "hidden_act")];

/// Float32 and bfloat16, as flags name them.
pub const DTYPES: [&str; 2] = ["float32", "bfloat16"];

/// A model folder.
#[derive(Debug)]
pub struct ModelFixture {
    /// The folder's name.
    pub name: String,
    /// The folder.
    pub folder: PathBuf,
}

impl ModelFixture {
    /// The reference model `name`.
    #[must_use]
    pub fn fixture(name: &str) -> Self {
        let folder = workspace().join("tests/fixtures").join(name);
        assert!(folder.join("config.json").is_file(), "{} is no model", folder.display());
        Self { name: name.to_owned(), folder }
    }

    /// The demo model.
    #[must_use]
    pub fn demo() -> Self {
        let folder = workspace().join("demo/model");
        assert!(folder.join("config.json").is_file(), "{} is missing", folder.display());
        Self { name: "demo".to_owned(), folder }
    }

    /// A copy of its folder, whose weights [can be taken away](crate::function::MainFunction::take_weights_away).
    #[must_use]
    pub fn copy(&self) -> TempDir {
        let folder = tempfile::tempdir().expect("room for a folder");
        for entry in std::fs::read_dir(&self.folder).expect("the model is there") {
            let entry = entry.expect("the folder can be read");
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("a file is copied");
        }
        folder
    }

    /// Opens the checkpoint.
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        let opened = Checkpoint::open(&self.folder);
        opened.unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// Reads the reference values that transformers computed; none for the demo model.
    #[must_use]
    pub fn expected(&self) -> Option<Expected> {
        let text = std::fs::read_to_string(self.folder.join("expected.json")).ok()?;
        Some(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", self.name)))
    }

    /// Prompts to try: those of the reference, or a few of different lengths.
    #[must_use]
    pub fn prompts(&self) -> Vec<Vec<u32>> {
        if let Some(expected) = self.expected() {
            return expected.prompts.into_iter().map(|prompt| prompt.ids).collect();
        }
        let vocabulary = self.checkpoint().config().vocab_size as u32;
        // Scattered over the vocabulary, never twice the same in a prompt.
        let prompt = |length: u32| (0..length).map(|i| (7 + (length + i) * 997) % vocabulary).collect();
        [1, 2, 5, 13, 24].map(prompt).to_vec()
    }
}

/// Every reference model that is not among `except`.
#[must_use]
pub fn fixtures(except: &[&str]) -> Vec<ModelFixture> {
    let folder = workspace().join("tests/fixtures");
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("the folder can be read"))
        .filter(|entry| entry.path().join("config.json").is_file())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| !except.contains(&name.as_str()))
        .collect();
    names.sort();
    assert!(names.len() >= 15, "only {} reference models in {}", names.len(), folder.display());
    names.iter().map(|name| ModelFixture::fixture(name)).collect()
}

/// Every reference model that can be served.
#[must_use]
pub fn served_fixtures() -> Vec<ModelFixture> {
    fixtures(&REFUSED.map(|(name, _)| name))
}

/// A reference model's `expected.json`.
#[derive(Debug, Deserialize)]
pub struct Expected {
    /// Layers with experts.
    pub moe_layers: Vec<u32>,
    /// By token ids.
    pub prompts: Vec<ExpectedPrompt>,
    /// By text; models with a tokenizer only.
    #[serde(default)]
    pub texts: Vec<ExpectedText>,
}

/// One prompt's way through the reference.
#[derive(Debug, Deserialize)]
pub struct ExpectedPrompt {
    /// The prompt.
    pub ids: Vec<u32>,
    /// Logits of its last position.
    pub last_logits: Vec<f32>,
    /// The likeliest token.
    pub argmax: usize,
    /// Per layer with experts and prompt token.
    pub routing: Vec<Vec<ExpectedToken>>,
    /// The greedy continuation.
    pub greedy: Vec<u32>,
}

/// One token's experts in one layer.
#[derive(Debug, Deserialize)]
pub struct ExpectedToken {
    /// Ascending.
    pub experts: Vec<u32>,
    /// In that order.
    pub weights: Vec<f32>,
}

/// A text and its greedy continuation.
#[derive(Debug, Deserialize)]
pub struct ExpectedText {
    /// The text, or the user's message.
    pub prompt: String,
    /// Set if the chat template is applied.
    pub chat: bool,
    /// The prompt's tokens.
    pub ids: Vec<u32>,
    /// The continuation's tokens.
    pub greedy: Vec<u32>,
    /// The continuation.
    pub text: String,
}
