//! File format of a trained predictor.
//!
//! The file is a safetensors file: aligned tensors, which are used in place, and a JSON text (metadata key `remoe`)
//! for all small values. Python reads it with `safetensors.numpy.load_file`.

use crate::embedding::Embedding;
use crate::error::{PredictError, quoted};
use crate::history::History;
use crate::phase::{ByPhase, Phase};
use crate::predictor::Popularity;
use crate::record::RecordHeader;
use crate::rows::Rows;
use crate::shares::UsageShares;
use crate::sps::{PromptIndex, SimilarPrompts};
use crate::tokens::TokenTable;
use crate::trained::{PredictorParts, TrainedPredictor};
use crate::tree::{Clustering, Sketches, Tree, TreeOptions, TreeParts};
use crate::tuning::Tuning;
use bytes::Bytes;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Name of the file in its folder.
pub const PREDICTOR_FILE: &str = "predictor.safetensors";
/// Metadata key of the JSON text.
pub(crate) const KEY: &str = "remoe";
/// Format version of the file.
const VERSION: u32 = 3;

/// Names of the tensors of each phase: token ids, base and rows of the token table, popularity.
const PHASE_TENSORS: [[&str; 4]; 2] = [
    ["prefill.tokens.ids", "prefill.tokens.base", "prefill.tokens.rows", "prefill.popularity"],
    ["decode.tokens.ids", "decode.tokens.base", "decode.tokens.rows", "decode.popularity"],
];

/// JSON text of the file.
#[derive(Serialize, Deserialize)]
struct Manifest {
    version: u32,
    model: String,
    layers: Vec<u32>,
    experts: u32,
    top_k: u32,
    dtype: String,
    alpha: usize,
    beta: usize,
    breadth: usize,
    rerank: usize,
    forks: usize,
    seed: u64,
    tuning: ByPhase<Tuning>,
}

/// Fields that are checked before the others are parsed.
#[derive(Deserialize)]
struct Preamble {
    version: u32,
}

impl Manifest {
    /// Parses the manifest of a file of this version.
    fn parse(bytes: &[u8]) -> Result<Self, PredictError> {
        let text = metadata(bytes)?;
        let Preamble { version } = serde_json::from_str(&text).map_err(saved)?;
        if version != VERSION {
            return Err(saved(format!(
                "version mismatch: expected {VERSION}, got {version}; build it again"
            )));
        }
        serde_json::from_str(&text).map_err(saved)
    }

    /// Returns the header of records of this model.
    fn header(&self) -> RecordHeader {
        RecordHeader {
            model: self.model.clone(),
            layers: self.layers.clone(),
            experts: self.experts,
            top_k: self.top_k,
            dtype: self.dtype.clone(),
            tokens: false,
        }
    }
}

pub(crate) fn saved(message: impl std::fmt::Display) -> PredictError {
    PredictError::Saved(quoted(message.to_string()))
}

/// Returns the JSON text of a file.
pub(crate) fn metadata(bytes: &[u8]) -> Result<String, PredictError> {
    let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(saved)?;
    let text = metadata.metadata().as_ref().and_then(|metadata| metadata.get(KEY));
    text.cloned().ok_or_else(|| saved("the file was not written by `remoe predictor build`"))
}

