//! One way through the experts of a layer for several requests: what an expert computes of all of
//! them, it computes at once, so that its weights are read once. Pure but for the kernels.

use crate::host::Host;
use bytes::Bytes;
use remoe_kernels::{ExpertJob, Pool};
use remoe_proto::MAX_PAYLOAD;
use remoe_proto::v1::Work;
use std::sync::Arc;

/// Computes requests; keeps its memory between them.
pub(crate) struct Pass {
    pool: Arc<Pool>,
    row_bytes: usize,
    /// Rows in the order of the jobs, before they are put into the order of the answers.
    outputs: Vec<u8>,
    /// Rows of several requests, in the order of the jobs.
    inputs: Vec<u8>,
}

/// Result of a pass.
pub(crate) struct Computed {
    /// The answer of each request: one row per (token, expert) in its order. Of a request that was taken
    /// back meanwhile it may be incomplete.
    pub(crate) answers: Vec<Bytes>,
    /// How often an expert's weights were read.
    pub(crate) reads: u64,
}

/// One token row of a request for one expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RoutedRow {
    expert: u32,
    /// Index of the request.
    request: usize,
    /// Row in the request.
    row: u32,
    /// Place in the answer.
    slot: usize,
}

impl Pass {
    pub(crate) fn new(pool: Arc<Pool>, row_bytes: usize) -> Self {
        Self { pool, row_bytes, outputs: Vec::new(), inputs: Vec::new() }
    }

    /// Computes `works`, all of one layer. What `is_cancelled` (by position) is left out as soon as that
    /// is noticed.
    ///
    /// # Errors
    /// An expert is not hosted, or the kernels refuse: why.
    pub(crate) fn compute(
        &mut self,
        host: &Host,
        works: &[&Work],
        is_cancelled: impl Fn(usize) -> bool,
    ) -> Result<Computed, String> {
        match works {
            [work] => self.one(host, work),
            _ => self.several(host, works, is_cancelled),
        }
    }

    /// One request: its rows are used where they are.
    fn one(&mut self, host: &Host, work: &Work) -> Result<Computed, String> {
        let row_bytes = self.row_bytes;
        let pairs = by_expert(&[work]);
        let rows: Vec<u32> = pairs.iter().map(|pair| pair.row).collect();
        let mut answer = vec![0; pairs.len() * row_bytes];
        // One token's experts are in the order of the answer already: nothing needs to be moved.
        let in_place = pairs.is_sorted_by_key(|pair| pair.slot);
        let output = if in_place {
            answer.as_mut_slice()
        } else {
            self.outputs.resize(answer.len(), 0);
            self.outputs.as_mut_slice()
        };
        let reads = forward(&self.pool, host, work.layer, &pairs, (&work.rows, &rows), (output, row_bytes))?;
        if !in_place {
            for (pair, row) in pairs.iter().zip(self.outputs.chunks_exact(row_bytes)) {
                answer[pair.slot * row_bytes..][..row_bytes].copy_from_slice(row);
            }
        }
        Ok(Computed { answers: vec![answer.into()], reads })
    }

    /// Several requests, in portions whose rows take no more memory than the largest request alone.
    fn several(
        &mut self,
        host: &Host,
        works: &[&Work],
        is_cancelled: impl Fn(usize) -> bool,
    ) -> Result<Computed, String> {
        let row_bytes = self.row_bytes;
        let layer = works.first().map_or(0, |work| work.layer);
        let mut answers: Vec<Vec<u8>> =
            works.iter().map(|work| vec![0; work.experts.len() * row_bytes]).collect();
        let mut reads = 0;
        let pairs = by_expert(works);
        for portion in portions(&pairs, (MAX_PAYLOAD / 2 / row_bytes).max(1)) {
            let cancelled: Vec<bool> = (0..works.len()).map(&is_cancelled).collect();
            let portion: Vec<RoutedRow> =
                portion.iter().filter(|pair| !cancelled[pair.request]).copied().collect();
            self.inputs.clear();
            for pair in &portion {
                let row = &works[pair.request].rows[pair.row as usize * row_bytes..][..row_bytes];
                self.inputs.extend_from_slice(row);
            }
            self.outputs.resize(portion.len() * row_bytes, 0);
            let rows: Vec<u32> = (0..).take(portion.len()).collect();
            let output = (self.outputs.as_mut_slice(), row_bytes);
            reads += forward(&self.pool, host, layer, &portion, (&self.inputs, &rows), output)?;
            for (pair, row) in portion.iter().zip(self.outputs.chunks_exact(row_bytes)) {
                answers[pair.request][pair.slot * row_bytes..][..row_bytes].copy_from_slice(row);
            }
        }
        Ok(Computed { answers: answers.into_iter().map(Bytes::from).collect(), reads })
    }
}

