//! Batch computation: computes several requests for one layer together, so that each expert's weights are read once.
//! Pure but for the kernels.

use crate::host::HostedExperts;
use bytes::Bytes;
use remoe_kernels::{ExpertJob, Pool};
use remoe_proto::MAX_PAYLOAD;
use remoe_proto::v1::Work;
use std::sync::Arc;

/// Executor of batches, which keeps its buffers between them.
pub(crate) struct BatchExecutor {
    pool: Arc<Pool>,
    row_bytes: usize,
    /// Output rows in the order of the jobs, before they are copied to the answers.
    outputs: Vec<u8>,
    /// Input rows of several requests, in the order of the jobs.
    inputs: Vec<u8>,
}

/// Result of a batch.
pub(crate) struct BatchOutput {
    /// Answer of each request: one row per (token, expert), in its order. The answer of a cancelled request may be
    /// incomplete.
    pub(crate) answers: Vec<Bytes>,
    /// Number of reads of an expert's weights.
    pub(crate) reads: u64,
}

/// One token row of a request, routed to one expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RoutedRow {
    expert: u32,
    /// Index of the request in the batch.
    request: usize,
    /// Row of the request.
    row: u32,
    /// Row of the answer.
    slot: usize,
}

impl BatchExecutor {
    pub(crate) fn new(pool: Arc<Pool>, row_bytes: usize) -> Self {
        Self { pool, row_bytes, outputs: Vec::new(), inputs: Vec::new() }
    }

    /// Computes `works`, which are all of one layer. Skips the rest of a request once `is_cancelled` returns true for
    /// its index.
    ///
    /// # Errors
    /// The message if an expert is not hosted or the kernels fail.
    pub(crate) fn compute(
        &mut self,
        host: &HostedExperts,
        works: &[&Work],
        is_cancelled: impl Fn(usize) -> bool,
    ) -> Result<BatchOutput, String> {
        match works {
            [work] => self.compute_one(host, work),
            _ => self.compute_several(host, works, is_cancelled),
        }
    }

    /// Computes one request, whose rows are used in place.
    fn compute_one(&mut self, host: &HostedExperts, work: &Work) -> Result<BatchOutput, String> {
        let row_bytes = self.row_bytes;
        let pairs = pairs_by_expert(&[work]);
        let rows: Vec<u32> = pairs.iter().map(|pair| pair.row).collect();
        let mut answer = vec![0; pairs.len() * row_bytes];
        // The experts of a single token are already in the order of the answer.
        let is_in_place = pairs.is_sorted_by_key(|pair| pair.slot);
        let output = if is_in_place {
            answer.as_mut_slice()
        } else {
            self.outputs.resize(answer.len(), 0);
            self.outputs.as_mut_slice()
        };
        let reads = forward(&self.pool, host, work.layer, &pairs, (&work.rows, &rows), (output, row_bytes))?;
        if !is_in_place {
            for (pair, row) in pairs.iter().zip(self.outputs.chunks_exact(row_bytes)) {
                answer[pair.slot * row_bytes..][..row_bytes].copy_from_slice(row);
            }
        }
        Ok(BatchOutput { answers: vec![answer.into()], reads })
    }

    /// Computes several requests, in portions whose rows take no more memory than the largest request.
    fn compute_several(
        &mut self,
        host: &HostedExperts,
        works: &[&Work],
        is_cancelled: impl Fn(usize) -> bool,
    ) -> Result<BatchOutput, String> {
        let row_bytes = self.row_bytes;
        let layer = works.first().map_or(0, |work| work.layer);
        let mut answers: Vec<Vec<u8>> =
            works.iter().map(|work| vec![0; work.experts.len() * row_bytes]).collect();
        let mut reads = 0;
        let pairs = pairs_by_expert(works);
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
        Ok(BatchOutput { answers: answers.into_iter().map(Bytes::from).collect(), reads })
    }
}

/// Computes `pairs`, which are grouped by expert: from `rows` of `inputs`, in that order, into the rows of `output`.
/// Returns the number of experts.
fn forward(
    pool: &Pool,
    host: &HostedExperts,
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
        let (expert_output, other_output) = output.split_at_mut(group.len() * row_bytes);
        jobs.push(ExpertJob { expert: packed, inputs, row_index, output: expert_output });
        (rest, output) = (other_rows, other_output);
    }
    pool.forward(&mut jobs).map_err(|error| error.to_string())?;
    Ok(jobs.len() as u64)
}

/// Returns the pairs of `works`, grouped by expert.
fn pairs_by_expert(works: &[&Work]) -> Vec<RoutedRow> {
    let mut pairs = Vec::with_capacity(works.iter().map(|work| work.experts.len()).sum());
    for (request, work) in works.iter().enumerate() {
        let rows = (0..).zip(&work.counts).flat_map(|(row, &count)| std::iter::repeat_n(row, count as usize));
        let work_pairs = rows.zip(&work.experts).enumerate();
        pairs.extend(work_pairs.map(|(slot, (row, &expert))| RoutedRow { expert, request, row, slot }));
    }
    // A stable sort keeps the rows of an expert in the order of the requests.
    pairs.sort_by_key(|pair| pair.expert);
    pairs
}

/// Cuts `pairs`, which are grouped by expert, into portions of at most `limit`, between experts if possible.
fn portions(pairs: &[RoutedRow], limit: usize) -> Vec<&[RoutedRow]> {
    let mut portions = Vec::new();
    let (mut start, mut end) = (0, 0);
    for group in pairs.chunk_by(|a, b| a.expert == b.expert) {
        if end + group.len() - start > limit && end > start {
            portions.push(&pairs[start..end]);
            start = end;
        }
        end += group.len();
        while end - start > limit {
            portions.push(&pairs[start..start + limit]);
            start += limit;
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
    fn portions_are_bounded_and_cut_experts_only_if_necessary() {
        let lengths = |counts: &[usize], limit| -> Vec<usize> {
            let pairs = pairs(counts);
            let portions = portions(&pairs, limit);
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
    fn pairs_are_grouped_by_expert_in_request_order() {
        let first = Work { counts: vec![2, 1], experts: vec![5, 1, 5], ..Work::default() };
        let second = Work { counts: vec![1, 1], experts: vec![1, 5], ..Work::default() };
        let found: Vec<_> = pairs_by_expert(&[&first, &second])
            .into_iter()
            .map(|pair| (pair.expert, pair.request, pair.row, pair.slot))
            .collect();
        assert_eq!(found, [(1, 0, 0, 1), (1, 1, 0, 0), (5, 0, 0, 0), (5, 0, 1, 2), (5, 1, 1, 1)]);
    }
}
