//! Parts of a portable predictor: popularity, similar prompts and the token table in few coordinates.

use super::quantised_rows::QuantisedRows;
use super::{MAX_BASIS_BYTES, MAX_DIRECTIONS, MAX_PAST_BYTES, MAX_PAST_PROMPTS, MAX_TOKEN_BYTES};
use crate::divergence;
use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::history::History;
use crate::phase::{ByPhase, Phase};
use crate::predictor::{Popularity, Predictor};
use crate::random::Random;
use crate::rows::Rows;
use crate::shares::UsageShares;
use crate::sps::{best_temperature, softmax};
use crate::subspace::principal_directions;
use crate::trained::PredictorParts;
use crate::tree::{Neighbour, best_of};
use crate::tuning::Cases;
use crate::vector::{add_scaled, dot};
use rayon::prelude::*;

/// Sampled past prompts per direction.
const SAMPLE_PER_DIRECTION: usize = 16;
/// Seed of that sample.
const SEED: u64 = 0;
/// Weight of deviations in decode relative to prefill. Answers are shorter than prompts, and their predictions have
/// more noise. Chosen on held-out prompts of the demo model's training history (2026-11-28).
const DECODE_WEIGHT: f32 = 0.5;

/// Popularity, similar prompts and the token table in coordinates along common directions.
#[derive(Debug, Clone)]
pub(crate) struct ReducedParts {
    pub(super) embedding: Embedding,
    pub(super) popularity: Popularity,
    /// Shares added per coordinate, [directions, both phases x layers x experts].
    pub(super) basis: Rows,
    pub(super) past: PastPrompts,
    /// Prediction of the token table for a prompt without features, [layers x experts].
    pub(super) base: ByPhase<Vec<f32>>,
    pub(super) tokens: QuantisedRows,
}

/// Past prompts.
#[derive(Debug, Clone)]
pub(super) struct PastPrompts {
    /// Unit vectors over the sketch, [prompts, dimensions].
    pub(super) vectors: Rows,
    /// Deviations of their shares from popularity in coordinates, [prompts, directions].
    pub(super) coordinates: Rows,
    pub(super) alpha: usize,
    pub(super) temperature: ByPhase<f32>,
}

impl PastPrompts {
    fn neighbours(&self, query: &[f32]) -> Vec<Neighbour> {
        let similarity =
            |slot: u32| Neighbour { slot, similarity: dot(self.vectors.row(slot as usize), query) };
        best_of((0..self.vectors.len() as u32).map(similarity).collect(), self.alpha)
    }

    fn weighted_mean(&self, neighbours: &[Neighbour], temperature: f32) -> Vec<f32> {
        let mut sum = vec![0.0; self.coordinates.width()];
        for (neighbour, weight) in neighbours.iter().zip(softmax(neighbours, temperature)) {
            add_scaled(&mut sum, weight, self.coordinates.row(neighbour.slot as usize));
        }
        sum
    }
}

/// Returns the number of directions that the size limits allow for this vocabulary and number of cells in both
/// phases.
fn max_directions(vocabulary: usize, cells: usize) -> usize {
    let by_tokens = (MAX_TOKEN_BYTES / vocabulary.max(1)).saturating_sub(QuantisedRows::row_bytes(0));
    let by_basis = MAX_BASIS_BYTES / (size_of::<f32>() * cells.max(1));
    MAX_DIRECTIONS.min(by_tokens).min(by_basis).min(cells).max(1)
}

/// Returns the number of past prompts that the size limits allow.
fn max_past_prompts(dimensions: usize, directions: usize) -> usize {
    MAX_PAST_PROMPTS.min(MAX_PAST_BYTES / (size_of::<f32>() * (dimensions + directions).max(1)))
}

