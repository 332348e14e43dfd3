//! Model summary: the files of a model that a gateway needs for predictions, in one message. It holds the tokenizer
//! and chat template, the embedding or a sketch of it, and a predictor, if the model has one. A main function, which
//! has the checkpoint, sends it to gateways.
//!
//! The summary begins with a line of JSON that lists the parts. The bytes of the parts follow: files, predictor,
//! embedding. Each part is bounded, so that the whole is at most [`MAX_MODEL_SUMMARY`] for every model:
//!
//! | part | largest size in bytes |
//! | --- | --- |
//! | line of JSON | [`MAX_HEADER_LINE`] |
//! | files | [`MAX_FILES_BYTES`] |
//! | predictor | [`MAX_PREDICTOR_BYTES`] |
//! | embedding or its sketch | [`MAX_SKETCH_BYTES`] |
//!
//! The full predictor needs the full embedding. If either is too large, the summary has the portable predictor and a
//! sketch of the embedding in its dimensions.

use crate::history_store::HistoryStoreError;
use crate::prompt_reader::PromptReader;
use crate::usage_predictor::{PredictorOptions, UsagePredictor};
use bytes::Bytes;
use remoe_model::text::TextError;
use remoe_model::{Checkpoint, CheckpointError, FileRange, Store, StoredDtype, StoredFile, TensorRef};
use remoe_predictor::record::RecordHeader;
use remoe_predictor::{
    Embedding, EmbeddingType, MAX_PORTABLE_BYTES, MAX_SKETCH_BYTES, PORTABLE_FILE, PREDICTOR_FILE,
    PortablePredictor, PredictError, TrainedPredictor, TunedPredictor, sketch_dimensions,
};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Largest model summary, in bytes.
pub const MAX_MODEL_SUMMARY: usize = 96 << 20;
/// Largest predictor, full or portable, in bytes.
const MAX_PREDICTOR_BYTES: usize = MAX_PORTABLE_BYTES;
/// Largest tokenizer or template file, in bytes. Larger files are omitted; prompts of text then get no prediction.
const MAX_FILE_BYTES: usize = 16 << 20;
/// Largest size of all these files together, in bytes. Further files are omitted.
const MAX_FILES_BYTES: usize = 33 << 20;
/// Largest line of JSON, in bytes.
const MAX_HEADER_LINE: usize = 1 << 20;
/// Size of one read of the embedding, in bytes.
const READ_BYTES: usize = 1 << 20;
/// Approximate memory of a tokenizer, as a multiple of its file.
const TOKENIZER_FACTOR: usize = 8;
/// Format version with a full predictor or none.
const VERSION: u32 = 1;
/// Format version with a portable predictor. Gateways that know only [`VERSION`] report a version mismatch.
const PORTABLE_VERSION: u32 = 2;

const _: () =
    assert!(MAX_HEADER_LINE + MAX_FILES_BYTES + MAX_PREDICTOR_BYTES + MAX_SKETCH_BYTES <= MAX_MODEL_SUMMARY);
/// Files of the tokenizer and the chat template.
const FILES: [&str; 5] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// Reason that a model summary cannot be written or used.
#[derive(Debug, thiserror::Error)]
pub enum ModelSummaryError {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A file of the tokenizer, the chat template or the predictor cannot be read.
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
    Store(#[from] HistoryStoreError),
}

/// First line of a summary. Its parts follow in the order of the fields.
#[derive(Debug, Serialize, Deserialize)]
struct SummaryHeader {
    version: u32,
    /// Shape of the model's activations.
    #[serde(flatten)]
    model: RecordHeader,
    vocabulary: usize,
    /// Name and size in bytes of each file.
    files: Vec<(String, usize)>,
    /// Size of the predictor in bytes, 0 if there is none. In [`PORTABLE_VERSION`] it is a portable one.
    predictor: usize,
    /// Elements of a row of the embedding.
    dimensions: usize,
    /// Element type of the embedding.
    #[serde(rename = "element")]
    element_type: ElementType,
}

/// Element type of the embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ElementType {
    F32,
    Bf16,
    F16,
}

impl From<ElementType> for EmbeddingType {
    fn from(element_type: ElementType) -> Self {
        match element_type {
            ElementType::F32 => Self::F32,
            ElementType::Bf16 => Self::Bf16,
            ElementType::F16 => Self::F16,
        }
    }
}

