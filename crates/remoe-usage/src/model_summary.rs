//! Files of a model that a gateway needs to predict, in one piece: how its text becomes tokens, its embedding or a sketch
//! of it, and the predictor that came with it. A main function, which has the model, tells it to gateways, which have not.
//!
//! The piece is a line of JSON that says what follows, and then the bytes of that: files, the predictor, the embedding.
//! Each part is bounded, so that the whole is at most [`MAX_MODEL_SUMMARY`] whatever the model:
//!
//! | part | bytes, at most |
//! | --- | --- |
//! | the line | [`MAX_HEAD`] |
//! | files | [`MAX_FILES`] |
//! | the predictor | [`MAX_PREDICTOR`] |
//! | the embedding or its sketch | [`MAX_SKETCH_BYTES`] |
//!
//! The whole predictor goes with the whole embedding, where both fit. Else the portable one goes with a sketch in its
//! dimensions.

use crate::body::Prompts;
use crate::store::StoreError;
use crate::usage_predictor::{PredictorOptions, UsagePredictor};
use bytes::Bytes;
use remoe_model::text::TextError;
use remoe_model::{Checkpoint, CheckpointError, FileRange, Store, StoredDtype, StoredFile, TensorRef};
use remoe_predictor::record::RecordHeader;
use remoe_predictor::{
    Embedding, EmbeddingType, MAX_PORTABLE_BYTES, MAX_SKETCH_BYTES, PORTABLE_FILE, PREDICTOR_FILE, Portable,
    PredictError, Trained, TunedPredictor, sketch_dimensions,
};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Bytes of a primer, at most.
pub const MAX_MODEL_SUMMARY: usize = 96 << 20;
/// Bytes of a predictor, whole or portable.
const MAX_PREDICTOR: usize = MAX_PORTABLE_BYTES;
/// Bytes of a file of text; a larger one is left out, and with it what prompts are.
const MAX_FILE: usize = 16 << 20;
/// Bytes of all of them; what exceeds that is left out.
const MAX_FILES: usize = 33 << 20;
/// Bytes of the line that says what follows.
const MAX_HEAD: usize = 1 << 20;
/// Bytes of the embedding that are read at once.
const BLOCK: usize = 1 << 20;
/// Memory of a tokenizer over the size of its file, about.
const TOKENIZER_FACTOR: usize = 8;
/// Version of the form.
const VERSION: u32 = 1;
/// Version of one with a portable predictor: gateways that know only the first refuse it by name.
const PORTABLE_VERSION: u32 = 2;