impl ReducedParts {
    /// Converts `parts`, which were fitted over `embedding`, to `sketch`.
    pub(crate) fn from_parts(
        parts: &PredictorParts,
        embedding: &Embedding,
        sketch: &Embedding,
    ) -> Result<Self, PredictError> {
        let vocabulary = embedding.vocabulary();
        PredictError::require_size("the sketch of the embedding", vocabulary, sketch.vocabulary())?;
        let history = parts.sps.history();
        // Prompts learned without tokens have no vector over the sketch.
        let slots: Vec<u32> = history.slots().filter(|&slot| !history.prompt(slot).is_empty()).collect();
        let cells = history.layers() * history.experts();
        let directions = max_directions(vocabulary, 2 * cells);
        let ResidualBasis { analysis, synthesis: basis } =
            ResidualBasis::fit(parts, history, &slots, directions)?;
        let base = ByPhase {
            prefill: parts.tokens.prefill.base().to_vec(),
            decode: parts.tokens.decode.base().to_vec(),
        };
        let mut tokens = vec![0.0; vocabulary * basis.len()];
        for (table, phase) in [(&parts.tokens.prefill, Phase::Prefill), (&parts.tokens.decode, Phase::Decode)]
        {
            let phase_rows: Vec<&[f32]> =
                (0..basis.len()).map(|row| phase_half(analysis.row(row), phase)).collect();
            table.add_coordinates(&phase_rows, &mut tokens);
        }
        let sampled_slots = evenly_spaced(&slots, max_past_prompts(sketch.hidden(), basis.len()));
        let reduce = |&slot: &u32| -> Result<(Vec<f32>, Vec<f32>), PredictError> {
            let deviation = deviation(history, &parts.popularity, slot);
            let coordinates = (0..basis.len()).map(|row| dot(analysis.row(row), &deviation)).collect();
            Ok((sketch.prompt_vector(history.prompt(slot))?, coordinates))
        };
        let reduced = sampled_slots.par_iter().map(reduce).collect::<Result<Vec<_>, _>>()?;
        let (vectors, coordinates): (Vec<_>, Vec<_>) = reduced.into_iter().unzip();
        let past = PastPrompts {
            vectors: Rows::from_values(sketch.hidden(), vectors.concat()),
            coordinates: Rows::from_values(basis.len(), coordinates.concat()),
            alpha: parts.sps.alpha(),
            temperature: parts.sps.temperature(),
        };
        Ok(Self {
            embedding: sketch.clone(),
            popularity: parts.popularity.clone(),
            tokens: QuantisedRows::quantise(basis.len(), &tokens),
            basis,
            past,
            base,
        })
    }

    pub(super) fn popularity(&self) -> &Popularity {
        &self.popularity
    }

    pub(crate) fn temperature(&self) -> ByPhase<f32> {
        self.past.temperature
    }

    pub(super) fn set_temperature(&mut self, temperature: ByPhase<f32>) {
        self.past.temperature = temperature;
    }

    /// Fits the temperature of each phase to `held_out`.
    pub(crate) fn fit_temperatures(&mut self, held_out: &ByPhase<Cases<'_>>) -> Result<(), PredictError> {
        for phase in Phase::ALL {
            let cases = held_out.get(phase).iter();
            let cases: Vec<_> = cases
                .map(|(prompt, truth)| {
                    Ok((self.past.neighbours(&self.embedding.prompt_vector(prompt)?), truth))
                })
                .collect::<Result<_, PredictError>>()?;
            if cases.is_empty() {
                continue;
            }
            let fitted = best_temperature(|temperature| {
                let errors = cases.par_iter().map(|(neighbours, truth)| {
                    let predicted = self.predict_similar(neighbours, temperature, phase)?;
                    Ok::<_, PredictError>(divergence::mean(&predicted, truth))
                });
                // Sums in a fixed order, so that the result does not depend on threads.
                Ok(errors.collect::<Result<Vec<f64>, _>>()?.iter().sum())
            })?;
            *self.past.temperature.get_mut(phase) = fitted;
        }
        Ok(())
    }

    /// Returns the predictions of dop, sps and tokens.
    pub(crate) fn all(&self, prompt: &[u32], phase: Phase) -> Result<[UsageShares; 3], PredictError> {
        let neighbours = self.past.neighbours(&self.embedding.prompt_vector(prompt)?);
        Ok([
            self.popularity.predict(prompt, phase)?,
            self.predict_similar(&neighbours, *self.past.temperature.get(phase), phase)?,
            self.shares_from(self.base.get(phase), &self.tokens.mean(prompt), phase)?,
        ])
    }

    fn predict_similar(
        &self,
        neighbours: &[Neighbour],
        temperature: f32,
        phase: Phase,
    ) -> Result<UsageShares, PredictError> {
        let coordinates = self.past.weighted_mean(neighbours, temperature);
        self.shares_from(self.popularity.shares(phase).values(), &coordinates, phase)
    }

    /// Returns the shares at `coordinates` from `base`.
    fn shares_from(
        &self,
        base: &[f32],
        coordinates: &[f32],
        phase: Phase,
    ) -> Result<UsageShares, PredictError> {
        let mut sum = base.to_vec();
        for (row, coordinate) in coordinates.iter().enumerate() {
            add_scaled(&mut sum, *coordinate, phase_half(self.basis.row(row), phase));
        }
        UsageShares::from_weights(self.popularity.shares(phase).experts(), sum)
    }

    pub(super) fn bytes(&self) -> u64 {
        let base = size_of_val(self.base.prefill.as_slice()) + size_of_val(self.base.decode.as_slice());
        self.popularity.bytes()
            + self.basis.bytes()
            + self.past.vectors.bytes()
            + self.past.coordinates.bytes()
            + self.tokens.bytes()
            + base as u64
    }
}

/// Returns the half of a row of both phases that belongs to `phase`.
fn phase_half(row: &[f32], phase: Phase) -> &[f32] {
    let (prefill, decode) = row.split_at(row.len() / 2);
    match phase {
        Phase::Prefill => prefill,
        Phase::Decode => decode,
    }
}