impl TrainedPredictor {
    /// Encodes the file.
    ///
    /// # Errors
    /// Never fails for a fitted or loaded predictor.
    pub fn to_bytes(&self) -> Result<Vec<u8>, PredictError> {
        let PredictorParts { popularity, sps, tokens } = &self.parts;
        let PromptIndex::Tree(tree) = sps.index() else { return Err(saved("missing search tree")) };
        let history = sps.history();
        let order = tree.leaf_order();
        let (parts, medoids) = tree.to_parts(&order);
        let history = history.gather(&order);
        let prompts = || (0..order.len() as u32).map(|slot| history.prompt(slot));
        let ids: Vec<u32> = prompts().flatten().copied().collect();
        let mut offsets = vec![0_u32];
        for prompt in prompts() {
            let end = offsets.last().copied().unwrap_or(0) as usize + prompt.len();
            offsets.push(u32::try_from(end).map_err(|_| saved("more than 2^32 tokens"))?);
        }
        let cells = history.layers() * history.experts();
        let hidden = history.vectors.width();
        let floats = |values: &[f32], width: usize| (Dtype::F32, vec![values.len() / width.max(1), width]);
        let numbers = |values: &[u32]| (Dtype::U32, vec![values.len()]);
        let mut tensors = vec![
            ("history.vectors", floats(history.vectors.values(), hidden), history.vectors.as_bytes()),
            ("history.shares", floats(history.shares.values(), cells), history.shares.as_bytes()),
            ("history.offsets", numbers(&offsets), offsets.as_bytes()),
            ("history.prompts", numbers(&ids), ids.as_bytes()),
            ("tree.parents", numbers(&parts.parents), parts.parents.as_bytes()),
            ("tree.leaves", numbers(&parts.leaves), parts.leaves.as_bytes()),
            ("tree.centre", floats(tree.centre(), hidden), tree.centre().as_bytes()),
            ("tree.medoids", floats(&medoids, hidden), medoids.as_bytes()),
        ];
        for (phase, [ids, base, rows, popular]) in Phase::ALL.into_iter().zip(PHASE_TENSORS) {
            let (tokens, popularity) = (tokens.get(phase), popularity.shares(phase).values());
            tensors.push((ids, numbers(tokens.tokens()), tokens.tokens().as_bytes()));
            tensors.push((base, floats(tokens.base(), cells), tokens.base().as_bytes()));
            tensors.push((rows, floats(tokens.rows().values(), cells), tokens.rows().as_bytes()));
            tensors.push((popular, floats(popularity, cells), popularity.as_bytes()));
        }
        if let Some(decode) = &history.decode {
            tensors.push(("history.decode", floats(decode.values(), cells), decode.as_bytes()));
        }
        let sketches = tree.sketches().map(|sketches| sketches.gather(&order));
        if let Some(sketches) = &sketches {
            for (name, rows) in [("tree.basis", sketches.basis()), ("tree.sketches", sketches.rows())] {
                tensors.push((name, floats(rows.values(), rows.width()), rows.as_bytes()));
            }
        }
        let views = tensors
            .into_iter()
            .map(|(name, (dtype, shape), bytes)| {
                Ok((name, TensorView::new(dtype, shape, bytes).map_err(saved)?))
            })
            .collect::<Result<Vec<_>, PredictError>>()?;
        let RecordHeader { model, layers, experts, top_k, dtype, .. } = self.header.clone();
        let TreeOptions { beta, breadth, rerank, forks, seed } = tree.options();
        let (alpha, tuning) = (sps.alpha(), self.tuning.clone());
        let manifest = Manifest {
            version: VERSION,
            model,
            layers,
            experts,
            top_k,
            dtype,
            alpha,
            beta,
            breadth,
            rerank,
            forks,
            seed,
            tuning,
        };
        let text = serde_json::to_string(&manifest).map_err(saved)?;
        safetensors::serialize(views, Some(HashMap::from([(KEY.to_owned(), text)]))).map_err(saved)
    }

