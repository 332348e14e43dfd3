//! `generation_config.json`: sampling defaults of the model's authors.

use std::path::Path;

use serde_json::{Map, Value};

use crate::config::ModelConfig;
use crate::error::CheckpointError;
use crate::fields::Fields;
use crate::json;
use crate::store::Store;

const FILE: &str = "generation_config.json";

/// Sampling defaults for requests that do not set a parameter. Without `do_sample: true` sampling is greedy, as in
/// transformers.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerationDefaults {
    /// Temperature; 0 means greedy.
    pub temperature: f64,
    /// Nucleus sampling: probability mass in (0, 1].
    pub top_p: Option<f64>,
    /// Number of most probable tokens to sample from. 0 in the file means no limit and becomes `None`.
    pub top_k: Option<usize>,
    /// Minimum probability, relative to that of the most probable token.
    pub min_p: Option<f64>,
    /// Penalty on tokens that have occurred; 1 means none.
    pub repetition_penalty: Option<f64>,
    /// Maximum number of tokens to generate.
    pub max_new_tokens: Option<usize>,
    /// Tokens that end a text. If the file does not list them, those of the config.
    pub eos_token_ids: Vec<u32>,
}

impl GenerationDefaults {
    /// Reads the file, if it exists.
    pub(crate) fn open(store: &dyn Store, config: &ModelConfig) -> Result<Self, CheckpointError> {
        let Some(object) = json::object_if_present(store, FILE)? else {
            return Ok(Self { eos_token_ids: config.eos_ids.clone(), ..Self::default() });
        };
        Self::from_object(&store.root().join(FILE), &object, config)
    }

    /// Parses the text of a `generation_config.json`. `path` only appears in messages.
    ///
    /// # Errors
    /// Names the invalid field.
    pub fn from_json(path: &Path, text: &[u8], config: &ModelConfig) -> Result<Self, CheckpointError> {
        let object = json::parse_object(path, text)?;
        Self::from_object(path, &object, config)
    }

    fn from_object(
        path: &Path,
        object: &Map<String, Value>,
        config: &ModelConfig,
    ) -> Result<Self, CheckpointError> {
        let fields = Fields::new(path, object);
        let is_sampled = fields.get("do_sample").is_some() && fields.flag("do_sample", false)?;
        let temperature = fields.optional_number("temperature")?;
        if let Some(temperature) = temperature.filter(|temperature| *temperature < 0.0) {
            return Err(fields.error("temperature", format!("is {temperature}, expected at least 0")));
        }
        let fraction = |name: &str| {
            let value = fields.optional_number(name)?;
            match value.filter(|value| !(0.0..=1.0).contains(value)) {
                Some(value) => Err(fields.error(name, format!("is {value}, expected 0 to 1"))),
                None => Ok(value),
            }
        };
        // Sampling limits are validated even if sampling is greedy, and then ignored.
        let top_p = fraction("top_p")?.filter(|top_p| *top_p > 0.0);
        let min_p = fraction("min_p")?;
        let top_k = fields.optional_count("top_k")?.filter(|top_k| *top_k > 0);
        let mut eos_token_ids = fields.token_ids("eos_token_id", config.vocab_size)?;
        if fields.get("eos_token_id").is_none() {
            eos_token_ids.clone_from(&config.eos_ids);
        }
        Ok(Self {
            temperature: if is_sampled { temperature.unwrap_or(1.0) } else { 0.0 },
            top_p: top_p.filter(|_| is_sampled),
            top_k: top_k.filter(|_| is_sampled),
            min_p: min_p.filter(|_| is_sampled),
            repetition_penalty: fields.optional_positive("repetition_penalty")?,
            max_new_tokens: fields.optional_size("max_new_tokens")?,
            eos_token_ids,
        })
    }
}