/// Returns the deviation of a past prompt's shares from popularity in both phases, concatenated.
fn deviation(history: &History, popularity: &Popularity, slot: u32) -> Vec<f32> {
    let in_phase = |phase| {
        let pairs = history.share_row(slot, phase).iter().zip(popularity.shares(phase).values());
        pairs.map(|(share, mean)| share - mean).collect::<Vec<f32>>()
    };
    [in_phase(Phase::Prefill), in_phase(Phase::Decode)].concat()
}

/// Principal directions of the token table's deviations from popularity over past prompts. Directions of the actual
/// usage are no better: the noise of short prompts and answers takes directions from the topics.
struct ResidualBasis {
    /// Rows whose dot products with a deviation from popularity are its coordinates.
    analysis: Rows,
    /// Rows whose sum, weighted by the coordinates, is the deviation.
    synthesis: Rows,
}

impl ResidualBasis {
    fn fit(
        parts: &PredictorParts,
        history: &History,
        slots: &[u32],
        count: usize,
    ) -> Result<Self, PredictError> {
        let cells = history.layers() * history.experts();
        let weighted_deviation = |&slot: &u32| -> Result<Vec<f32>, PredictError> {
            let in_phase = |(phase, weight): (Phase, f32)| -> Result<Vec<f32>, PredictError> {
                let shares = parts.tokens.get(phase).predict(history.prompt(slot))?;
                let pairs = shares.values().iter().zip(parts.popularity.shares(phase).values());
                Ok(pairs.map(|(share, mean)| weight * (share - mean)).collect())
            };
            Ok([in_phase((Phase::Prefill, 1.0))?, in_phase((Phase::Decode, DECODE_WEIGHT))?].concat())
        };
        let sample = Random::new(SEED).sample(slots.len(), count * SAMPLE_PER_DIRECTION);
        let sample: Vec<u32> =
            sample.into_iter().filter_map(|index| slots.get(index as usize).copied()).collect();
        let rows = sample.par_iter().map(weighted_deviation).collect::<Result<Vec<_>, _>>()?;
        let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        let directions = principal_directions(&rows, 2 * cells, count);
        // A history of one prompt or of equal prompts has no direction: a zero row stands for it.
        let directions = match directions.len() {
            0 => Rows::from_values(2 * cells, vec![0.0; 2 * cells]),
            _ => directions,
        };
        let scaled_decode = |factor: f32| {
            let mut values = directions.values().to_vec();
            for row in values.chunks_exact_mut(2 * cells) {
                row.iter_mut().skip(cells).for_each(|value| *value *= factor);
            }
            Rows::from_values(2 * cells, values)
        };
        Ok(Self { analysis: scaled_decode(DECODE_WEIGHT), synthesis: scaled_decode(1.0 / DECODE_WEIGHT) })
    }
}

/// Returns at most `limit` of `slots`, evenly spaced.
fn evenly_spaced(slots: &[u32], limit: usize) -> Vec<u32> {
    slots.iter().copied().step_by(slots.len().div_ceil(limit.max(1)).max(1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::portable::{MAX_PORTABLE_BYTES, MAX_SKETCH_BYTES, sketch_dimensions};
    use proptest::prelude::*;

    /// Reserve for the JSON text, popularity and the bases, whose size
    /// [`PortablePredictor::to_bytes`](super::super::Portable) checks.
    const REST: usize = 1 << 20;
    const _: () = assert!(MAX_TOKEN_BYTES + MAX_BASIS_BYTES + MAX_PAST_BYTES + REST <= MAX_PORTABLE_BYTES);

    proptest! {
        /// Covers vocabularies and models larger than any known.
        #[test]
        fn parts_of_any_model_are_within_their_budgets(
            vocabulary in 1_usize..1_000_000,
            cells in 1_usize..500_000,
            wanted in 16_usize..1024,
        ) {
            let directions = max_directions(vocabulary, cells);
            let dimensions = sketch_dimensions(vocabulary, wanted).unwrap();
            prop_assert!(directions >= 1);
            prop_assert!(vocabulary * QuantisedRows::row_bytes(directions) <= MAX_TOKEN_BYTES);
            prop_assert!(4 * directions * cells <= MAX_BASIS_BYTES);
            let past = max_past_prompts(dimensions, directions);
            prop_assert!(4 * past * (dimensions + directions) <= MAX_PAST_BYTES && past > 0);
            prop_assert!(2 * vocabulary * dimensions <= MAX_SKETCH_BYTES);
        }

        #[test]
        fn sampled_prompts_fit_the_limit(slots in 0_u32..3000, most in 1_usize..500) {
            let slots: Vec<u32> = (0..slots).collect();
            let sampled_slots = evenly_spaced(&slots, most);
            prop_assert!(sampled_slots.len() <= most && sampled_slots.len() * 2 >= most.min(slots.len()));
        }
    }
}
