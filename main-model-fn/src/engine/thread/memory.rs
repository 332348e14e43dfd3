//! Device memory that runs out: one request gives way, and the others go on.

use super::super::active_request::ActiveRequest;
use super::super::iteration_rows::RowShare;
use super::Engine;
use crate::transformer::ForwardError;
use remoe_proto::ServiceError;

impl Engine {
    /// Makes the next forward smaller, after one of the requests with `shares` that the device had no room for and that
    /// has changed nothing.
    ///
    /// Prompts that went together go alone from then on. A prompt that is alone is refused, the newest without a token
    /// first. Of sequences that decode, the newest is preempted, and no more run together than are left then. A request
    /// fails after its first token only if nothing else runs.
    pub(super) fn relieve(&mut self, shares: &[RowShare], error: ForwardError) {
        let takes_part = |index: &usize| shares.get(*index).is_some_and(|share| share.rows > 0);
        let participants: Vec<usize> = (0..self.running.len()).filter(takes_part).collect();
        let Some(&newest) = participants.last() else { return };
        self.metrics.out_of_memory.inc();
        tracing::warn!(%error, running = self.running.len(), "device memory exhausted: one request gives way");
        let is_new = |index: &usize| !self.running[*index].has_answered();
        let is_prefill = participants.iter().any(|index| !self.running[*index].decodes());
        if is_prefill && participants.len() > 1 && std::mem::take(&mut self.joins_prompts) {
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
                let sequences: usize = self.running.iter().map(|running| running.request().choices).sum();
                self.settings.max_batch = self.settings.max_batch.min(sequences.max(1));
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
