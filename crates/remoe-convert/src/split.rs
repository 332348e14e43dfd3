//! Which neurons of a feed-forward network become one expert: those whose input weights point the same way, since they
//! are active for the same hidden states. Balanced k-means, as MoEfication's "parameter clustering split" (arXiv
//! 2110.01786, section 3.2).

/// Lanes of a sum: a fixed order of additions that the compiler can make with vectors.
const LANES: usize = 16;
/// Most rounds of k-means; it settles before.
const ROUNDS: usize = 20;

/// A matrix of float32, row after row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MatrixRows<'a> {
    /// Elements of all rows.
    pub(crate) elements: &'a [f32],
    /// Elements of a row, at least one.
    pub(crate) columns: usize,
}

impl<'a> MatrixRows<'a> {
    fn iter(self) -> impl ExactSizeIterator<Item = &'a [f32]> {
        self.elements.chunks_exact(self.columns)
    }
}

/// The neurons of each of `experts` experts, ascending, as many in each; `neurons` has one row of input weights for
/// each, and `experts` divides their number. Experts are in the order of their first neurons. The same for the same
/// weights, everywhere.
pub(crate) fn split(neurons: MatrixRows<'_>, experts: usize) -> Vec<Vec<usize>> {
    let directions: Vec<Vec<f32>> = neurons.iter().map(direction).collect();
    let room = directions.len() / experts.max(1);
    let mut centres = first_centres(&directions, experts);
    let mut clusters = Vec::new();
    for _ in 0..ROUNDS {
        let next = fill(&directions, &centres, room);
        if next == clusters {
            break;
        }
        centres = next.iter().map(|members| centre(&directions, members, neurons.columns)).collect();
        clusters = next;
    }
    clusters.sort_unstable_by_key(|members| members.first().copied());
    clusters
}

/// `row` with length 1; zeros stay zeros.
fn direction(row: &[f32]) -> Vec<f32> {
    let length = dot(row, row).sqrt();
    let factor = if length > 0.0 && length.is_finite() { 1.0 / length } else { 0.0 };
    row.iter().map(|x| x * factor).collect()
}

/// The first row, and then each time the row that is least like all that were taken.
fn first_centres(directions: &[Vec<f32>], count: usize) -> Vec<Vec<f32>> {
    let mut centres: Vec<Vec<f32>> = Vec::with_capacity(count);
    // Of each row the likeness to the nearest centre.
    let mut nearest = vec![f32::NEG_INFINITY; directions.len()];
    for _ in 0..count {
        let least = nearest.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1).then(a.0.cmp(&b.0)));
        let Some((index, _)) = least else { break };
        let taken = &directions[index];
        for (nearest, direction) in nearest.iter_mut().zip(directions) {
            *nearest = nearest.max(dot(direction, taken));
        }
        // Where rows are the same, none is taken twice.
        nearest[index] = f32::INFINITY;
        centres.push(taken.clone());
    }
    centres
}

/// Gives each row to a centre with room, the most alike of all pairs first.
fn fill(directions: &[Vec<f32>], centres: &[Vec<f32>], room: usize) -> Vec<Vec<usize>> {
    let mut pairs = Vec::with_capacity(directions.len() * centres.len());
    for (row, direction) in directions.iter().enumerate() {
        pairs.extend(centres.iter().enumerate().map(|(centre, to)| (dot(direction, to), row, centre)));
    }
    pairs.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    let mut given = vec![false; directions.len()];
    let mut clusters = vec![Vec::with_capacity(room); centres.len()];
    for (_, row, centre) in pairs {
        if !given[row] && clusters[centre].len() < room {
            given[row] = true;
            clusters[centre].push(row);
        }
    }
    clusters.iter_mut().for_each(|members| members.sort_unstable());
    clusters
}

/// The direction of the sum of some rows.
fn centre(directions: &[Vec<f32>], members: &[usize], columns: usize) -> Vec<f32> {
    let mut sum = vec![0.0; columns];
    for &member in members {
        for (sum, x) in sum.iter_mut().zip(&directions[member]) {
            *sum += x;
        }
    }
    direction(&sum)
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let ((whole_a, rest_a), (whole_b, rest_b)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in whole_a.iter().zip(whole_b) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(rest_a).zip(rest_b) {
        *lane += a * b;
    }
    lanes.iter().sum()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(rows: &[[f32; 2]], experts: usize) -> Vec<Vec<usize>> {
        split(MatrixRows { elements: rows.as_flattened(), columns: 2 }, experts)
    }

    #[test]
    fn neurons_that_point_the_same_way_are_together() {
        // Three directions in turns, of different lengths.
        let directions = [[1.0, 0.1], [-1.0, 0.2], [0.0, -3.0]];
        let rows: Vec<[f32; 2]> = (0..12)
            .map(|index| {
                let [x, y] = directions[index % 3];
                let length = 1.0 + index as f32;
                [x * length, y * length + 0.01 * index as f32]
            })
            .collect();
        assert_eq!(of(&rows, 3), [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]);
    }

    #[test]
    fn every_neuron_is_in_one_expert_whatever_the_weights_are() {
        for rows in [
            [[0.0, 0.0]; 12],
            [[1.0, 2.0]; 12],
            [[f32::INFINITY, 1.0]; 12],
            std::array::from_fn(|index| [index as f32, f32::NAN]),
            std::array::from_fn(|index| [(index * index) as f32 - 30.0, 1.0]),
        ] {
            for experts in [1, 2, 3, 4, 6, 12] {
                let clusters = of(&rows, experts);
                assert!(clusters.iter().all(|members| members.len() == 12 / experts && members.is_sorted()));
                assert!(clusters.is_sorted_by_key(|members| members[0]));
                let mut all = clusters.concat();
                all.sort_unstable();
                assert_eq!(all, (0..12).collect::<Vec<_>>());
            }
        }
    }
}
