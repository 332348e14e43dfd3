//! Principal directions of rows, by subspace iteration (Halko, Martinsson and Tropp 2011, algorithm 4.4).

use crate::rows::Rows;
use crate::vector::{add_scaled, dot};
use rayon::prelude::*;

/// Rounds of subspace iteration.
const ROUNDS: usize = 2;
/// Fraction of a row's length below which the rest after orthogonalisation is rounding error.
const MIN_INDEPENDENT_FRACTION: f32 = 1e-4;

/// Returns at most `count` orthonormal directions that hold most of `sample`, [directions, width], or fewer if the
/// sample spans fewer.
pub(crate) fn principal_directions(sample: &[&[f32]], width: usize, count: usize) -> Rows {
    let mut basis = orthonormalise(sample.iter().take(count).map(|row| row.to_vec()).collect());
    for _ in 0..ROUNDS {
        let coordinates: Vec<Vec<f32>> =
            sample.par_iter().map(|vector| basis.iter().map(|row| dot(row, vector)).collect()).collect();
        basis.par_iter_mut().enumerate().for_each(|(dimension, row)| {
            row.fill(0.0);
            for (vector, coordinates) in sample.iter().zip(&coordinates) {
                add_scaled(row, coordinates[dimension], vector);
            }
        });
        basis = orthonormalise(basis);
    }
    Rows::from_values(width, basis.concat())
}

/// Orthonormalises rows by Gram-Schmidt, applied twice against rounding. Omits rows that depend on earlier ones.
fn orthonormalise(rows: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    let mut basis: Vec<Vec<f32>> = Vec::with_capacity(rows.len());
    for mut row in rows {
        let length = dot(&row, &row).sqrt();
        for _ in 0..2 {
            for other in &basis {
                let component = dot(other, &row);
                add_scaled(&mut row, -component, other);
            }
        }
        let rest = dot(&row, &row).sqrt();
        if rest > MIN_INDEPENDENT_FRACTION * length {
            row.iter_mut().for_each(|value| *value /= rest);
            basis.push(row);
        }
    }
    basis
}
