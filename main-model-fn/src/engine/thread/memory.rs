//! Shortage of device memory: one request gives way, fewer run together, and the limits rise again step by step.

use super::super::active_request::ActiveRequest;
use super::super::iteration_rows::RowShare;
use super::Engine;
use crate::transformer::ForwardError;
use remoe_proto::ServiceError;

/// Number of forwards in a row with enough memory after which more requests may run together again. A limit that rises
/// too early costs one preemption, so less than one forward in a hundred is computed twice.
const RECOVERY_FORWARDS: u32 = 256;

/// Limits on what runs together: lowered if device memory is short, since other processes may use the device as well.
#[derive(Debug)]
pub(super) struct MemoryLimits {
    configured_batch: usize,
    max_batch: usize,
    joins_prompts: bool,
    /// Forwards since the last change.
    forwards: u32,
}

impl MemoryLimits {
    /// Limits of a device that was never short of memory, for `max_batch` sequences.
    pub(super) fn new(max_batch: usize) -> Self {
        Self { configured_batch: max_batch, max_batch, joins_prompts: true, forwards: 0 }
    }

    /// Number of sequences that may run together.
    pub(super) fn max_batch(&self) -> usize {
        self.max_batch
    }

    /// Reports if several prompts may share a prefill.
    pub(super) fn joins_prompts(&self) -> bool {
        self.joins_prompts
    }

    /// Separates prompts; reports if they shared prefills until now.
    fn separate_prompts(&mut self) -> bool {
        self.forwards = 0;
        std::mem::take(&mut self.joins_prompts)
    }

    /// Lowers the batch to `sequences`, at least one.
    fn lower_batch(&mut self, sequences: usize) {
        self.forwards = 0;
        self.max_batch = self.max_batch.min(sequences.max(1));
    }

    /// Counts a forward that had enough memory. After [`RECOVERY_FORWARDS`] of them, raises the batch by a quarter and
    /// lets prompts share prefills again.
    pub(super) fn count_forward(&mut self) {
        if self.joins_prompts && self.max_batch == self.configured_batch {
            return;
        }
        self.forwards += 1;
        if self.forwards == RECOVERY_FORWARDS {
            self.forwards = 0;
            self.joins_prompts = true;
            self.max_batch = self.configured_batch.min(self.max_batch + (self.max_batch / 4).max(1));
        }
    }
}

impl Engine {
    /// Makes the next forward smaller, after a forward of the requests with `shares` that ran out of device memory. The
    /// failed forward changed nothing.
    ///
    /// Prompts that shared a prefill are separated. If a single prompt does not fit, the newest request without a token
    /// is refused. If a batch of decoding sequences does not fit, the newest is preempted and the batch is limited to the
    /// others. A request fails after its first token only if nothing else runs.
    pub(super) fn handle_out_of_memory(&mut self, shares: &[RowShare], error: ForwardError) {
        let takes_part = |index: &usize| shares.get(*index).is_some_and(|share| share.rows > 0);
        let participants: Vec<usize> = (0..self.running.len()).filter(takes_part).collect();
        let Some(&newest) = participants.last() else { return };
        self.metrics.out_of_memory.inc();
        tracing::warn!(%error, running = self.running.len(), "device memory exhausted: one request gives way");
        let is_new = |index: &usize| !self.running[*index].has_answered();
        let is_prefill = participants.iter().any(|index| !self.running[*index].decodes());
        if is_prefill && participants.len() > 1 && self.memory_limits.separate_prompts() {
            return;
        }
        let refused = match is_prefill || participants.len() == 1 {
            true => participants.iter().copied().rev().find(is_new).or_else(|| self.newest_prefill()),
            false => None,
        };
        match refused {
            Some(index) => self.take_out(index).fail(ServiceError::from(error)),
            None if self.running.len() > 1 => {
                self.preempt(newest);
                let sequences = self.running.iter().map(|running| running.request().choices).sum();
                self.memory_limits.lower_batch(sequences);
            }
            None => self.take_out(newest).fail(ServiceError::from(error)),
        }
    }

    /// The newest request without a token whose prefill is under way: it holds memory between its steps.
    fn newest_prefill(&self) -> Option<usize> {
        let is_prefill = |running: &ActiveRequest| running.prefill.is_some() && !running.has_answered();
        self.running.iter().rposition(is_prefill)
    }
}

#[cfg(test)]
mod tests {
    use super::{MemoryLimits, RECOVERY_FORWARDS};

    fn count(limits: &mut MemoryLimits, forwards: u32) {
        (0..forwards).for_each(|_| limits.count_forward());
    }

    #[test]
    fn lowered_batch_rises_to_its_setting_and_not_above() {
        let mut limits = MemoryLimits::new(64);
        limits.lower_batch(5);
        let mut seen = vec![limits.max_batch()];
        for _ in 0..20 {
            count(&mut limits, RECOVERY_FORWARDS - 1);
            assert_eq!(Some(&limits.max_batch()), seen.last());
            count(&mut limits, 1);
            seen.push(limits.max_batch());
        }
        assert!(seen.is_sorted() && seen[1] > seen[0], "{seen:?}");
        assert_eq!(seen.last(), Some(&64));
    }

    #[test]
    fn new_shortage_restarts_the_recovery() {
        let mut limits = MemoryLimits::new(8);
        limits.lower_batch(0);
        assert_eq!(limits.max_batch(), 1, "one sequence may always run");
        count(&mut limits, RECOVERY_FORWARDS - 1);
        limits.lower_batch(4);
        assert_eq!(limits.max_batch(), 1, "a shortage never raises the batch");
        count(&mut limits, RECOVERY_FORWARDS - 1);
        assert_eq!(limits.max_batch(), 1);
        count(&mut limits, 1);
        assert_eq!(limits.max_batch(), 2);
    }

    #[test]
    fn separated_prompts_share_prefills_again_after_recovery() {
        let mut limits = MemoryLimits::new(8);
        assert!(limits.separate_prompts());
        assert!(!limits.separate_prompts(), "they were separate already");
        count(&mut limits, RECOVERY_FORWARDS);
        assert!(limits.joins_prompts());
        assert_eq!(limits.max_batch(), 8);
    }
}