const _: () = assert!(MAX_HEAD + MAX_FILES + MAX_PREDICTOR + MAX_SKETCH_BYTES <= MAX_MODEL_SUMMARY);
/// Files of the tokenizer and the chat template.
const FILES: [&str; 5] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// Why there is no primer, or none that can be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelSummaryError {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A file beside it cannot be read.
    #[error(transparent)]
    File(#[from] io::Error),
    /// The bytes are not a model summary.
    #[error("invalid model summary: {0}")]
    Form(String),
    /// The tokenizer or the chat template cannot be read.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The embedding or the predictor cannot be used.
    #[error(transparent)]
    Predict(#[from] PredictError),
    /// The training history cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Head of a summary, on its first line. The parts that it describes follow in its order.
#[derive(Debug, Serialize, Deserialize)]
struct Head {
    version: u32,
    /// Shape of the model's activations.
    #[serde(flatten)]
    model: RecordHeader,
    vocabulary: usize,
    /// Names and bytes of the files.
    files: Vec<(String, usize)>,
    /// Bytes of the predictor; 0: there is none. In [`PORTABLE_VERSION`] it is a portable one.
    predictor: usize,
    /// Elements of a row of the embedding.
    dimensions: usize,
    element: Element,
}

/// Element type of the embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Element {
    F32,
    Bf16,
    F16,
}

impl From<Element> for EmbeddingType {
    fn from(element: Element) -> Self {
        match element {
            Element::F32 => Self::F32,
            Element::Bf16 => Self::Bf16,
            Element::F16 => Self::F16,
        }
    }
}

/// Model summary, from which a gateway predicts requests.
#[derive(Debug)]
pub struct ModelSummary {
    head: Head,
    files: Vec<(String, Bytes)>,
    predictor: Bytes,
    embedding: Bytes,
}

/// Hands the primer of `checkpoint`, whose activations are those of `header`, to `take` in blocks of a few MiB; ends
/// where that says false.
///
/// # Errors
/// The model has no layer with experts, or a file cannot be read.
pub fn write_model_summary(
    checkpoint: &Checkpoint,
    header: &RecordHeader,
    mut take: impl FnMut(Vec<u8>) -> bool,
) -> Result<(), ModelSummaryError> {
    let tensor = checkpoint.embedding();
    let (element, kind) = element(tensor);
    let (hidden, vocabulary) = (checkpoint.config().hidden_size, checkpoint.config().vocab_size);
    let rows = tensor.shape.first().copied().unwrap_or(0);
    let whole = rows.saturating_mul(hidden).saturating_mul(kind.bytes());
    let store = checkpoint.store();
    let mut files = Vec::new();
    let mut left = MAX_FILES;
    for (name, file) in FILES.into_iter().zip(store.open_all(&FILES)?) {
        if let Some(file) = file.filter(|file| file.size() <= MAX_FILE.min(left) as u64) {
            let bytes = read(&*file)?;
            left -= bytes.len().min(left);
            files.push((name.to_owned(), bytes));
        }
    }
    let saved = PredictorFile::beside(checkpoint, whole)?;
    let is_sketched = whole > MAX_SKETCH_BYTES || matches!(saved, PredictorFile::Portable { .. });
    let dimensions = match saved {
        PredictorFile::Portable { dimensions, .. } => sketch_dimensions(rows, dimensions)?,
        // As many as fit: only past requests are compared.
        _ if is_sketched => sketch_dimensions(rows, hidden)?,
        _ => hidden,
    };
    let version = if matches!(saved, PredictorFile::Portable { .. }) { PORTABLE_VERSION } else { VERSION };
    let predictor = saved.into_bytes();
    let head = Head {
        version,
        model: header.clone(),
        vocabulary,
        files: files.iter().map(|(name, bytes)| (name.clone(), bytes.len())).collect(),
        predictor: predictor.len(),
        dimensions,
        element: if is_sketched { Element::F16 } else { element },
    };
    let mut line = serde_json::to_vec(&head).map_err(|error| ModelSummaryError::Form(error.to_string()))?;
    line.push(b'\n');
    let small = std::iter::once(line).chain(files.into_iter().map(|(_, bytes)| bytes)).chain([predictor]);
    for part in small {
        if !take(part) {
            return Ok(());
        }
    }
    let row = (hidden * kind.bytes()).max(1);
    let block = (BLOCK / row).max(1) * row;
    let mut at = 0;
    while at < whole {
        let mut bytes = vec![0; block.min(whole - at)];
        checkpoint.read_into(tensor, at as u64..(at + bytes.len()) as u64, &mut bytes)?;
        at += bytes.len();
        if !take(if is_sketched { kind.sketch(hidden, dimensions, &bytes) } else { bytes }) {
            break;
        }
    }
    Ok(())
}

/// The predictor beside a checkpoint that gateways get.
enum PredictorFile {
    Nothing,
    Whole(Vec<u8>),
    Portable { bytes: Vec<u8>, dimensions: usize },
}

impl PredictorFile {
    /// Reads that of `checkpoint`, whose embedding has so many bytes. Predictors lie beside models in folders only.
    fn beside(checkpoint: &Checkpoint, embedding: usize) -> Result<Self, ModelSummaryError> {
        let folder = checkpoint.store().root().join("predictor");
        let bytes_of = |name: &str| {
            let file = folder.join(name).metadata().ok().filter(|file| file.is_file());
            file.map(|file| file.len()).filter(|length| *length > 0)
        };
        let fits = |length: &u64| *length <= MAX_PREDICTOR as u64;
        let whole = bytes_of(PREDICTOR_FILE);
        if embedding <= MAX_SKETCH_BYTES && whole.as_ref().is_some_and(fits) {
            return Ok(Self::Whole(std::fs::read(folder.join(PREDICTOR_FILE))?));
        }
        if bytes_of(PORTABLE_FILE).as_ref().is_some_and(fits) {
            let bytes = std::fs::read(folder.join(PORTABLE_FILE))?;
            match Portable::dimensions(&bytes) {
                Ok(dimensions) => return Ok(Self::Portable { bytes, dimensions }),
                Err(error) => tracing::warn!(%error, "{PORTABLE_FILE} unusable: gateways predict without it"),
            }
            return Ok(Self::Nothing);
        }
        if whole.is_some() {
            let folder = folder.display();
            tracing::warn!(
                "{folder} has no {PORTABLE_FILE}, and {PREDICTOR_FILE} needs the whole embedding of {embedding} bytes: \
                 gateways predict without it; run `remoe predictor build --convert`"
            );
        }
        Ok(Self::Nothing)
    }

    fn into_bytes(self) -> Vec<u8> {
        match self {
            Self::Nothing => Vec::new(),
            Self::Whole(bytes) | Self::Portable { bytes, .. } => bytes,
        }
    }
}

impl ModelSummary {
    /// Reads one that arrived as `bytes`, and shares them.
    ///
    /// # Errors
    /// It is none.
    pub fn from_bytes(bytes: &Bytes) -> Result<Self, ModelSummaryError> {
        let wrong = |message: &str| ModelSummaryError::Form(message.to_owned());
        if bytes.len() > MAX_MODEL_SUMMARY {
            let message = format!("expected at most {MAX_MODEL_SUMMARY} bytes, got {}", bytes.len());
            return Err(ModelSummaryError::Form(message));
        }
        let end = bytes.iter().take(MAX_HEAD).position(|byte| *byte == b'\n');
        let mut rest = bytes.clone();
        let line = rest.split_to(end.ok_or_else(|| wrong("the first line has no end"))? + 1);
        let head: Head =
            serde_json::from_slice(&line).map_err(|error| ModelSummaryError::Form(error.to_string()))?;
        if ![VERSION, PORTABLE_VERSION].contains(&head.version) {
            return Err(wrong("version mismatch; update the main function or the gateway"));
        }
        if head.dimensions == 0 {
            return Err(wrong("the embedding has no dimensions"));
        }
        head.model.check().map_err(|error| ModelSummaryError::Form(error.to_string()))?;
        let mut part = |length: usize, most: usize, what: &str| match length {
            length if length > most => Err(ModelSummaryError::Form(format!(
                "{what} too large: expected at most {most} bytes, got {length}"
            ))),
            length if length > rest.len() => Err(wrong("truncated")),
            length => Ok(rest.split_to(length)),
        };
        let mut files: Vec<(String, Bytes)> = Vec::new();
        let mut left = MAX_FILES;
        for (name, length) in &head.files {
            if !FILES.contains(&name.as_str()) || files.iter().any(|(known, _)| known == name) {
                return Err(wrong("unexpected or duplicate file"));
            }
            files.push((name.clone(), part(*length, MAX_FILE.min(left), name)?));
            left -= length;
        }
        let predictor = part(head.predictor, MAX_PREDICTOR, "predictor")?;
        if rest.len() > MAX_SKETCH_BYTES {
            return Err(ModelSummaryError::Form(format!(
                "embedding too large: expected at most {MAX_SKETCH_BYTES} bytes, got {}",
                rest.len()
            )));
        }
        Ok(Self { files, predictor, embedding: rest, head })
    }

    /// Fingerprint of the model that it is of.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.head.model.model
    }

    /// Bytes of memory that what is made of it takes, about: a tokenizer several times its file.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        let files = self.files.iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
        (TOKENIZER_FACTOR * files + 2 * self.predictor.len() + self.embedding.len()) as u64
    }

    /// Begins to predict requests of the model.
    ///
    /// # Errors
    /// The summary's content cannot be used, or the store of `options` cannot.
    pub fn open(self, options: PredictorOptions) -> Result<UsagePredictor, ModelSummaryError> {
        let Head { version, model, vocabulary, dimensions, element, .. } = self.head;
        // Only counts are told.
        let header = RecordHeader { tokens: false, ..model };
        let embedding = Embedding::new(dimensions, element.into(), self.embedding)?;
        let prompts = Prompts::open_in(&SummaryFiles { files: self.files }, vocabulary)?;
        let (predictor, model) = (&self.predictor, &header.model);
        let trained: Option<Box<dyn TunedPredictor>> = match (predictor.is_empty(), version) {
            (true, _) => None,
            (false, VERSION) => Some(Box::new(Trained::from_bytes(predictor, model, &embedding)?)),
            (false, _) => Some(Box::new(Portable::from_bytes(predictor, model, &embedding)?)),
        };
        Ok(UsagePredictor::new(header, embedding, prompts, trained, options)?)
    }
}

