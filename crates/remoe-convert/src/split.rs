//! Clustering of a feed-forward network's neurons into experts, by balanced k-means on the directions of their input
//! weights. Neurons with similar directions are active for the same hidden states. This is MoEfication's "parameter
//! clustering split" (arXiv 2110.01786, section 3.2).

/// Partial sums of a dot product: a fixed order of additions that the compiler can vectorise.
const LANES: usize = 16;
/// Limit of k-means iterations. It usually converges earlier.
const ITERATION_LIMIT: usize = 20;

/// Row-major float32 matrix.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MatrixRows<'a> {
    /// Elements of all rows.
    pub(crate) elements: &'a [f32],
    /// Elements per row, at least one.
    pub(crate) columns: usize,
}

impl<'a> MatrixRows<'a> {
    fn iter(self) -> impl ExactSizeIterator<Item = &'a [f32]> {
        self.elements.chunks_exact(self.columns)
    }
}

/// Assigns neurons to `experts` clusters of equal size, and returns each cluster's neurons in ascending order.
///
/// `neurons` has one row of input weights per neuron. `experts` must divide the number of neurons. Clusters are sorted
/// by their first neuron. The result is deterministic on every machine.
pub(crate) fn cluster_neurons(neurons: MatrixRows<'_>, experts: usize) -> Vec<Vec<usize>> {
    let directions: Vec<Vec<f32>> = neurons.iter().map(normalise).collect();
    let capacity = directions.len() / experts.max(1);
    let mut centres = initial_centres(&directions, experts);
    let mut clusters = Vec::new();
    for _ in 0..ITERATION_LIMIT {
        let next = assign(&directions, &centres, capacity);
        if next == clusters {
            break;
        }
        centres = next.iter().map(|members| centre(&directions, members, neurons.columns)).collect();
        clusters = next;
    }
    clusters.sort_unstable_by_key(|members| members.first().copied());
    clusters
}

/// Normalises `row` to length 1. A row of zeros is returned unchanged.
fn normalise(row: &[f32]) -> Vec<f32> {
    let length = dot(row, row).sqrt();
    let factor = if length > 0.0 && length.is_finite() { 1.0 / length } else { 0.0 };
    row.iter().map(|x| x * factor).collect()
}

/// Selects the initial centres: the first row, then repeatedly the row that is least similar to its nearest centre.
fn initial_centres(directions: &[Vec<f32>], count: usize) -> Vec<Vec<f32>> {
    let mut centres: Vec<Vec<f32>> = Vec::with_capacity(count);
    // Similarity of each row to its nearest centre.
    let mut similarities = vec![f32::NEG_INFINITY; directions.len()];
    for _ in 0..count {
        let least_similar =
            similarities.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1).then(a.0.cmp(&b.0)));
        let Some((index, _)) = least_similar else { break };
        let centre = &directions[index];
        for (similarity, direction) in similarities.iter_mut().zip(directions) {
            *similarity = similarity.max(dot(direction, centre));
        }
        // Ensures that no row is selected twice, even among equal rows.
        similarities[index] = f32::INFINITY;
        centres.push(centre.clone());
    }
    centres
}

/// Assigns each row to a centre with free capacity, in descending order of the pairs' similarity.
fn assign(directions: &[Vec<f32>], centres: &[Vec<f32>], capacity: usize) -> Vec<Vec<usize>> {
    let mut pairs = Vec::with_capacity(directions.len() * centres.len());
    for (row, direction) in directions.iter().enumerate() {
        pairs.extend(
            centres
                .iter()
                .enumerate()
                .map(|(centre, direction_of_centre)| (dot(direction, direction_of_centre), row, centre)),
        );
    }
    pairs.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    let mut is_assigned = vec![false; directions.len()];
    let mut clusters = vec![Vec::with_capacity(capacity); centres.len()];
    for (_, row, centre) in pairs {
        if !is_assigned[row] && clusters[centre].len() < capacity {
            is_assigned[row] = true;
            clusters[centre].push(row);
        }
    }
    clusters.iter_mut().for_each(|members| members.sort_unstable());
    clusters
}

/// Computes the centre of a cluster: the normalised sum of its rows.
fn centre(directions: &[Vec<f32>], members: &[usize], columns: usize) -> Vec<f32> {
    let mut sum = vec![0.0; columns];
    for &member in members {
        for (sum, x) in sum.iter_mut().zip(&directions[member]) {
            *sum += x;
        }
    }
    normalise(&sum)
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

    fn clusters_of(rows: &[[f32; 2]], experts: usize) -> Vec<Vec<usize>> {
        cluster_neurons(MatrixRows { elements: rows.as_flattened(), columns: 2 }, experts)
    }

    #[test]
    fn neurons_of_similar_direction_share_an_expert() {
        // Rows alternate between three directions, with different lengths.
        let directions = [[1.0, 0.1], [-1.0, 0.2], [0.0, -3.0]];
        let rows: Vec<[f32; 2]> = (0..12)
            .map(|index| {
                let [x, y] = directions[index % 3];
                let length = 1.0 + index as f32;
                [x * length, y * length + 0.01 * index as f32]
            })
            .collect();
        assert_eq!(clusters_of(&rows, 3), [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]);
    }

    #[test]
    fn every_neuron_is_in_exactly_one_expert() {
        for rows in [
            [[0.0, 0.0]; 12],
            [[1.0, 2.0]; 12],
            [[f32::INFINITY, 1.0]; 12],
            std::array::from_fn(|index| [index as f32, f32::NAN]),
            std::array::from_fn(|index| [(index * index) as f32 - 30.0, 1.0]),
        ] {
            for experts in [1, 2, 3, 4, 6, 12] {
                let clusters = clusters_of(&rows, experts);
                assert!(clusters.iter().all(|members| members.len() == 12 / experts && members.is_sorted()));
                assert!(clusters.is_sorted_by_key(|members| members[0]));
                let mut all = clusters.concat();
                all.sort_unstable();
                assert_eq!(all, (0..12).collect::<Vec<_>>());
            }
        }
    }
}
