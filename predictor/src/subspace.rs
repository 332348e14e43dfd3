//! Principal directions of rows of numbers, by subspace iteration (Halko, Martinsson and Tropp 2011, algorithm 4.4).

use crate::rows::Rows;
use crate::vector::{add_scaled, dot};
use rayon::prelude::*;

/// Rounds of subspace iteration.
const ROUNDS: usize = 2;
/// A direction that keeps no more than this part of its length when the others are taken off is rounding.
const DEPENDENT: f32 = 1e-4;

/// Returns at most `count` orthonormal directions that hold most of `sample`, [directions, width]. Fewer where the sample
/// spans fewer.
pub(crate) fn principal_directions(sample: &[&[f32]], width: usize, count: usize) -> Rows {
    let mut basis = orthonormalised(sample.iter().take(count).map(|row| row.to_vec()).collect());
    for _ in 0..ROUNDS {
        let coordinates: Vec<Vec<f32>> =
            sample.par_iter().map(|vector| basis.iter().map(|row| dot(row, vector)).collect()).collect();
        basis.par_iter_mut().enumerate().for_each(|(dimension, row)| {
            row.fill(0.0);
            for (vector, coordinates) in sample.iter().zip(&coordinates) {
                add_scaled(row, coordinates[dimension], vector);
            }
        });
        basis = orthonormalised(basis);
    }
    Rows::from_values(width, basis.concat())
}

/// Rows of length 1 at right angles to each other (Gram-Schmidt, twice for the sake of rounding); those that
/// depend on the ones before them are left out.
fn orthonormalised(rows: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    let mut basis: Vec<Vec<f32>> = Vec::with_capacity(rows.len());
    for mut row in rows {
        let length = dot(&row, &row).sqrt();
        for _ in 0..2 {
            for other in &basis {
                let along = dot(other, &row);
                add_scaled(&mut row, -along, other);
            }
        }
        let left = dot(&row, &row).sqrt();
        if left > DEPENDENT * length {
            row.iter_mut().for_each(|value| *value /= left);
            basis.push(row);
        }
    }
    basis
}