/// The type of the embedding's elements at rest.
fn element(tensor: &TensorRef) -> (Element, EmbeddingType) {
    let element = match tensor.dtype {
        StoredDtype::F32 => Element::F32,
        StoredDtype::Bf16 => Element::Bf16,
        StoredDtype::F16 => Element::F16,
    };
    (element, element.into())
}

fn read(file: &dyn StoredFile) -> io::Result<Vec<u8>> {
    // Checked to be small.
    let mut bytes = vec![0; usize::try_from(file.size()).unwrap_or(0)];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// The files that were told.
#[derive(Debug)]
struct SummaryFiles {
    files: Vec<(String, Bytes)>,
}

/// One of them.
#[derive(Debug)]
struct SummaryFile(Bytes);

impl Store for SummaryFiles {
    fn root(&self) -> &Path {
        Path::new("primer")
    }

    fn open(&self, name: &str) -> io::Result<Option<Arc<dyn StoredFile>>> {
        let found = self.files.iter().find(|(known, _)| known == name);
        Ok(found.map(|(_, bytes)| Arc::new(SummaryFile(bytes.clone())) as Arc<dyn StoredFile>))
    }

    fn prefetch(&self, _ranges: &[FileRange<'_>]) -> io::Result<()> {
        Ok(())
    }
}

impl StoredFile for SummaryFile {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, target: &mut [u8], at: u64) -> io::Result<usize> {
        let rest = usize::try_from(at).ok().and_then(|at| self.0.get(at..)).unwrap_or_default();
        let read = rest.len().min(target.len());
        target.iter_mut().zip(rest).for_each(|(target, byte)| *target = *byte);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoe_predictor::TrainingOptions;
    use remoe_predictor::record::ActivationRecord;

    /// A folder with the demo model, and `files` in its folder of predictors.
    fn model_with(files: &[(&str, &[u8])]) -> (tempfile::TempDir, Checkpoint) {
        let folder = tempfile::tempdir().unwrap();
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model");
        for name in ["config.json", "model.safetensors"] {
            std::os::unix::fs::symlink(demo.join(name), folder.path().join(name)).unwrap();
        }
        let beside = folder.path().join("predictor");
        std::fs::create_dir(&beside).unwrap();
        files.iter().for_each(|(name, bytes)| std::fs::write(beside.join(name), bytes).unwrap());
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        (folder, checkpoint)
    }

    fn portable() -> Vec<u8> {
        let rows: Vec<f32> = (0..24 * 32).map(|at| (at * at % 17) as f32 - 8.0).collect();
        let embedding = Embedding::from_rows(32, &rows).unwrap();
        let record = |number: u32| ActivationRecord {
            prompt: vec![number % 24, 3],
            prefill: vec![number, 1],
            decode: vec![1, 2],
            steps: 1,
            experts: None,
        };
        let records: Vec<ActivationRecord> = (0..20).map(record).collect();
        let header = RecordHeader {
            model: "ab".repeat(32),
            layers: vec![0],
            experts: 2,
            top_k: 1,
            dtype: "float32".to_owned(),
            tokens: false,
        };
        let trained = Trained::fit(header, &records, &embedding, TrainingOptions::default()).unwrap();
        Portable::of(&trained, &embedding, &embedding.sketched(16).unwrap()).unwrap().to_bytes().unwrap()
    }

    #[test]
    fn whole_predictor_travels_only_with_a_whole_embedding() {
        let portable = portable();
        let whole = (PREDICTOR_FILE, &b"whole"[..]);
        let (small, large) = (MAX_SKETCH_BYTES, MAX_SKETCH_BYTES + 1);
        let chosen = |files: &[(&str, &[u8])], embedding| {
            let (_folder, checkpoint) = model_with(files);
            match PredictorFile::beside(&checkpoint, embedding).unwrap() {
                PredictorFile::Nothing => "nothing".to_owned(),
                PredictorFile::Whole(_) => "whole".to_owned(),
                PredictorFile::Portable { dimensions, .. } => format!("portable {dimensions}"),
            }
        };
        let both = [whole, (PORTABLE_FILE, &portable[..])];
        assert_eq!(chosen(&both, small), "whole");
        assert_eq!(chosen(&both, large), "portable 16");
        assert_eq!(chosen(&both[1..], small), "portable 16");
        assert_eq!(chosen(&[whole], large), "nothing", "an old folder: the log says what to do");
        assert_eq!(chosen(&[(PORTABLE_FILE, b"damaged")], small), "nothing");
        assert_eq!(chosen(&[(PORTABLE_FILE, b"")], small), "nothing");
        let oversized = vec![0; MAX_PREDICTOR + 1];
        assert_eq!(chosen(&[(PREDICTOR_FILE, &oversized), both[1]], small), "portable 16");
        assert_eq!(chosen(&[(PORTABLE_FILE, &oversized)], small), "nothing");
    }
}
