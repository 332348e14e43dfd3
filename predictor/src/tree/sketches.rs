//! Sketches: short forms of prompt vectors, so that a search can compare many prompts and read few vectors.
//!
//! A sketch has the coordinates of a vector in the principal subspace of the history's vectors (around 0), found on a
//! sample. The dot product of two sketches is that of the vectors without the components outside.

use crate::error::PredictError;
use crate::history::History;
use crate::random::Random;
use crate::rows::Rows;
use crate::subspace::principal_directions;
use crate::tree::{Neighbour, best_of};
use crate::vector::dot;
use rayon::prelude::*;

/// Largest number of dimensions of a sketch.
const MAX_DIMENSIONS: usize = 64;
/// Least ratio of dimensions of a vector to those of its sketch, so that sketches are cheaper to compare.
const MIN_REDUCTION: usize = 2;
/// Sampled prompts per dimension of the subspace.
const SAMPLE_PER_DIMENSION: usize = 8;

/// Sketches of all slots of a [`History`].
#[derive(Debug, Clone)]
pub(crate) struct Sketches {
    /// Orthonormal directions, [dimensions, hidden]. Empty if all vectors are zero or too short for sketches.
    basis: Rows,
    /// Coordinates, [slots, dimensions].
    rows: Rows,
    /// Number of prompts when the basis was found.
    basis_prompts: usize,
    /// Number of prompts added since.
    added: usize,
}

impl Sketches {
    /// Computes the sketches of all slots.
    pub(super) fn from_history(history: &History, seed: u64) -> Self {
        let slots: Vec<u32> = history.slots().collect();
        let basis = find_basis(history, &slots, seed);
        let mut sketches = Self { rows: Rows::new(basis.len()), basis, basis_prompts: slots.len(), added: 0 };
        let all = (0..history.vectors.len()).into_par_iter();
        let rows: Vec<Vec<f32>> = all.map(|slot| sketches.project(history.vectors.row(slot))).collect();
        sketches.rows = Rows::from_values(sketches.basis.len(), rows.concat());
        sketches
    }

    /// Restores the saved sketches of `slots` prompts.
    ///
    /// # Errors
    /// The number of sketches is not `slots`.
    pub(crate) fn from_parts(basis: Rows, rows: Rows, slots: usize) -> Result<Self, PredictError> {
        PredictError::require_size("`tree.sketches`", slots * basis.len(), rows.values().len())?;
        Ok(Self { basis, rows, basis_prompts: slots, added: 0 })
    }

    /// Fixes the basis, however many prompts are added.
    pub(super) fn fix_basis(&mut self) {
        self.basis_prompts = usize::MAX;
    }

    /// Returns the directions, [dimensions, hidden].
    pub(crate) fn basis(&self) -> &Rows {
        &self.basis
    }

    /// Returns the coordinates, [slots, dimensions].
    pub(crate) fn rows(&self) -> &Rows {
        &self.rows
    }

    /// Returns the sketches of `slots` alone, in that order.
    pub(crate) fn gather(&self, slots: &[u32]) -> Self {
        Self { basis: self.basis.clone(), rows: self.rows.gather(slots), ..*self }
    }

    /// Adds the present prompt of `slot`. Finds the basis again once the number of added prompts reaches that of the
    /// basis, because topics change.
    pub(super) fn insert(&mut self, history: &History, slot: u32, seed: u64) {
        self.added += 1;
        if self.added >= self.basis_prompts {
            *self = Self::from_history(history, seed);
        } else {
            let row = self.project(history.vector(slot));
            self.rows.set(slot as usize, &row);
        }
    }

    /// Returns the `count` of `slots` most similar to `query` by sketches. Returns all `slots` if there are no more
    /// or there are no sketches.
    pub(super) fn most_similar(&self, slots: Vec<u32>, query: &[f32], count: usize) -> Vec<u32> {
        if slots.len() <= count || self.basis.len() == 0 {
            return slots;
        }
        let query = self.project(query);
        let similarity =
            |slot: u32| Neighbour { slot, similarity: dot(self.rows.row(slot as usize), &query) };
        let best = best_of(slots.into_iter().map(similarity).collect(), count);
        best.iter().map(|neighbour| neighbour.slot).collect()
    }

    fn project(&self, vector: &[f32]) -> Vec<f32> {
        (0..self.basis.len()).map(|dimension| dot(self.basis.row(dimension), vector)).collect()
    }
}

/// Finds the principal directions of the vectors, [dimensions, hidden].
fn find_basis(history: &History, slots: &[u32], seed: u64) -> Rows {
    let hidden = history.vectors.width();
    let width = MAX_DIMENSIONS.min(hidden / MIN_REDUCTION);
    let sample: Vec<&[f32]> = Random::new(seed)
        .sample(slots.len(), width * SAMPLE_PER_DIMENSION)
        .into_iter()
        .filter_map(|index| slots.get(index as usize))
        .map(|&slot| history.vector(slot))
        .collect();
    principal_directions(&sample, hidden, width)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates prompts in three of eight dimensions, with different lengths.
    fn history(count: usize) -> History {
        let vectors = (0..count).flat_map(|n| {
            let mut vector = [0.0; 8];
            vector[n % 3] = 1.0;
            vector[(n + 1) % 3] = n as f32 / count as f32;
            vector
        });
        let prompts = (0..count).map(|_| Box::from([0])).collect();
        History::from_vectors(1, 1, vectors.collect(), vec![1.0; count], prompts).unwrap()
    }

    #[test]
    fn vectors_inside_the_subspace_are_sketched_without_loss() {
        let history = history(30);
        let sketches = Sketches::from_history(&history, 1);
        assert_eq!((sketches.basis.len(), sketches.rows.len()), (3, 30));
        for (a, b) in [(0, 0), (0, 1), (3, 17), (29, 5)] {
            let expected = dot(history.vector(a), history.vector(b));
            let found = dot(sketches.rows.row(a as usize), sketches.rows.row(b as usize));
            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
        }
    }

    #[test]
    fn most_similar_candidates_are_kept() {
        let history = history(30);
        let sketches = Sketches::from_history(&history, 1);
        let query = [1.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0.0];
        let kept = sketches.most_similar((0..30).collect(), &query, 4);
        // Prompts along the first direction; components outside the subspace do not count.
        assert_eq!(kept, [0, 3, 6, 9]);
        assert_eq!(sketches.most_similar(vec![7, 2], &query, 4), [7, 2]);
    }

    #[test]
    fn new_directions_are_found_once_added_prompts_match_basis() {
        let all = history(30);
        let slots: Vec<u32> = (0..30).step_by(3).take(2).collect();
        let mut grown = all.gather(&slots);
        let mut sketches = Sketches::from_history(&grown, 1);
        assert_eq!(sketches.basis.len(), 2);
        let shares = crate::shares::UsageShares::uniform(1, 1);
        for (slot, dimensions) in [(1, 2), (2, 3)] {
            let place = grown.insert(&[0], all.vector(slot), &shares, None);
            sketches.insert(&grown, place, 1);
            assert_eq!(sketches.basis.len(), dimensions);
        }
        assert_eq!((sketches.basis_prompts, sketches.rows.len()), (4, 4));
    }

    #[test]
    fn zero_vectors_without_sketches_are_kept() {
        let history = History::from_vectors(1, 1, vec![0.0; 16], vec![1.0; 2], vec![Box::from([0]); 2]);
        let sketches = Sketches::from_history(&history.unwrap(), 1);
        assert_eq!(sketches.most_similar(vec![0, 1], &[1.0; 8], 1), [0, 1]);
    }
}