/// Model summary, from which a gateway predicts requests.
#[derive(Debug)]
pub struct ModelSummary {
    header_line: SummaryHeader,
    files: Vec<(String, Bytes)>,
    predictor: Bytes,
    embedding: Bytes,
}

/// Writes the summary of `checkpoint`, whose activation records have `header`, in blocks of a few MiB. Stops when
/// `take` returns false.
///
/// # Errors
/// The model has no layer with experts, or a file cannot be read.
pub fn write_model_summary(
    checkpoint: &Checkpoint,
    header: &RecordHeader,
    mut take: impl FnMut(Vec<u8>) -> bool,
) -> Result<(), ModelSummaryError> {
    let tensor = checkpoint.embedding();
    let (element_type, embedding_type) = element_type(tensor);
    let (hidden, vocabulary) = (checkpoint.config().hidden_size, checkpoint.config().vocab_size);
    let rows = tensor.shape.first().copied().unwrap_or(0);
    let embedding_bytes = rows.saturating_mul(hidden).saturating_mul(embedding_type.bytes());
    let store = checkpoint.store();
    let mut files = Vec::new();
    let mut remaining = MAX_FILES_BYTES;
    for (name, file) in FILES.into_iter().zip(store.open_all(&FILES)?) {
        if let Some(file) = file.filter(|file| file.size() <= MAX_FILE_BYTES.min(remaining) as u64) {
            let bytes = read_file(&*file)?;
            remaining -= bytes.len().min(remaining);
            files.push((name.to_owned(), bytes));
        }
    }
    let saved = PredictorFile::beside(checkpoint, embedding_bytes)?;
    let is_sketched = embedding_bytes > MAX_SKETCH_BYTES || matches!(saved, PredictorFile::Portable { .. });
    let dimensions = match saved {
        PredictorFile::Portable { dimensions, .. } => sketch_dimensions(rows, dimensions)?,
        // Without a predictor, only past requests are compared: as many dimensions as fit.
        _ if is_sketched => sketch_dimensions(rows, hidden)?,
        _ => hidden,
    };
    let version = if matches!(saved, PredictorFile::Portable { .. }) { PORTABLE_VERSION } else { VERSION };
    let predictor = saved.into_bytes();
    let header_line = SummaryHeader {
        version,
        model: header.clone(),
        vocabulary,
        files: files.iter().map(|(name, bytes)| (name.clone(), bytes.len())).collect(),
        predictor: predictor.len(),
        dimensions,
        element_type: if is_sketched { ElementType::F16 } else { element_type },
    };
    let mut line =
        serde_json::to_vec(&header_line).map_err(|error| ModelSummaryError::Form(error.to_string()))?;
    line.push(b'\n');
    let small_parts =
        std::iter::once(line).chain(files.into_iter().map(|(_, bytes)| bytes)).chain([predictor]);
    for part in small_parts {
        if !take(part) {
            return Ok(());
        }
    }
    let row = (hidden * embedding_type.bytes()).max(1);
    let block = (READ_BYTES / row).max(1) * row;
    let mut offset = 0;
    while offset < embedding_bytes {
        let mut bytes = vec![0; block.min(embedding_bytes - offset)];
        checkpoint.read_into(tensor, offset as u64..(offset + bytes.len()) as u64, &mut bytes)?;
        offset += bytes.len();
        if !take(if is_sketched { embedding_type.sketch(hidden, dimensions, &bytes) } else { bytes }) {
            break;
        }
    }
    Ok(())
}

/// Predictor file of a checkpoint that a summary contains.
enum PredictorFile {
    Nothing,
    Full(Vec<u8>),
    Portable { bytes: Vec<u8>, dimensions: usize },
}

