//! File format of a portable predictor: safetensors, with a JSON text (metadata key `remoe`) for all small values.

use super::quantised_rows::QuantisedRows;
use super::reduced_parts::{PastPrompts, ReducedParts};
use super::{MAX_PORTABLE_BYTES, PortablePredictor};
use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::error_bars::{ErrorBars, ErrorClass};
use crate::phase::{ByPhase, Phase};
use crate::predictor::Popularity;
use crate::predictor_file::{KEY, SavedTensors, metadata, saved};
use crate::record::RecordHeader;
use crate::shares::UsageShares;
use crate::tuning::Tuning;
use bytes::Bytes;
use safetensors::tensor::{Dtype, TensorView};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use zerocopy::IntoBytes;

/// Name of the file, beside that of the full predictor.
pub const PORTABLE_FILE: &str = "portable.safetensors";
/// Format version of the file.
const VERSION: u32 = 1;
/// Names of the tensors of each phase: base of the token table, popularity.
const PHASE_TENSORS: [[&str; 2]; 2] =
    [["prefill.base", "prefill.popularity"], ["decode.base", "decode.popularity"]];

/// JSON text of the file.
#[derive(Serialize, Deserialize)]
struct Manifest {
    /// Format version. The field's name distinguishes the file from a full predictor.
    portable: u32,
    model: String,
    layers: Vec<u32>,
    experts: u32,
    top_k: u32,
    dtype: String,
    dimensions: usize,
    alpha: usize,
    tuning: ByPhase<Tuning>,
}

/// Fields that identify the format and the sketch.
#[derive(Deserialize)]
struct Preamble {
    portable: u32,
    dimensions: usize,
}

impl Preamble {
    fn parse(text: &str) -> Result<Self, PredictError> {
        let preamble: Self = serde_json::from_str(text).map_err(saved)?;
        match preamble.portable {
            VERSION => Ok(preamble),
            version => {
                Err(saved(format!("version mismatch: expected {VERSION}, got {version}; build it again")))
            }
        }
    }
}

/// Returns the tuning without the values that only planners need: they grow with the square of the experts.
fn without_p95(tuning: &Tuning) -> Tuning {
    let bars = |bars: &ErrorBars| ErrorBars { least_used_p95: Vec::new(), ..bars.clone() };
    Tuning {
        errors: tuning.errors.iter().map(|(method, errors)| (*method, bars(errors))).collect(),
        classes: tuning
            .classes
            .iter()
            .map(|class| ErrorClass { errors: bars(&class.errors), ..class.clone() })
            .collect(),
        ..tuning.clone()
    }
}

impl PortablePredictor {
    /// Returns the dimensions of the sketch that the predictor in `bytes` needs.
    ///
    /// # Errors
    /// The file is damaged or of another version.
    pub fn dimensions(bytes: &[u8]) -> Result<usize, PredictError> {
        Ok(Preamble::parse(&metadata(bytes)?)?.dimensions)
    }

    /// Encodes the file, at most [`MAX_PORTABLE_BYTES`].
    ///
    /// # Errors
    /// The file would be too large, because the model has too many experts.
    pub fn to_bytes(&self) -> Result<Vec<u8>, PredictError> {
        let ReducedParts { embedding, popularity, basis, past, base, tokens } = &self.parts;
        let floats = |values: &[f32], width: usize| (Dtype::F32, vec![values.len() / width.max(1), width]);
        let rows = |rows: &crate::rows::Rows| floats(rows.values(), rows.width());
        let codes = (Dtype::I8, vec![tokens.len(), basis.len()]);
        let steps = (Dtype::F32, vec![tokens.len()]);
        let mut tensors = vec![
            ("basis", rows(basis), basis.as_bytes()),
            ("past.vectors", rows(&past.vectors), past.vectors.as_bytes()),
            ("past.coordinates", rows(&past.coordinates), past.coordinates.as_bytes()),
            ("tokens.coordinates", codes, tokens.codes()),
            ("tokens.steps", steps, tokens.steps().as_bytes()),
        ];
        for (phase, [name, popular]) in Phase::ALL.into_iter().zip(PHASE_TENSORS) {
            let (base, popularity) = (base.get(phase).as_slice(), popularity.shares(phase).values());
            tensors.push((name, floats(base, base.len()), base.as_bytes()));
            tensors.push((popular, floats(popularity, popularity.len()), popularity.as_bytes()));
        }
        let views = tensors
            .into_iter()
            .map(|(name, (dtype, shape), bytes)| {
                Ok((name, TensorView::new(dtype, shape, bytes).map_err(saved)?))
            })
            .collect::<Result<Vec<_>, PredictError>>()?;
        let RecordHeader { model, layers, experts, top_k, dtype, .. } = self.header.clone();
        let tuning =
            ByPhase { prefill: without_p95(&self.tuning.prefill), decode: without_p95(&self.tuning.decode) };
        let (portable, dimensions, alpha) = (VERSION, embedding.hidden(), past.alpha);
        let manifest = Manifest { portable, model, layers, experts, top_k, dtype, dimensions, alpha, tuning };
        let text = serde_json::to_string(&manifest).map_err(saved)?;
        let bytes = safetensors::serialize(views, Some(HashMap::from([(KEY.to_owned(), text)])));
        let bytes = bytes.map_err(saved)?;
        match bytes.len() {
            length if length > MAX_PORTABLE_BYTES => {
                Err(saved(format!("too large: expected at most {MAX_PORTABLE_BYTES} bytes, got {length}")))
            }
            _ => Ok(bytes),
        }
    }

