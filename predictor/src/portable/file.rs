//! A portable predictor as one file: safetensors, with a JSON text (metadata key `remoe`) for everything small.

use super::codes::Codes;
use super::reduced::{PastPrompts, Reduced};
use super::{MAX_PORTABLE_BYTES, Portable};
use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::error_bars::{ErrorBars, ErrorClass};
use crate::phase::{ByPhase, Phase};
use crate::predictor::Popularity;
use crate::record::RecordHeader;
use crate::saved::{File, KEY, metadata, saved};
use crate::shares::Shares;
use crate::tuning::Tuning;
use bytes::Bytes;
use safetensors::tensor::{Dtype, TensorView};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use zerocopy::IntoBytes;

/// Name of the file, beside the whole predictor's.
pub const PORTABLE_FILE: &str = "portable.safetensors";
/// Version of the file.
const VERSION: u32 = 1;
/// Names of the tensors that both phases have: the token table's base, popularity.
const OF_PHASE: [[&str; 2]; 2] =
    [["prefill.base", "prefill.popularity"], ["decode.base", "decode.popularity"]];

/// The JSON text.
#[derive(Serialize, Deserialize)]
struct Manifest {
    /// Version of this form; a whole predictor has another field of that name.
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

/// The fields that say which sketch it is over.
#[derive(Deserialize)]
struct Preamble {
    portable: u32,
    dimensions: usize,
}

impl Preamble {
    fn of(text: &str) -> Result<Self, PredictError> {
        let preamble: Self = serde_json::from_str(text).map_err(saved)?;
        match preamble.portable {
            VERSION => Ok(preamble),
            version => {
                Err(saved(format!("version mismatch: expected {VERSION}, got {version}; build it again")))
            }
        }
    }
}

/// Without what only planners read, which grows with the square of the experts.
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

impl Portable {
    /// Dimensions of the sketch that the predictor in `bytes` needs.
    ///
    /// # Errors
    /// The file is damaged or of another version.
    pub fn dimensions(bytes: &[u8]) -> Result<usize, PredictError> {
        Ok(Preamble::of(&metadata(bytes)?)?.dimensions)
    }

    /// The bytes of a file, at most [`MAX_PORTABLE_BYTES`].
    ///
    /// # Errors
    /// The model has so many experts that they would be more.
    pub fn to_bytes(&self) -> Result<Vec<u8>, PredictError> {
        let Reduced { embedding, popularity, basis, past, base, tokens } = &self.parts;
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
        for (phase, [name, popular]) in Phase::ALL.into_iter().zip(OF_PHASE) {
            let (base, popularity) = (base.of(phase).as_slice(), popularity.shares(phase).values());
            tensors.push((name, floats(base, base.len()), base.as_bytes()));
            tensors.push((popular, floats(popularity, popularity.len()), popularity.as_bytes()));
        }
        let views = tensors
            .into_iter()
            .map(|(name, (kind, shape), bytes)| {
                Ok((name, TensorView::new(kind, shape, bytes).map_err(saved)?))
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

    /// Reads what [`Self::to_bytes`] wrote for the model with fingerprint `model`, over the same `sketch` of its embedding.
    /// Large parts stay in `bytes`.
    ///
    /// # Errors
    /// The file is damaged, of another version, or of another model or sketch.
    pub fn from_bytes(bytes: &Bytes, model: &str, sketch: &Embedding) -> Result<Self, PredictError> {
        let text = metadata(bytes)?;
        Preamble::of(&text)?;
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
        Phase::ALL.into_iter().try_for_each(|phase| tuning.of(phase).check(header.layers.len()))?;
        let file = File::of(bytes)?;
        let (cells, experts) = (header.cells(), header.experts as usize);
        let basis = file.rows("basis", 2 * cells)?;
        let vectors = file.rows("past.vectors", dimensions)?;
        let coordinates = file.rows("past.coordinates", basis.len())?;
        PredictError::require_size("`past.coordinates`", vectors.len(), coordinates.len())?;
        let steps = file.rows("tokens.steps", 1)?.values().to_vec();
        let tokens = Codes::from_parts(basis.len(), file.tensor("tokens.coordinates", Dtype::I8)?, steps)?;
        PredictError::require_size("`tokens.steps`", sketch.vocabulary(), tokens.len())?;
        let of_phase = |[base, popular]: [&'static str; 2]| {
            let values = |name| {
                let values = file.rows(name, cells)?.values().to_vec();
                PredictError::require_size(name, cells, values.len())?;
                Ok::<_, PredictError>(values)
            };
            Ok::<_, PredictError>((values(base)?, Shares::from_weights(experts, values(popular)?)?))
        };
        let [prefill, decode] = OF_PHASE;
        let ((prefill, popular), (decode, popular_decode)) = (of_phase(prefill)?, of_phase(decode)?);
        let temperature = ByPhase { prefill: tuning.prefill.temperature, decode: tuning.decode.temperature };
        let parts = Reduced {
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
