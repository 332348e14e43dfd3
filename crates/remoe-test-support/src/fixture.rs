//! Reference models with expected values from transformers, and the demo model.

use crate::binaries::workspace;
use remoe_model::Checkpoint;
use serde::Deserialize;
use std::path::PathBuf;
use tempfile::TempDir;

/// Unsupported reference models, with the config field that the error names.
pub const REFUSED: [(&str, &str); 2] = [("dsv2-bias", "mlp_bias"), ("mixtral-gelu", "hidden_act")];

/// Compute dtypes, as flags name them.
pub const DTYPES: [&str; 2] = ["float32", "bfloat16"];

/// Model for tests.
#[derive(Debug)]
pub struct ModelFixture {
    /// Name of the model.
    pub name: String,
    /// Folder of the checkpoint.
    pub folder: PathBuf,
}

impl ModelFixture {
    /// Returns the reference model `name`.
    #[must_use]
    pub fn fixture(name: &str) -> Self {
        let folder = workspace().join("tests/fixtures").join(name);
        assert!(folder.join("config.json").is_file(), "{} is no model", folder.display());
        Self { name: name.to_owned(), folder }
    }

    /// Returns the demo model.
    #[must_use]
    pub fn demo() -> Self {
        let folder = workspace().join("demo/model");
        assert!(folder.join("config.json").is_file(), "{} is missing", folder.display());
        Self { name: "demo".to_owned(), folder }
    }

    /// Returns a copy of its folder, from which
    /// [`MainFunction::take_weights_away`](crate::function::MainFunction::take_weights_away) can remove the weights.
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

    /// Reads the expected values. Returns `None` for the demo model.
    #[must_use]
    pub fn expected(&self) -> Option<Expected> {
        let text = std::fs::read_to_string(self.folder.join("expected.json")).ok()?;
        Some(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", self.name)))
    }

    /// Returns prompts for tests: those of the reference, or a few of different lengths.
    #[must_use]
    pub fn prompts(&self) -> Vec<Vec<u32>> {
        if let Some(expected) = self.expected() {
            return expected.prompts.into_iter().map(|prompt| prompt.ids).collect();
        }
        let vocabulary = self.checkpoint().config().vocab_size as u32;
        // Spread over the vocabulary, without repetition within a prompt.
        let prompt = |length: u32| (0..length).map(|i| (7 + (length + i) * 997) % vocabulary).collect();
        [1, 2, 5, 13, 24].map(prompt).to_vec()
    }
}

/// Returns all reference models except those named in `except`.
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

/// Returns all supported reference models.
#[must_use]
pub fn served_fixtures() -> Vec<ModelFixture> {
    fixtures(&REFUSED.map(|(name, _)| name))
}

/// Content of a reference model's `expected.json`.
#[derive(Debug, Deserialize)]
pub struct Expected {
    /// Ids of the layers with experts.
    pub moe_layers: Vec<u32>,
    /// Prompts as token ids.
    pub prompts: Vec<ExpectedPrompt>,
    /// Prompts as text, for models with a tokenizer.
    #[serde(default)]
    pub texts: Vec<ExpectedText>,
}

/// Expected values of one prompt.
#[derive(Debug, Deserialize)]
pub struct ExpectedPrompt {
    /// Token ids of the prompt.
    pub ids: Vec<u32>,
    /// Logits of the last position.
    pub last_logits: Vec<f32>,
    /// Most likely next token.
    pub argmax: usize,
    /// Routing, [layers with experts, prompt tokens].
    pub routing: Vec<Vec<ExpectedToken>>,
    /// Greedy continuation.
    pub greedy: Vec<u32>,
}

/// Routing of one token in one layer.
#[derive(Debug, Deserialize)]
pub struct ExpectedToken {
    /// Ids of its experts, ascending.
    pub experts: Vec<u32>,
    /// Weights, in the order of `experts`.
    pub weights: Vec<f32>,
}

/// Text with its greedy continuation.
#[derive(Debug, Deserialize)]
pub struct ExpectedText {
    /// Text, or message of the user.
    pub prompt: String,
    /// True if the chat template is applied.
    pub chat: bool,
    /// Token ids of the prompt.
    pub ids: Vec<u32>,
    /// Token ids of the continuation.
    pub greedy: Vec<u32>,
    /// Text of the continuation.
    pub text: String,
}
