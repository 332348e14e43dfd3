//! Short stand-ins for prompt vectors, so that a search can look at many prompts and read few vectors.
//!
//! A sketch holds the coordinates of a vector in the subspace that the history's vectors reach into most
//! (their principal components around 0), found on a sample. The dot product of two sketches is that of the vectors,
//! less what lies outside.

use crate::error::PredictError;
use crate::history::History;
use crate::random::Random;
use crate::rows::Rows;
use crate::subspace::principal_directions;
use crate::tree::{Neighbour, best_of};
use crate::vector::dot;
use rayon::prelude::*;

/// Dimensions of a sketch, at most.
const WIDTH: usize = 64;
/// A sketch has at most one dimension for so many of a vector: it has to be cheaper to compare.
const SHRINKING: usize = 2;
/// Prompts that the subspace is found on, for each of its dimensions.
const SAMPLE_PER_DIMENSION: usize = 8;

/// The sketch of each slot of a [`History`].
#[derive(Debug, Clone)]
pub(crate) struct Sketches {
    /// Orthonormal, [dimensions, hidden]; no row where all vectors are zero or too short for sketches.
    basis: Rows,
    /// [slots, dimensions].
    rows: Rows,
    /// Prompts that the basis was found among, and those that have come since.
    settled: usize,
    newcomers: usize,
}

impl Sketches {
    /// Makes the sketches of all slots.
    pub(super) fn of(history: &History, seed: u64) -> Self {
        let slots: Vec<u32> = history.slots().collect();
        let basis = basis_of(history, &slots, seed);
        let mut sketches = Self { rows: Rows::new(basis.len()), basis, settled: slots.len(), newcomers: 0 };
        let all = (0..history.vectors.len()).into_par_iter();
        let rows: Vec<Vec<f32>> = all.map(|slot| sketches.project(history.vectors.row(slot))).collect();
        sketches.rows = Rows::from_values(sketches.basis.len(), rows.concat());
        sketches
    }

    /// From what was saved for `slots` prompts.
    ///
    /// # Errors
    /// There is not one sketch for each of them.
    pub(crate) fn from_parts(basis: Rows, rows: Rows, slots: usize) -> Result<Self, PredictError> {
        PredictError::require_size("`tree.sketches`", slots * basis.len(), rows.values().len())?;
        Ok(Self { basis, rows, settled: slots, newcomers: 0 })
    }

    /// Leaves the basis as it is, however many prompts come.
    pub(super) fn keep_basis(&mut self) {
        self.settled = usize::MAX;
    }

    /// The directions, [dimensions, hidden].
    pub(crate) fn basis(&self) -> &Rows {
        &self.basis
    }

    /// The coordinates, [slots, dimensions].
    pub(crate) fn rows(&self) -> &Rows {
        &self.rows
    }

    /// Returns the sketches of `slots` alone, in their order.
    pub(crate) fn gather(&self, slots: &[u32]) -> Self {
        Self { basis: self.basis.clone(), rows: self.rows.gather(slots), ..*self }
    }

    /// Takes in the prompt that `slot` now holds. When as many have come as the basis was found among, it is found
    /// again: topics of prompts change.
    pub(super) fn insert(&mut self, history: &History, slot: u32, seed: u64) {
        self.newcomers += 1;
        if self.newcomers >= self.settled {
            *self = Self::of(history, seed);
        } else {
            let row = self.project(history.vector(slot));
            self.rows.set(slot as usize, &row);
        }
    }

    /// The `count` of `slots` that are most similar to `query` as far as sketches tell; all where they
    /// are no more, or nothing is known of them.
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

/// Orthonormal directions that hold most of the vectors, [dimensions, hidden].
fn basis_of(history: &History, slots: &[u32], seed: u64) -> Rows {
    let hidden = history.vectors.width();
    let width = WIDTH.min(hidden / SHRINKING);
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

    /// Prompts in three directions of eight, with lengths that differ.
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
    fn vectors_of_a_subspace_are_sketched_without_loss() {
        let history = history(30);
        let sketches = Sketches::of(&history, 1);
        assert_eq!((sketches.basis.len(), sketches.rows.len()), (3, 30));
        for (a, b) in [(0, 0), (0, 1), (3, 17), (29, 5)] {
            let expected = dot(history.vector(a), history.vector(b));
            let found = dot(sketches.rows.row(a as usize), sketches.rows.row(b as usize));
            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
        }
    }

    #[test]
    fn the_most_similar_are_kept() {
        let history = history(30);
        let sketches = Sketches::of(&history, 1);
        let query = [1.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0.0];
        let kept = sketches.most_similar((0..30).collect(), &query, 4);
        // Those that lean on the first direction alone; what lies outside does not count.
        assert_eq!(kept, [0, 3, 6, 9]);
        assert_eq!(sketches.most_similar(vec![7, 2], &query, 4), [7, 2]);
    }

    #[test]
    fn directions_that_come_later_are_found_when_as_many_have_come() {
        let all = history(30);
        let slots: Vec<u32> = (0..30).step_by(3).take(2).collect();
        let mut grown = all.gather(&slots);
        let mut sketches = Sketches::of(&grown, 1);
        assert_eq!(sketches.basis.len(), 2);
        let shares = crate::shares::Shares::uniform(1, 1);
        for (slot, dimensions) in [(1, 2), (2, 3)] {
            let place = grown.insert(&[0], all.vector(slot), &shares, None);
            sketches.insert(&grown, place, 1);
            assert_eq!(sketches.basis.len(), dimensions);
        }
        assert_eq!((sketches.settled, sketches.rows.len()), (4, 4));
    }

    #[test]
    fn zeros_have_no_sketch_and_are_kept() {
        let history = History::from_vectors(1, 1, vec![0.0; 16], vec![1.0; 2], vec![Box::from([0]); 2]);
        let sketches = Sketches::of(&history.unwrap(), 1);
        assert_eq!(sketches.most_similar(vec![0, 1], &[1.0; 8], 1), [0, 1]);
    }
}