    /// Parses a file from [`TrainedPredictor::to_bytes`] for the model with the fingerprint `model`. Rows stay in `bytes`
    /// (read or mapped by the caller) until they change, or are copied if they are not aligned for float32.
    ///
    /// # Errors
    /// The file is damaged, of another version, or of another model.
    pub fn from_bytes(bytes: &Bytes, model: &str, embedding: &Embedding) -> Result<Self, PredictError> {
        let manifest = Manifest::parse(bytes)?;
        let header = manifest.header();
        header.check().map_err(saved)?;
        if header.model != model {
            let message = format!(
                "built for another model: expected {model}, got {}; build one for this model",
                header.model
            );
            return Err(saved(message));
        }
        for phase in Phase::ALL {
            manifest.tuning.get(phase).check(header.layers.len())?;
        }
        let file = SavedTensors::parse(bytes)?;
        let (layers, experts, cells) = (header.layers.len(), header.experts as usize, header.cells());
        let history = file.history(embedding, layers, experts)?;
        let Manifest { beta, breadth, rerank, forks, seed, .. } = manifest;
        let options = TreeOptions { beta, breadth, rerank, forks, seed };
        let parts =
            TreeParts { parents: file.numbers("tree.parents")?, leaves: file.numbers("tree.leaves")? };
        PredictError::require_size("`tree.leaves`", history.len(), parts.leaves.len())?;
        let medoids = file.rows("tree.medoids", embedding.hidden())?;
        let centre = file.rows("tree.centre", embedding.hidden())?.values().to_vec();
        let sketches =
            options.uses_sketches().then(|| file.sketches(embedding, history.len())).transpose()?;
        let tree = Tree::from_parts(&parts, medoids, centre, sketches, Clustering::Centred, options)?;
        let index = PromptIndex::Tree(Box::new(tree));
        let sps = SimilarPrompts::new("sps", embedding.clone(), Arc::new(history), index, manifest.alpha)?;
        let tuning = manifest.tuning;
        let temperature = ByPhase { prefill: tuning.prefill.temperature, decode: tuning.decode.temperature };
        let sps = sps.with_temperature("sps", temperature);
        let load_phase = |[ids, base, rows, popular]: [&'static str; 4]| {
            let base = file.rows(base, cells)?.values().to_vec();
            let (ids, rows) = (file.numbers(ids)?, file.rows(rows, cells)?);
            let tokens = TokenTable::from_parts(embedding.clone(), ids, experts, base, rows)?;
            let popular = file.rows(popular, cells)?.values().to_vec();
            PredictError::require_size("`popularity`", cells, popular.len())?;
            let popular = UsageShares::from_weights(experts, popular)?;
            Ok::<_, PredictError>((tokens, popular))
        };
        let [prefill, decode] = PHASE_TENSORS;
        let ((prefill, popular), (decode, popular_decode)) = (load_phase(prefill)?, load_phase(decode)?);
        let popularity = Popularity::from_shares(ByPhase { prefill: popular, decode: popular_decode });
        let tokens = ByPhase { prefill, decode };
        Ok(Self { header, parts: PredictorParts { popularity, sps, tokens }, tuning })
    }
}

/// Tensors of a file in memory.
pub(crate) struct SavedTensors<'a> {
    bytes: &'a Bytes,
    tensors: SafeTensors<'a>,
}

impl<'a> SavedTensors<'a> {
    pub(crate) fn parse(bytes: &'a Bytes) -> Result<Self, PredictError> {
        Ok(Self { bytes, tensors: SafeTensors::deserialize(bytes).map_err(saved)? })
    }

    pub(crate) fn tensor(&self, name: &'static str, dtype: Dtype) -> Result<Bytes, PredictError> {
        let view = self.tensors.tensor(name).map_err(saved)?;
        if view.dtype() != dtype {
            return Err(saved(format!("tensor `{name}` is {:?}, expected {dtype:?}", view.dtype())));
        }
        Ok(self.bytes.slice_ref(view.data()))
    }

    pub(crate) fn rows(&self, name: &'static str, width: usize) -> Result<Rows, PredictError> {
        Rows::from_bytes(name, width, self.tensor(name, Dtype::F32)?)
    }

    fn numbers(&self, name: &'static str) -> Result<Vec<u32>, PredictError> {
        let bytes = self.tensor(name, Dtype::U32)?;
        Ok(bytes.as_chunks().0.iter().map(|number| u32::from_le_bytes(*number)).collect())
    }

    fn sketches(&self, embedding: &Embedding, slots: usize) -> Result<Sketches, PredictError> {
        let basis = self.rows("tree.basis", embedding.hidden())?;
        let rows = self.rows("tree.sketches", basis.len())?;
        Sketches::from_parts(basis, rows, slots)
    }

    fn history(&self, embedding: &Embedding, layers: usize, experts: usize) -> Result<History, PredictError> {
        let ids = self.numbers("history.prompts")?;
        let offsets = self.numbers("history.offsets")?;
        let prompt = |pair: &[u32]| match ids.get(pair[0] as usize..pair[1] as usize) {
            Some(prompt) if !prompt.is_empty() => Ok(Box::from(prompt)),
            _ => Err(saved(format!("missing prompt at tokens {} to {}", pair[0], pair[1]))),
        };
        let prompts = offsets.windows(2).map(prompt).collect::<Result<Vec<Box<[u32]>>, _>>()?;
        let vectors = self.rows("history.vectors", embedding.hidden())?;
        let shares = self.rows("history.shares", layers * experts)?;
        let decode = self.tensors.names().contains(&"history.decode");
        let decode = decode.then(|| self.rows("history.decode", layers * experts)).transpose()?;
        History::from_parts(layers, experts, vectors, shares, decode, prompts)
    }
}
