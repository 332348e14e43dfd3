//! Points for clustering, and their distances.

use crate::rows::Rows;
use crate::tree::Clustering;
use crate::vector::{add_scaled, dot};

/// Rows of a matrix as points with a distance.
///
/// Both distances are half the squared Euclidean distance of some vectors (1 - u.v = |u - v|^2 / 2 for unit vectors u
/// and v). So the exact medoid of a cluster takes one pass: the member nearest to the mean has the smallest sum of
/// distances.
pub(super) struct Points<'a> {
    rows: &'a Rows,
    /// Vector that is subtracted from every row, if any.
    centre: Option<&'a [f32]>,
    kind: DistanceKind,
}

enum DistanceKind {
    /// 1 - the cosine of two centred rows, with each row's dot product with the centre and the inverse length of the
    /// centred row.
    Cosine { shifts: Vec<f32>, inverses: Vec<f32>, centre_square: f32 },
    /// Half the squared Euclidean distance, with half of each row's square.
    Euclid { half_squares: Vec<f32> },
}

impl<'a> Points<'a> {
    /// Prepares `rows` for the distance of `clustering`. Cosines are taken around `centre`.
    pub(super) fn new(rows: &'a Rows, clustering: Clustering, centre: &'a [f32]) -> Self {
        #[cfg(test)]
        prepared::count(rows.len());
        let per_row = |value: &dyn Fn(&[f32]) -> f32| {
            (0..rows.len()).map(|row| value(rows.row(row))).collect::<Vec<f32>>()
        };
        if clustering == Clustering::Activations {
            let half_squares = per_row(&|row| dot(row, row) / 2.0);
            return Self { rows, centre: None, kind: DistanceKind::Euclid { half_squares } };
        }
        let centre_square = dot(centre, centre);
        let shifts = per_row(&|row| dot(row, centre));
        let inverses = per_row(&|row| {
            let square = dot(row, row) - 2.0 * dot(row, centre) + centre_square;
            if square > 1e-12 { 1.0 / square.sqrt() } else { 0.0 }
        });
        Self { rows, centre: Some(centre), kind: DistanceKind::Cosine { shifts, inverses, centre_square } }
    }

    fn row(&self, point: u32) -> &'a [f32] {
        self.rows.row(point as usize)
    }

    /// Returns the distance of two points.
    pub(super) fn distance(&self, a: u32, b: u32) -> f32 {
        let product = dot(self.row(a), self.row(b));
        match &self.kind {
            DistanceKind::Cosine { shifts, inverses, centre_square } => {
                let centred = product - at(shifts, a) - at(shifts, b) + centre_square;
                (1.0 - centred * at(inverses, a) * at(inverses, b)).max(0.0)
            }
            DistanceKind::Euclid { half_squares } => {
                (at(half_squares, a) + at(half_squares, b) - product).max(0.0)
            }
        }
    }

    /// Returns the member with the smallest sum of distances to all `members`, ties to the first.
    pub(super) fn medoid(&self, members: &[u32]) -> Option<u32> {
        let mut sum = vec![0.0; self.rows.width()];
        for &member in members {
            let factor = match &self.kind {
                DistanceKind::Cosine { inverses, .. } => at(inverses, member),
                DistanceKind::Euclid { .. } => 1.0 / members.len() as f32,
            };
            add_scaled(&mut sum, factor, self.row(member));
        }
        // Subtracts the centre from the sum, once per row and weight.
        if let (Some(centre), DistanceKind::Cosine { inverses, .. }) = (self.centre, &self.kind) {
            let total: f32 = members.iter().map(|&member| at(inverses, member)).sum();
            add_scaled(&mut sum, -total, centre);
        }
        let shift = self.centre.map_or(0.0, |centre| dot(centre, &sum));
        let closeness = |member: u32| {
            let product = dot(self.row(member), &sum);
            match &self.kind {
                DistanceKind::Cosine { inverses, .. } => (product - shift) * at(inverses, member),
                DistanceKind::Euclid { half_squares } => product - at(half_squares, member),
            }
        };
        let mut best: Option<(u32, f32)> = None;
        for &member in members {
            let closeness = closeness(member);
            if best.is_none_or(|(_, closest)| closeness > closest) {
                best = Some((member, closeness));
            }
        }
        best.map(|(member, _)| member)
    }
}

fn at(values: &[f32], point: u32) -> f32 {
    values.get(point as usize).copied().unwrap_or(0.0)
}

/// Number of rows that this thread prepared: tests count the work, as times vary.
#[cfg(test)]
pub(super) mod prepared {
    use std::cell::Cell;

    thread_local! {
        static ROWS: Cell<usize> = const { Cell::new(0) };
    }

    pub(in crate::tree) fn count(rows: usize) {
        ROWS.with(|sum| sum.set(sum.get() + rows));
    }

    pub(in crate::tree) fn so_far() -> usize {
        ROWS.with(Cell::get)
    }
}
