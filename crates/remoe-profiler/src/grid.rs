//! Grid of measured points: vCPUs and token counts, and the tables over them.

use remoe_hardware::STEP_ROWS;
use remoe_planner::CpuProfile;

/// Usual step between sizes of functions, in vCPUs.
const VCPU_STEP: f64 = 0.1;
/// Context in tokens whose attention time exceeds the noise of measurements.
const LONG_PROMPT_TOKENS: usize = 2048;
/// Token positions reserved for decoding after a prompt.
const RESERVED_TOKENS: usize = 64;

/// vCPUs and token counts of a profile.
pub(crate) struct Grid {
    /// CPU cores available to a function.
    pub(crate) cores: u32,
    /// vCPUs, ascending.
    vcpus: Vec<f64>,
    /// Tokens per expert, ascending from 1.
    pub(crate) tokens: Vec<f64>,
    /// Batch sizes of decode steps, ascending; more than one, and fewer than the tokens of any prompt.
    pub(crate) rows: Vec<usize>,
    /// Prompt lengths in tokens, ascending.
    pub(crate) prompts: Vec<usize>,
    /// Length in tokens of the prompt after which decode steps show the cost of context; at least the longest of
    /// `prompts`.
    pub(crate) long_prompt: usize,
}

impl Grid {
    /// Creates the grid for a machine with `cores`; a coarser one with `quick`. No prompt is longer than `context`
    /// tokens.
    pub(crate) fn new(cores: u32, quick: bool, context: usize) -> Self {
        let below: &[f64] = if quick { &[0.25] } else { &[0.1, 0.2, 0.4, 0.7] };
        let mut vcpus = below.to_vec();
        let mut next = 1;
        while next < cores {
            vcpus.push(f64::from(next));
            next *= 2;
        }
        vcpus.push(f64::from(cores));
        let tokens: &[f64] =
            if quick { &[1.0, 2.0, 16.0, 128.0] } else { &[1.0, 2.0, 4.0, 16.0, 64.0, 256.0] };
        let rows: &[usize] = if quick { &[4, STEP_ROWS] } else { &[2, 4, STEP_ROWS] };
        let prompts: &[usize] = if quick { &[32, 256] } else { &[16, 64, 256, 512] };
        let fitting = prompts.iter().copied().filter(|tokens| tokens + RESERVED_TOKENS <= context);
        let mut prompts: Vec<usize> = fitting.collect();
        if prompts.is_empty() {
            prompts.push((context / 2).max(2));
        }
        let shortest = prompts.iter().copied().min().unwrap_or(1);
        let rows = rows.iter().copied().filter(|rows| *rows < shortest).collect();
        let longest = prompts.iter().copied().max().unwrap_or(1);
        let long_prompt = LONG_PROMPT_TOKENS.min(context.saturating_sub(RESERVED_TOKENS)).max(longest);
        Self { cores, vcpus, tokens: tokens.to_vec(), rows, prompts, long_prompt }
    }

    /// Returns the maximum number of threads of a function.
    pub(crate) fn threads(&self) -> usize {
        self.cores as usize
    }

    /// Returns the measured vCPUs for each number of threads; those below one only if `below_one` is set.
    pub(crate) fn by_threads(&self, below_one: bool) -> Vec<(usize, Vec<f64>)> {
        let mut groups: Vec<(usize, Vec<f64>)> = Vec::new();
        for &vcpus in self.vcpus.iter().filter(|vcpus| below_one || **vcpus >= 1.0) {
            let threads = vcpus.ceil() as usize;
            match groups.last_mut().filter(|(known, _)| *known == threads) {
                Some((_, group)) => group.push(vcpus),
                None => groups.push((threads, vec![vcpus])),
            }
        }
        groups
    }

    /// Builds a table of `columns`, one per measured number of vCPUs. Without measurements below one vCPU, those
    /// columns are the one for one vCPU, divided by the vCPUs.
    pub(crate) fn table(&self, tokens: Vec<f64>, columns: &[Vec<f64>], below_one: bool) -> CpuProfile {
        let unmeasured = self.vcpus.len() - columns.len();
        let scaled = self.vcpus[..unmeasured].iter().map(|vcpus| {
            let one = columns.first().map_or(&[][..], Vec::as_slice);
            one.iter().map(|seconds| seconds / vcpus).collect::<Vec<f64>>()
        });
        debug_assert!(!below_one || unmeasured == 0, "every number of vCPUs is measured");
        let measured = scaled.chain(columns.iter().cloned()).zip(&self.vcpus);
        let mut vcpus: Vec<f64> = Vec::new();
        let mut columns: Vec<Vec<f64>> = Vec::new();
        for (column, &at) in measured {
            // A function has one thread per whole vCPU: a fraction of another one gains nothing.
            if let Some(last) = columns.last().filter(|_| at > 1.0) {
                columns.push(last.clone());
                vcpus.push(at - VCPU_STEP);
            }
            columns.push(column);
            vcpus.push(at);
        }
        let seconds = (0..tokens.len()).map(|row| columns.iter().map(|column| column[row]).collect());
        CpuProfile { vcpus, seconds: seconds.collect(), tokens }
    }
}

/// Returns the median; 0 if there are no values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        count if count % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_follow_vcpus() {
        let grid = Grid::new(6, true, 4096);
        assert_eq!(
            grid.by_threads(true),
            [(1, vec![0.25, 1.0]), (2, vec![2.0]), (4, vec![4.0]), (6, vec![6.0])]
        );
        assert_eq!(grid.by_threads(false)[0], (1, vec![1.0]));
        assert_eq!(Grid::new(1, true, 4096).by_threads(true), [(1, vec![0.25, 1.0])]);
    }

    #[test]
    fn without_quotas_a_share_of_a_vcpu_takes_as_many_times_longer() {
        let grid = Grid::new(2, true, 4096);
        let table = grid.table(vec![1.0, 16.0], &[vec![2.0, 8.0], vec![1.0, 4.0]], false);
        assert_eq!(table.vcpus, [0.25, 1.0, 1.9, 2.0]);
        assert_eq!(table.seconds, [[8.0, 2.0, 2.0, 1.0], [32.0, 8.0, 8.0, 4.0]]);
    }

    #[test]
    fn prompts_fit_the_context() {
        assert_eq!(Grid::new(2, true, 4096).long_prompt, 2048);
        assert_eq!(Grid::new(2, true, 1000).long_prompt, 936);
        assert_eq!(Grid::new(2, true, 40).long_prompt, 20);
        assert_eq!(Grid::new(2, true, 128).prompts, [32]);
        assert_eq!(Grid::new(2, true, 40).prompts, [20]);
        // Every prompt is longer than any batch, since one table holds both.
        assert_eq!(Grid::new(2, true, 4096).rows, [4, 8]);
        assert_eq!(Grid::new(2, true, 10).rows, [4]);
    }
}