impl PredictorFile {
    /// Reads the predictor of `checkpoint`, whose embedding has `embedding_bytes` bytes. Only checkpoints in folders
    /// have predictors.
    fn beside(checkpoint: &Checkpoint, embedding_bytes: usize) -> Result<Self, ModelSummaryError> {
        let folder = checkpoint.store().root().join("predictor");
        let bytes_of = |name: &str| {
            let file = folder.join(name).metadata().ok().filter(|file| file.is_file());
            file.map(|file| file.len()).filter(|length| *length > 0)
        };
        let fits = |length: &u64| *length <= MAX_PREDICTOR_BYTES as u64;
        let full_bytes = bytes_of(PREDICTOR_FILE);
        if embedding_bytes <= MAX_SKETCH_BYTES && full_bytes.as_ref().is_some_and(fits) {
            return Ok(Self::Full(std::fs::read(folder.join(PREDICTOR_FILE))?));
        }
        if bytes_of(PORTABLE_FILE).as_ref().is_some_and(fits) {
            let bytes = std::fs::read(folder.join(PORTABLE_FILE))?;
            match PortablePredictor::dimensions(&bytes) {
                Ok(dimensions) => return Ok(Self::Portable { bytes, dimensions }),
                Err(error) => tracing::warn!(%error, "{PORTABLE_FILE} unusable: gateways predict without it"),
            }
            return Ok(Self::Nothing);
        }
        if full_bytes.is_some() {
            let folder = folder.display();
            tracing::warn!(
                "{folder} has no {PORTABLE_FILE}, and {PREDICTOR_FILE} needs the whole embedding of {embedding_bytes} bytes: \
                 gateways predict without it; run `remoe predictor build --convert`"
            );
        }
        Ok(Self::Nothing)
    }

    fn into_bytes(self) -> Vec<u8> {
        match self {
            Self::Nothing => Vec::new(),
            Self::Full(bytes) | Self::Portable { bytes, .. } => bytes,
        }
    }
}

impl ModelSummary {
    /// Parses a summary from `bytes` without copying its parts.
    ///
    /// # Errors
    /// The bytes are not a valid summary.
    pub fn from_bytes(bytes: &Bytes) -> Result<Self, ModelSummaryError> {
        let invalid = |message: &str| ModelSummaryError::Form(message.to_owned());
        if bytes.len() > MAX_MODEL_SUMMARY {
            let message = format!("expected at most {MAX_MODEL_SUMMARY} bytes, got {}", bytes.len());
            return Err(ModelSummaryError::Form(message));
        }
        let line_end = bytes.iter().take(MAX_HEADER_LINE).position(|byte| *byte == b'\n');
        let mut rest = bytes.clone();
        let line = rest.split_to(line_end.ok_or_else(|| invalid("the first line has no end"))? + 1);
        let header_line: SummaryHeader =
            serde_json::from_slice(&line).map_err(|error| ModelSummaryError::Form(error.to_string()))?;
        if ![VERSION, PORTABLE_VERSION].contains(&header_line.version) {
            return Err(invalid("version mismatch; update the main function or the gateway"));
        }
        if header_line.dimensions == 0 {
            return Err(invalid("the embedding has no dimensions"));
        }
        header_line.model.check().map_err(|error| ModelSummaryError::Form(error.to_string()))?;
        let mut split_part = |length: usize, limit: usize, what: &str| match length {
            length if length > limit => Err(ModelSummaryError::Form(format!(
                "{what} too large: expected at most {limit} bytes, got {length}"
            ))),
            length if length > rest.len() => Err(invalid("truncated")),
            length => Ok(rest.split_to(length)),
        };
        let mut files: Vec<(String, Bytes)> = Vec::new();
        let mut remaining = MAX_FILES_BYTES;
        for (name, length) in &header_line.files {
            if !FILES.contains(&name.as_str()) || files.iter().any(|(known, _)| known == name) {
                return Err(invalid("unexpected or duplicate file"));
            }
            files.push((name.clone(), split_part(*length, MAX_FILE_BYTES.min(remaining), name)?));
            remaining -= length;
        }
        let predictor = split_part(header_line.predictor, MAX_PREDICTOR_BYTES, "predictor")?;
        if rest.len() > MAX_SKETCH_BYTES {
            return Err(ModelSummaryError::Form(format!(
                "embedding too large: expected at most {MAX_SKETCH_BYTES} bytes, got {}",
                rest.len()
            )));
        }
        Ok(Self { files, predictor, embedding: rest, header_line })
    }

