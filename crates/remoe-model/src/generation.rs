//! `generation_config.json`: how the model's authors want it sampled.

use std::path::Path;

use serde_json::{Map, Value};

use crate::config::ModelConfig;
use crate::error::CheckpointError;
use crate::fields::Fields;
use crate::json;
use crate::store::Store;

const FILE: &str = "generation_config.json";

/// Defaults for requests that do not say. Without `do_sample: true` the default is greedy, as in
/// transformers; a field that is absent has no effect.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerationDefaults {
    /// 0 is greedy.
    pub temperature: f64,
    /// Nucleus, in (0, 1].
    pub top_p: Option<f64>,
    /// Tokens to choose from; 0 in the file means no limit and is `None` here.
    pub top_k: Option<usize>,
    /// Least probability, as a part of the greatest.
    pub min_p: Option<f64>,
    /// Penalty on tokens that have been seen, 1 being none.
    pub repetition_penalty: Option<f64>,
    /// Most tokens to generate.
    pub max_new_tokens: Option<usize>,
    /// Tokens that end a text, from here or, where absent, from the config.
    pub eos_token_ids: Vec<u32>,
}

impl GenerationDefaults {
    pub(crate) fn open(store: &dyn Store, config: &ModelConfig) -> Result<Self, CheckpointError> {
        let Some(object) = json::object_if_present(store, FILE)? else {
            return Ok(Self { eos_token_ids: config.eos_ids.clone(), ..Self::default() });
        };
        Self::from_object(&store.root().join(FILE), &object, config)
    }

    /// Parses the text of a `generation_config.json` of a model; `path` is for messages.
    ///
    /// # Errors
    /// A field that is wrong, by name.
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
        let sampled = fields.get("do_sample").is_some() && fields.flag("do_sample", false)?;
        let temperature = fields.optional_number("temperature")?;
        if let Some(temperature) = temperature.filter(|temperature| *temperature < 0.0) {
            return Err(fields.error("temperature", format!("is {temperature}, expected at least 0")));
        }
        let part = |name: &str| {
            let part = fields.optional_number(name)?;
            match part.filter(|part| !(0.0..=1.0).contains(part)) {
                Some(part) => Err(fields.error(name, format!("is {part}, expected 0 to 1"))),
                None => Ok(part),
            }
        };
        // Read even where greedy, so that a damaged file is found; sampling limits change nothing then.
        let top_p = part("top_p")?.filter(|top_p| *top_p > 0.0);
        let min_p = part("min_p")?;
        let top_k = fields.optional_count("top_k")?.filter(|top_k| *top_k > 0);
        let mut eos_token_ids = fields.token_ids("eos_token_id", config.vocab_size)?;
        if fields.get("eos_token_id").is_none() {
            eos_token_ids.clone_from(&config.eos_ids);
        }
        Ok(Self {
            temperature: if sampled { temperature.unwrap_or(1.0) } else { 0.0 },
            top_p: top_p.filter(|_| sampled),
            top_k: top_k.filter(|_| sampled),
            min_p: min_p.filter(|_| sampled),
            repetition_penalty: fields.optional_positive("repetition_penalty")?,
            max_new_tokens: fields.optional_size("max_new_tokens")?,
            eos_token_ids,
        })
    }
}