/// Computes `pairs`, those of an expert together: `rows` of `inputs`, in that order, into as many rows
/// of `output`. Returns the number of experts.
fn forward(
    pool: &Pool,
    host: &Host,
    layer: u32,
    pairs: &[RoutedRow],
    (inputs, rows): (&[u8], &[u32]),
    (output, row_bytes): (&mut [u8], usize),
) -> Result<u64, String> {
    let mut jobs = Vec::new();
    let (mut rest, mut output) = (rows, output);
    for group in pairs.chunk_by(|a, b| a.expert == b.expert) {
        let expert = group[0].expert;
        let hosted = host.get(layer, expert);
        let packed = hosted.ok_or_else(|| format!("expert {expert} of layer {layer} is not hosted"))?;
        let (row_index, other_rows) = rest.split_at(group.len());
        let (this, other_output) = output.split_at_mut(group.len() * row_bytes);
        jobs.push(ExpertJob { expert: packed, inputs, row_index, output: this });
        (rest, output) = (other_rows, other_output);
    }
    pool.forward(&mut jobs).map_err(|error| error.to_string())?;
    Ok(jobs.len() as u64)
}

/// The pairs of `works`, those of an expert together.
fn by_expert(works: &[&Work]) -> Vec<RoutedRow> {
    let mut pairs = Vec::with_capacity(works.iter().map(|work| work.experts.len()).sum());
    for (request, work) in works.iter().enumerate() {
        let rows = (0..).zip(&work.counts).flat_map(|(row, &count)| std::iter::repeat_n(row, count as usize));
        let of_work = rows.zip(&work.experts).enumerate();
        pairs.extend(of_work.map(|(slot, (row, &expert))| RoutedRow { expert, request, row, slot }));
    }
    // Stable: an expert's rows stay in the order of the requests.
    pairs.sort_by_key(|pair| pair.expert);
    pairs
}

/// Cuts `pairs`, those of an expert together, into portions of `most` at most, between experts where
/// that is possible.
fn portions(pairs: &[RoutedRow], most: usize) -> Vec<&[RoutedRow]> {
    let mut portions = Vec::new();
    let (mut start, mut end) = (0, 0);
    for group in pairs.chunk_by(|a, b| a.expert == b.expert) {
        if end + group.len() - start > most && end > start {
            portions.push(&pairs[start..end]);
            start = end;
        }
        end += group.len();
        while end - start > most {
            portions.push(&pairs[start..start + most]);
            start += most;
        }
    }
    if end > start {
        portions.push(&pairs[start..end]);
    }
    portions
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(counts: &[usize]) -> Vec<RoutedRow> {
        let experts = (0..).zip(counts).flat_map(|(expert, &count)| std::iter::repeat_n(expert, count));
        experts.enumerate().map(|(slot, expert)| RoutedRow { expert, request: 0, row: 0, slot }).collect()
    }

    #[test]
    fn portions_are_bounded_and_cut_experts_only_where_they_must() {
        let lengths = |counts: &[usize], most| -> Vec<usize> {
            let pairs = pairs(counts);
            let portions = portions(&pairs, most);
            assert_eq!(portions.concat(), pairs);
            portions.into_iter().map(<[RoutedRow]>::len).collect()
        };
        assert_eq!(lengths(&[2, 2, 2], 4), [4, 2]);
        assert_eq!(lengths(&[3, 3, 3], 4), [3, 3, 3]);
        assert_eq!(lengths(&[1, 9, 1], 4), [1, 4, 4, 2]);
        assert_eq!(lengths(&[8], 4), [4, 4]);
        assert_eq!(lengths(&[], 4), [0_usize; 0]);
        assert_eq!(lengths(&[4, 4], 100), [8]);
    }

    #[test]
    fn pairs_of_an_expert_lie_together_in_the_order_of_the_requests() {
        let first = Work { counts: vec![2, 1], experts: vec![5, 1, 5], ..Work::default() };
        let second = Work { counts: vec![1, 1], experts: vec![1, 5], ..Work::default() };
        let found: Vec<_> = by_expert(&[&first, &second])
            .into_iter()
            .map(|pair| (pair.expert, pair.request, pair.row, pair.slot))
            .collect();
        assert_eq!(found, [(1, 0, 0, 1), (1, 1, 0, 0), (5, 0, 0, 0), (5, 0, 1, 2), (5, 1, 1, 1)]);
    }
}
