//! The parts of a trained predictor in few coordinates.

use super::codes::Codes;
use super::{MAX_BASIS_BYTES, MAX_DIRECTIONS, MAX_PAST, MAX_PAST_BYTES, MAX_TOKEN_BYTES};
use crate::divergence;
use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::history::History;
use crate::phase::{ByPhase, Phase};
use crate::predictor::{Popularity, Predictor};
use crate::random::Random;
use crate::rows::Rows;
use crate::shares::Shares;
use crate::sps::{best_temperature, softmax};
use crate::subspace::principal_directions;
use crate::trained::PredictorParts;
use crate::tree::{Neighbour, best_of};
use crate::tuning::Cases;
use crate::vector::{add_scaled, dot};
use rayon::prelude::*;

/// Past prompts that the directions are found on, for each direction.
const SAMPLE_PER_DIRECTION: usize = 16;
/// Seed of that sample.
const SEED: u64 = 0;
/// Weight of deviations of decode steps beside those of the prefill: answers are shorter than prompts, and what is predicted
/// of them has more noise. Chosen on held-out prompts of the demo model's training history (2026-11-28).
const DECODE_WEIGHT: f32 = 0.5;

/// Popularity, similar prompts and the token table in coordinates.
#[derive(Debug, Clone)]
pub(crate) struct Reduced {
    pub(super) embedding: Embedding,
    pub(super) popularity: Popularity,
    /// Shares that a coordinate adds, [directions, both phases x layers x experts].
    pub(super) basis: Rows,
    pub(super) past: PastPrompts,
    /// The token table's prediction for a prompt of nothing known, [layers x experts].
    pub(super) base: ByPhase<Vec<f32>>,
    pub(super) tokens: Codes,
}

/// Past prompts.
#[derive(Debug, Clone)]
pub(super) struct PastPrompts {
    /// Unit vectors over the sketch, [prompts, dimensions].
    pub(super) vectors: Rows,
    /// How far their shares are from popularity, [prompts, directions].
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

    fn mixed(&self, neighbours: &[Neighbour], temperature: f32) -> Vec<f32> {
        let mut sum = vec![0.0; self.coordinates.width()];
        for (neighbour, weight) in neighbours.iter().zip(softmax(neighbours, temperature)) {
            add_scaled(&mut sum, weight, self.coordinates.row(neighbour.slot as usize));
        }
        sum
    }
}

/// Directions that a vocabulary and a number of cells in both phases have room for.
fn most_directions(vocabulary: usize, cells: usize) -> usize {
    let of_tokens = (MAX_TOKEN_BYTES / vocabulary.max(1)).saturating_sub(Codes::row_bytes(0));
    let of_basis = MAX_BASIS_BYTES / (size_of::<f32>() * cells.max(1));
    MAX_DIRECTIONS.min(of_tokens).min(of_basis).min(cells).max(1)
}

/// Past prompts of so many dimensions and directions that there is room for.
fn most_past(dimensions: usize, directions: usize) -> usize {
    MAX_PAST.min(MAX_PAST_BYTES / (size_of::<f32>() * (dimensions + directions).max(1)))
}