    /// Parses a file from [`Self::to_bytes`] for the model with the fingerprint `model` and the same `sketch` of its
    /// embedding. Large tensors stay in `bytes`.
    ///
    /// # Errors
    /// The file is damaged, of another version, or of another model or sketch.
    pub fn from_bytes(bytes: &Bytes, model: &str, sketch: &Embedding) -> Result<Self, PredictError> {
        let text = metadata(bytes)?;
        Preamble::parse(&text)?;
        let manifest: Manifest = serde_json::from_str(&text).map_err(saved)?;
        let Manifest { layers, experts, top_k, dtype, dimensions, alpha, tuning, .. } = manifest;
        let header = RecordHeader { model: manifest.model, layers, experts, top_k, dtype, tokens: false };
        header.check().map_err(saved)?;
        if header.model != model {
            let found = &header.model;
            let message =
                format!("built for another model: expected {model}, got {found}; build one for this model");
            return Err(saved(message));
        }
        PredictError::require_size("a row of the sketch", dimensions, sketch.hidden())?;
        if alpha == 0 {
            return Err(PredictError::option("alpha", alpha, "expected 1 or more"));
        }
        Phase::ALL.into_iter().try_for_each(|phase| tuning.get(phase).check(header.layers.len()))?;
        let file = SavedTensors::parse(bytes)?;
        let (cells, experts) = (header.cells(), header.experts as usize);
        let basis = file.rows("basis", 2 * cells)?;
        let vectors = file.rows("past.vectors", dimensions)?;
        let coordinates = file.rows("past.coordinates", basis.len())?;
        PredictError::require_size("`past.coordinates`", vectors.len(), coordinates.len())?;
        let steps = file.rows("tokens.steps", 1)?.values().to_vec();
        let tokens =
            QuantisedRows::from_parts(basis.len(), file.tensor("tokens.coordinates", Dtype::I8)?, steps)?;
        PredictError::require_size("`tokens.steps`", sketch.vocabulary(), tokens.len())?;
        let load_phase = |[base, popular]: [&'static str; 2]| {
            let values = |name| {
                let values = file.rows(name, cells)?.values().to_vec();
                PredictError::require_size(name, cells, values.len())?;
                Ok::<_, PredictError>(values)
            };
            Ok::<_, PredictError>((values(base)?, UsageShares::from_weights(experts, values(popular)?)?))
        };
        let [prefill, decode] = PHASE_TENSORS;
        let ((prefill, popular), (decode, popular_decode)) = (load_phase(prefill)?, load_phase(decode)?);
        let temperature = ByPhase { prefill: tuning.prefill.temperature, decode: tuning.decode.temperature };
        let parts = ReducedParts {
            embedding: sketch.clone(),
            popularity: Popularity::from_shares(ByPhase { prefill: popular, decode: popular_decode }),
            basis,
            past: PastPrompts { vectors, coordinates, alpha, temperature },
            base: ByPhase { prefill, decode },
            tokens,
        };
        Ok(Self { header, parts, tuning })
    }
}
