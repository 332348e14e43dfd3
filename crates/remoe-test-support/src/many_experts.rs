//! Model of a realistic size for planning: 27 layers of 64 experts and a vocabulary of 100,000 tokens, with a
//! predictor. Its weights are random and its hidden size is small, so that it starts within a second.

use crate::checkpoint::{Sizes, generate_in};
use crate::command::remoe;
use crate::once;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

/// Number of layers.
pub const LAYERS: usize = 27;
/// Number of experts per layer.
pub const EXPERTS: usize = 64;
/// Least size of the vocabulary.
pub const VOCABULARY: usize = 100_000;

/// Text per topic for training the tokenizer, in bytes.
const MAX_TEXT_BYTES: usize = 24 << 20;
/// Prompts per topic for training the predictor.
const TRAINING_PROMPTS: usize = 24;
/// Prompts per topic for tests.
const HELD_OUT_PROMPTS: usize = 8;
/// Length of a prompt, in characters.
const PROMPT_CHARACTERS: usize = 240;

/// Topics with texts on every Debian system with a compiler and Python: name, folder, and suffix of file names.
const TOPICS: [(&str, &str, &str); 3] = [
    ("headers", "/usr/include", ".h"),
    ("python", "/usr/lib", ".py"),
    ("licences", "/usr/share/doc", "copyright"),
];

/// Generated model.
#[derive(Debug)]
pub struct ManyExperts {
    /// Folder of the checkpoint, with its predictor.
    pub folder: PathBuf,
    prompts: Value,
}

impl ManyExperts {
    /// Returns the model, which the first test of a run generates.
    ///
    /// # Panics
    /// The system has too few texts: it is not Debian with a compiler and Python.
    pub async fn get() -> Self {
        let folder = once::folder("many-experts", make).await;
        let prompts = fs::read_to_string(folder.join(PROMPTS)).expect("the prompts can be read");
        let prompts = serde_json::from_str(&prompts).expect("the prompts are JSON");
        Self { folder: folder.join(MODEL), prompts }
    }

    /// Returns prompts of `topic` that the predictor was not trained on.
    ///
    /// # Panics
    /// The topic does not exist.
    #[must_use]
    pub fn prompts(&self, topic: &str) -> Vec<&str> {
        let prompts = self.prompts[topic].as_array().unwrap_or_else(|| panic!("no topic is called {topic}"));
        prompts.iter().filter_map(Value::as_str).collect()
    }
}

const MODEL: &str = "model";
const PROMPTS: &str = "prompts.json";

async fn make(folder: &Path) {
    let texts: Vec<(&str, Vec<String>)> =
        TOPICS.iter().map(|&(topic, below, end)| (topic, texts(Path::new(below), end))).collect();
    let model = folder.join(MODEL);
    fs::create_dir(&model).expect("a folder can be made");
    let vocabulary = write_tokenizer(&model, texts.iter().flat_map(|(_, texts)| texts));
    generate_in(
        &model,
        Sizes {
            layers: LAYERS,
            hidden: 128,
            width: 64,
            experts: EXPERTS,
            top_k: 6,
            vocabulary,
            context: 1024,
        },
    );
    let mut held_out = json!({});
    let mut recorded = Vec::new();
    for (topic, texts) in &texts {
        let mut prompts = texts.iter().filter_map(|text| prompt(text));
        assert!(prompts.clone().count() > HELD_OUT_PROMPTS, "too few texts about {topic}");
        held_out[*topic] = prompts.by_ref().take(HELD_OUT_PROMPTS).collect();
        recorded.extend(prompts.take(TRAINING_PROMPTS).map(|prompt| json!({"prompt": prompt}).to_string()));
    }
    let lines = folder.join("recorded.jsonl");
    fs::write(&lines, recorded.join("\n")).expect("a file can be written");
    fs::write(folder.join(PROMPTS), held_out.to_string()).expect("a file can be written");
    let path = |path: &Path| path.to_str().expect("temporary folders have readable names").to_owned();
    let (model, records) = (path(&model), path(&folder.join("records.npy")));
    for command in [
        &["record", "--model", &model, "--prompts", &path(&lines), "--out", &records, "--max-tokens", "16"][..],
        &[
            "predictor",
            "build",
            "--history",
            &records,
            "--model",
            &model,
            "--out",
            &format!("{model}/predictor"),
        ],
    ] {
        let (code, answer) = remoe(command).await;
        assert_eq!(code, Some(0), "{command:?}: {answer}");
    }
}

/// Reads at most [`MAX_TEXT_BYTES`] bytes of text from files below `folder` with the suffix `end`, in the order of their names.
fn texts(folder: &Path, end: &str) -> Vec<String> {
    let (mut texts, mut bytes) = (Vec::new(), 0);
    let mut left = vec![folder.to_owned()];
    while let Some(path) = left.pop().filter(|_| bytes < MAX_TEXT_BYTES) {
        if path.is_symlink() {
            continue;
        }
        if let Ok(entries) = fs::read_dir(&path) {
            let mut below: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
            below.sort_unstable_by(|a, b| b.cmp(a));
            left.extend(below);
        } else if path.to_string_lossy().ends_with(end) {
            let Ok(text) = fs::read_to_string(&path) else { continue };
            bytes += text.len();
            texts.push(text);
        }
    }
    texts
}

/// Returns [`PROMPT_CHARACTERS`] characters from the middle of `text`, if that is long enough.
fn prompt(text: &str) -> Option<String> {
    let prompt: String = text.chars().skip(text.chars().count() / 2).take(PROMPT_CHARACTERS).collect();
    (prompt.len() >= PROMPT_CHARACTERS).then_some(prompt)
}

/// Trains a byte-level BPE on `texts` and writes it into `folder`; returns the size of its vocabulary.
fn write_tokenizer<'t>(folder: &Path, texts: impl Iterator<Item = &'t String> + Send) -> usize {
    let trainer = BpeTrainer::builder()
        .vocab_size(VOCABULARY + 1024)
        .min_frequency(2)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(vec![AddedToken::from("<|endoftext|>", true)])
        .build();
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    tokenizer.train(&mut TrainerWrapper::from(trainer), texts).expect("a tokenizer can be trained");
    // With few texts, the trained vocabulary is smaller.
    let unused = tokenizer.get_vocab_size(true)..VOCABULARY;
    let unused: Vec<_> = unused.map(|id| AddedToken::from(format!("<|unused_{id}|>"), true)).collect();
    tokenizer.add_special_tokens(unused).expect("tokens can be added");
    let size = tokenizer.get_vocab_size(true);
    tokenizer.save(folder.join("tokenizer.json"), false).expect("the tokenizer is written");
    size
}
