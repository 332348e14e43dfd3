//! Fill-in-the-middle: converts `prompt` and `suffix` to the prompt format that a model was trained on.

use remoe_proto::ServiceError;

/// Prompt format: its tokens by position, and tokens that end a middle.
struct Format {
    prefix: &'static str,
    suffix: &'static str,
    middle: &'static str,
    ends: &'static [&'static str],
}

/// Known formats, all with the prefix first. Sources: the model cards of Qwen2.5-Coder and DeepSeek-Coder,
/// and appendix A of "StarCoder: may the source be with you!" (2023), whose format IBM's Granite has too.
const FORMATS: [Format; 4] = [
    Format {
        prefix: "<|fim_prefix|>",
        suffix: "<|fim_suffix|>",
        middle: "<|fim_middle|>",
        ends: &["<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
    },
    Format {
        prefix: "<｜fim▁begin｜>",
        suffix: "<｜fim▁hole｜>",
        middle: "<｜fim▁end｜>",
        ends: &["<｜end▁of▁sentence｜>"],
    },
    Format {
        prefix: "<fim_prefix>",
        suffix: "<fim_suffix>",
        middle: "<fim_middle>",
        ends: &["<|endoftext|>", "<file_sep>", "<fim_pad>"],
    },
    Format {
        prefix: "<fim-prefix>",
        suffix: "<fim-suffix>",
        middle: "<fim-middle>",
        ends: &["<|endoftext|>", "<fim-pad>"],
    },
];

/// Fill-in-the-middle format of a model.
pub(super) struct FillIn {
    format: &'static Format,
    /// Ids of the tokens that end a middle and that the tokenizer has.
    pub(super) ends: Vec<u32>,
}

impl FillIn {
    /// Finds the format whose tokens `id_of` knows.
    ///
    /// # Errors
    /// Fails if there is none: the model was not trained to fill in the middle.
    pub(super) fn of(id_of: impl Fn(&str) -> Option<u32>) -> Result<Self, ServiceError> {
        let own = |format: &Format| [format.prefix, format.suffix, format.middle];
        let has = |format: &&Format| own(format).into_iter().all(|token| id_of(token).is_some());
        let format = FORMATS.iter().find(has).ok_or_else(|| {
            let message = "unsupported `suffix`: this model's tokenizer has no tokens for the middle of a text; leave \
                           it out, or use a model that was trained to fill in the middle, such as Qwen-Coder, \
                           DeepSeek-Coder or StarCoder";
            ServiceError::invalid("suffix", message)
        })?;
        let ends = format.ends.iter().copied().chain(own(format)).filter_map(id_of).collect();
        Ok(Self { format, ends })
    }

    /// Returns the prompt for the text between `prefix` and `suffix`.
    pub(super) fn prompt(&self, prefix: &str, suffix: &str) -> String {
        let Format { prefix: begin, suffix: hole, middle, .. } = self.format;
        format!("{begin}{prefix}{hole}{suffix}{middle}")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use remoe_model::text::Tokenizer;
    use serde_json::{Value, json};
    use std::path::Path;

    /// Creates a byte-level tokenizer with the special tokens `added`. Returns it with the id of the first.
    fn tokenizer(added: &[&str]) -> (Tokenizer, u32) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../tests/fixtures/tokenizers/tok-bytelevel/tokenizer.json");
        let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let known = file["added_tokens"].as_array().unwrap().len()
            + file["model"]["vocab"].as_object().unwrap().len();
        let first = u32::try_from(known).unwrap();
        let tokens = file["added_tokens"].as_array_mut().unwrap();
        for (id, token) in (first..).zip(added) {
            tokens.push(
                json!({"id": id, "content": token, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false}),
            );
        }
        let bytes = serde_json::to_vec(&file).unwrap();
        (Tokenizer::from_bytes(&path, &bytes, known + added.len()).unwrap(), first)
    }

    #[test]
    fn prompts_of_known_formats_hold_their_tokens_in_order() {
        for format in &FORMATS {
            let own = [format.prefix, format.suffix, format.middle, format.ends[0]];
            let (tokenizer, first) = tokenizer(&own);
            let fill_in = FillIn::of(|token| tokenizer.token_to_id(token)).unwrap();
            let ids = tokenizer.encode(&fill_in.prompt("def f(", "return 1"), false).unwrap();
            let special: Vec<u32> = ids.iter().copied().filter(|&id| id >= first).collect();
            assert_eq!(special, [first, first + 1, first + 2], "{}", format.prefix);
            assert_eq!((ids[0], *ids.last().unwrap()), (first, first + 2));
            assert_eq!(tokenizer.decode(&ids).unwrap(), "def f(return 1");
            let known = own.map(|token| tokenizer.token_to_id(token).unwrap());
            assert!(known.iter().all(|id| fill_in.ends.contains(id)), "{:?}", fill_in.ends);
            assert!(fill_in.ends.iter().all(|&id| tokenizer.is_special(id)));
        }
    }

    #[test]
    fn tokenizer_without_all_tokens_of_a_format_is_refused() {
        let (tokenizer, _) = tokenizer(&["<|fim_prefix|>", "<|fim_suffix|>"]);
        let error = FillIn::of(|token| tokenizer.token_to_id(token)).err().unwrap();
        assert_eq!(error.field.as_deref(), Some("suffix"));
        assert!(error.message.starts_with("unsupported `suffix`: this model's tokenizer has no tokens"));
    }
}