impl Reduced {
    /// Expresses `parts`, which were fitted over `embedding`.
    pub(crate) fn of(
        parts: &PredictorParts,
        embedding: &Embedding,
        sketch: &Embedding,
    ) -> Result<Self, PredictError> {
        let vocabulary = embedding.vocabulary();
        PredictError::require_size("the sketch of the embedding", vocabulary, sketch.vocabulary())?;
        let history = parts.sps.history();
        // Prompts that were learned without their tokens cannot be found in the sketch.
        let slots: Vec<u32> = history.slots().filter(|&slot| !history.prompt(slot).is_empty()).collect();
        let cells = history.layers() * history.experts();
        let directions = most_directions(vocabulary, 2 * cells);
        let ResidualBasis { analysis, synthesis: basis } =
            ResidualBasis::of(parts, history, &slots, directions)?;
        let base = ByPhase {
            prefill: parts.tokens.prefill.base().to_vec(),
            decode: parts.tokens.decode.base().to_vec(),
        };
        let mut tokens = vec![0.0; vocabulary * basis.len()];
        for (table, phase) in [(&parts.tokens.prefill, Phase::Prefill), (&parts.tokens.decode, Phase::Decode)]
        {
            let halves: Vec<&[f32]> = (0..basis.len()).map(|row| half(analysis.row(row), phase)).collect();
            table.add_coordinates(&halves, &mut tokens);
        }
        let kept = sampled(&slots, most_past(sketch.hidden(), basis.len()));
        let place = |&slot: &u32| -> Result<(Vec<f32>, Vec<f32>), PredictError> {
            let apart = both(history, &parts.popularity, slot);
            let coordinates = (0..basis.len()).map(|row| dot(analysis.row(row), &apart)).collect();
            Ok((sketch.prompt_vector(history.prompt(slot))?, coordinates))
        };
        let places = kept.par_iter().map(place).collect::<Result<Vec<_>, _>>()?;
        let (vectors, coordinates): (Vec<_>, Vec<_>) = places.into_iter().unzip();
        let past = PastPrompts {
            vectors: Rows::from_values(sketch.hidden(), vectors.concat()),
            coordinates: Rows::from_values(basis.len(), coordinates.concat()),
            alpha: parts.sps.alpha(),
            temperature: parts.sps.temperature(),
        };
        Ok(Self {
            embedding: sketch.clone(),
            popularity: parts.popularity.clone(),
            tokens: Codes::of(basis.len(), &tokens),
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

    /// Chooses the temperature of each phase that predicts `held_out` best.
    pub(crate) fn fit_temperatures(&mut self, held_out: &ByPhase<Cases<'_>>) -> Result<(), PredictError> {
        for phase in Phase::ALL {
            let cases = held_out.of(phase).iter();
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
                    let predicted = self.similar(neighbours, temperature, phase)?;
                    Ok::<_, PredictError>(divergence::mean(&predicted, truth))
                });
                // Added up in their order: on any number of threads the same.
                Ok(errors.collect::<Result<Vec<f64>, _>>()?.iter().sum())
            })?;
            *self.past.temperature.of_mut(phase) = fitted;
        }
        Ok(())
    }

    /// Predictions of dop, sps and tokens.
    pub(crate) fn all(&self, prompt: &[u32], phase: Phase) -> Result<[Shares; 3], PredictError> {
        let neighbours = self.past.neighbours(&self.embedding.prompt_vector(prompt)?);
        Ok([
            self.popularity.predict(prompt, phase)?,
            self.similar(&neighbours, *self.past.temperature.of(phase), phase)?,
            self.expanded(self.base.of(phase), &self.tokens.mean(prompt), phase)?,
        ])
    }

    fn similar(
        &self,
        neighbours: &[Neighbour],
        temperature: f32,
        phase: Phase,
    ) -> Result<Shares, PredictError> {
        let coordinates = self.past.mixed(neighbours, temperature);
        self.expanded(self.popularity.shares(phase).values(), &coordinates, phase)
    }

    /// The shares that are so far from `base`.
    fn expanded(&self, base: &[f32], coordinates: &[f32], phase: Phase) -> Result<Shares, PredictError> {
        let mut sum = base.to_vec();
        for (row, coordinate) in coordinates.iter().enumerate() {
            add_scaled(&mut sum, *coordinate, half(self.basis.row(row), phase));
        }
        Shares::from_weights(self.popularity.shares(phase).experts(), sum)
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

/// The part of a row of both phases that is one's.
fn half(row: &[f32], phase: Phase) -> &[f32] {
    let (prefill, decode) = row.split_at(row.len() / 2);
    match phase {
        Phase::Prefill => prefill,
        Phase::Decode => decode,
    }
}

/// How far a past prompt's shares are from popularity in both phases.
fn both(history: &History, popularity: &Popularity, slot: u32) -> Vec<f32> {
    let apart = |phase| {
        let pairs = history.share_row(slot, phase).iter().zip(popularity.shares(phase).values());
        pairs.map(|(share, mean)| share - mean).collect::<Vec<f32>>()
    };
    [apart(Phase::Prefill), apart(Phase::Decode)].concat()
}

/// Directions in which what the token table predicts of past prompts is from popularity most. What the prompts truly used
/// is no better: the noise of short prompts and answers then takes directions from what prompts are about.
struct ResidualBasis {
    /// The coordinates of a deviation from popularity are its dot products with these rows.
    analysis: Rows,
    /// Coordinates times these rows add up to the deviation.
    synthesis: Rows,
}

impl ResidualBasis {
    fn of(
        parts: &PredictorParts,
        history: &History,
        slots: &[u32],
        count: usize,
    ) -> Result<Self, PredictError> {
        let cells = history.layers() * history.experts();
        let weighted = |&slot: &u32| -> Result<Vec<f32>, PredictError> {
            let apart = |(phase, weight): (Phase, f32)| -> Result<Vec<f32>, PredictError> {
                let shares = parts.tokens.of(phase).predict(history.prompt(slot))?;
                let pairs = shares.values().iter().zip(parts.popularity.shares(phase).values());
                Ok(pairs.map(|(share, mean)| weight * (share - mean)).collect())
            };
            Ok([apart((Phase::Prefill, 1.0))?, apart((Phase::Decode, DECODE_WEIGHT))?].concat())
        };
        let sample = Random::new(SEED).sample(slots.len(), count * SAMPLE_PER_DIRECTION);
        let sample: Vec<u32> =
            sample.into_iter().filter_map(|index| slots.get(index as usize).copied()).collect();
        let rows = sample.par_iter().map(weighted).collect::<Result<Vec<_>, _>>()?;
        let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        let directions = principal_directions(&rows, 2 * cells, count);
        // A history of one prompt, or of prompts that are all alike, has none: one without effect stands for them.
        let directions = match directions.len() {
            0 => Rows::from_values(2 * cells, vec![0.0; 2 * cells]),
            _ => directions,
        };
        let with_decode = |factor: f32| {
            let mut values = directions.values().to_vec();
            for row in values.chunks_exact_mut(2 * cells) {
                row.iter_mut().skip(cells).for_each(|value| *value *= factor);
            }
            Rows::from_values(2 * cells, values)
        };
        Ok(Self { analysis: with_decode(DECODE_WEIGHT), synthesis: with_decode(1.0 / DECODE_WEIGHT) })
    }
}

/// At most `most` of `slots`, evenly over all.
fn sampled(slots: &[u32], most: usize) -> Vec<u32> {
    slots.iter().copied().step_by(slots.len().div_ceil(most.max(1)).max(1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::portable::{MAX_PORTABLE_BYTES, MAX_SKETCH_BYTES, sketch_dimensions};
    use proptest::prelude::*;

    /// Room for the JSON text, popularity and the bases, which [`Portable::to_bytes`](super::super::Portable) checks.
    const REST: usize = 1 << 20;
    const _: () = assert!(MAX_TOKEN_BYTES + MAX_BASIS_BYTES + MAX_PAST_BYTES + REST <= MAX_PORTABLE_BYTES);

    proptest! {
        /// Up to vocabularies and models larger than any that are known.
        #[test]
        fn parts_of_any_model_are_within_their_budgets(
            vocabulary in 1_usize..1_000_000,
            cells in 1_usize..500_000,
            wanted in 16_usize..1024,
        ) {
            let directions = most_directions(vocabulary, cells);
            let dimensions = sketch_dimensions(vocabulary, wanted).unwrap();
            prop_assert!(directions >= 1);
            prop_assert!(vocabulary * Codes::row_bytes(directions) <= MAX_TOKEN_BYTES);
            prop_assert!(4 * directions * cells <= MAX_BASIS_BYTES);
            let past = most_past(dimensions, directions);
            prop_assert!(4 * past * (dimensions + directions) <= MAX_PAST_BYTES && past > 0);
            prop_assert!(2 * vocabulary * dimensions <= MAX_SKETCH_BYTES);
        }

        #[test]
        fn sampled_prompts_are_at_most_as_many_as_fit(slots in 0_u32..3000, most in 1_usize..500) {
            let slots: Vec<u32> = (0..slots).collect();
            let kept = sampled(&slots, most);
            prop_assert!(kept.len() <= most && (kept.len() * 2 >= most.min(slots.len())));
        }
    }
}