    /// Returns the fingerprint of the model.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.header_line.model.model
    }

    /// Returns the approximate memory of the predictor made from this summary, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        let files = self.files.iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
        (TOKENIZER_FACTOR * files + 2 * self.predictor.len() + self.embedding.len()) as u64
    }

    /// Creates the usage predictor of the model.
    ///
    /// # Errors
    /// The content of the summary is invalid, or the history store of `options` cannot be opened.
    pub fn open(self, options: PredictorOptions) -> Result<UsagePredictor, ModelSummaryError> {
        let SummaryHeader { version, model, vocabulary, dimensions, element_type, .. } = self.header_line;
        // Main functions report counts alone.
        let header = RecordHeader { tokens: false, ..model };
        let embedding = Embedding::new(dimensions, element_type.into(), self.embedding)?;
        let prompts = PromptReader::open_in(&SummaryFiles { files: self.files }, vocabulary)?;
        let (predictor, model) = (&self.predictor, &header.model);
        let trained: Option<Box<dyn TunedPredictor>> = match (predictor.is_empty(), version) {
            (true, _) => None,
            (false, VERSION) => Some(Box::new(TrainedPredictor::from_bytes(predictor, model, &embedding)?)),
            (false, _) => Some(Box::new(PortablePredictor::from_bytes(predictor, model, &embedding)?)),
        };
        Ok(UsagePredictor::new(header, embedding, prompts, trained, options)?)
    }
}

/// Returns the element type of a stored embedding.
fn element_type(tensor: &TensorRef) -> (ElementType, EmbeddingType) {
    let element_type = match tensor.dtype {
        StoredDtype::F32 => ElementType::F32,
        StoredDtype::Bf16 => ElementType::Bf16,
        StoredDtype::F16 => ElementType::F16,
    };
    (element_type, element_type.into())
}

fn read_file(file: &dyn StoredFile) -> io::Result<Vec<u8>> {
    // The size was checked before.
    let mut bytes = vec![0; usize::try_from(file.size()).unwrap_or(0)];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Files of a summary, as a checkpoint store.
#[derive(Debug)]
struct SummaryFiles {
    files: Vec<(String, Bytes)>,
}

/// File of a summary.
#[derive(Debug)]
struct SummaryFile(Bytes);

impl Store for SummaryFiles {
    fn root(&self) -> &Path {
        Path::new("model summary")
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
        let read_file = rest.len().min(target.len());
        target.iter_mut().zip(rest).for_each(|(target, byte)| *target = *byte);
        Ok(read_file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoe_predictor::TrainingOptions;
    use remoe_predictor::record::ActivationRecord;

    /// Creates a folder with the demo model and `files` in its predictor folder.
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
        let trained =
            TrainedPredictor::fit(header, &records, &embedding, TrainingOptions::default()).unwrap();
        PortablePredictor::from_trained(&trained, &embedding, &embedding.sketched(16).unwrap())
            .unwrap()
            .to_bytes()
            .unwrap()
    }

    #[test]
    fn full_predictor_is_sent_only_with_a_full_embedding() {
        let portable = portable();
        let full = (PREDICTOR_FILE, &b"whole"[..]);
        let (small, large) = (MAX_SKETCH_BYTES, MAX_SKETCH_BYTES + 1);
        let chosen = |files: &[(&str, &[u8])], embedding| {
            let (_folder, checkpoint) = model_with(files);
            match PredictorFile::beside(&checkpoint, embedding).unwrap() {
                PredictorFile::Nothing => "nothing".to_owned(),
                PredictorFile::Full(_) => "whole".to_owned(),
                PredictorFile::Portable { dimensions, .. } => format!("portable {dimensions}"),
            }
        };
        let both = [full, (PORTABLE_FILE, &portable[..])];
        assert_eq!(chosen(&both, small), "whole");
        assert_eq!(chosen(&both, large), "portable 16");
        assert_eq!(chosen(&both[1..], small), "portable 16");
        assert_eq!(chosen(&[full], large), "nothing", "an old folder: the log says what to do");
        assert_eq!(chosen(&[(PORTABLE_FILE, b"damaged")], small), "nothing");
        assert_eq!(chosen(&[(PORTABLE_FILE, b"")], small), "nothing");
        let oversized = vec![0; MAX_PREDICTOR_BYTES + 1];
        assert_eq!(chosen(&[(PREDICTOR_FILE, &oversized), both[1]], small), "portable 16");
        assert_eq!(chosen(&[(PORTABLE_FILE, &oversized)], small), "nothing");
    }
}
