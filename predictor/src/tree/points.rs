//! Points that are clustered, and their distances.

use crate::rows::Rows;
use crate::tree::Clustering;
use crate::vector::{add_scaled, dot};

/// Rows of a matrix as points of a space.
///
/// Both kinds of distance are half the squared Euclidean distance of some vectors (1 - u.v = |u - v|^2 / 2
/// for unit vectors u and v). So the exact medoid of a cluster costs one pass: the member nearest to the
/// mean has the smallest sum of distances to all.
pub(super) struct Points<'a> {
    rows: &'a Rows,
    /// Vector that is taken off every row; none where the rows are compared as they are.
    centre: Option<&'a [f32]>,
    kind: DistanceKind,
}

enum DistanceKind {
    /// 1 - the cosine of two rows after the centre is taken off; per row its dot product with the centre,
    /// and 1 / the length of what is left.
    Cosine { shifts: Vec<f32>, inverses: Vec<f32>, centre_square: f32 },
    /// Half the squared Euclidean distance; per row half of its square.
    Euclid { half_squares: Vec<f32> },
}

impl<'a> Points<'a> {
    /// `rows` as `clustering` compares them; `centre` is what the cosines are taken around.
    pub(super) fn new(rows: &'a Rows, clustering: Clustering, centre: &'a [f32]) -> Self {
        #[cfg(test)]
        prepared::count(rows.len());
        let each =
            |of: &dyn Fn(&[f32]) -> f32| (0..rows.len()).map(|row| of(rows.row(row))).collect::<Vec<f32>>();
        if clustering == Clustering::Activations {
            let half_squares = each(&|row| dot(row, row) / 2.0);
            return Self { rows, centre: None, kind: DistanceKind::Euclid { half_squares } };
        }
        let centre_square = dot(centre, centre);
        let shifts = each(&|row| dot(row, centre));
        let inverses = each(&|row| {
            let square = dot(row, row) - 2.0 * dot(row, centre) + centre_square;
            if square > 1e-12 { 1.0 / square.sqrt() } else { 0.0 }
        });
        Self { rows, centre: Some(centre), kind: DistanceKind::Cosine { shifts, inverses, centre_square } }
    }

    fn row(&self, point: u32) -> &'a [f32] {
        self.rows.row(point as usize)
    }

    /// How far two points are apart.
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

    /// The member with the smallest sum of distances to all of `members`; ties to the first.
    pub(super) fn medoid(&self, members: &[u32]) -> Option<u32> {
        let mut sum = vec![0.0; self.rows.width()];
        for &member in members {
            let factor = match &self.kind {
                DistanceKind::Cosine { inverses, .. } => at(inverses, member),
                DistanceKind::Euclid { .. } => 1.0 / members.len() as f32,
            };
            add_scaled(&mut sum, factor, self.row(member));
        }
        // The sum of the centred rows differs from this by a multiple of the centre, which must go as well.
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

/// How many rows this thread has prepared: what takes long has to be counted, as times say nothing.
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
