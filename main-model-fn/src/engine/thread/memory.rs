//! Device memory that runs out: one request gives way, and the others go on.

use super::super::sequence::{ActiveRequest, RowShare};
use super::Engine;
use crate::transformer::ForwardError;
use remoe_proto::ServiceError;

impl Engine {
    /// After a forward of the requests with `shares` that the device had no room for, which has changed nothing. One
    /// request gives way, so that the forward is smaller when it is done again. The newest without a token is refused,
    /// of this forward or of a prefill, which holds memory between its steps. If all have answered, the newest is
    /// preempted, and no more sequences run together than are left then. Only one that is alone fails after a token.
    pub(super) fn relieve(&mut self, shares: &[RowShare], error: ForwardError) {
        let takes_part = |index: &usize| shares.get(*index).is_some_and(|share| share.rows > 0);
        let is_new = |index: &usize| !self.running[*index].has_answered();
        let all = 0..self.running.len();
        let new = all.clone().rev().find(|index| takes_part(index) && is_new(index));
        let new = new
            .or_else(|| all.clone().rev().find(|index| is_new(index) && self.running[*index].pass.is_some()));
        self.metrics.out_of_memory.inc();
        tracing::warn!(%error, running = self.running.len(), "device memory exhausted: one request gives way");
        if let Some(index) = new {
            return self.take_out(index).fail(ServiceError::from(error));
        }
        let participants = all.clone().filter(takes_part).count();
        match all.rev().find(takes_part) {
            Some(index) if participants > 1 => {
                self.preempt(index);
                let sequences: usize = self.running.iter().map(sequences_of).sum();
                self.settings.max_batch = self.settings.max_batch.min(sequences.max(1));
            }
            Some(index) => self.take_out(index).fail(ServiceError::from(error)),
            None => {}
        }
    }
}

fn sequences_of(running: &ActiveRequest) -> usize {
    running.request().choices
}
