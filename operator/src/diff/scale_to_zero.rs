//! Writes that scale a deployment to zero.

use super::{Diff, DiffInput, PROGRESS_INTERVAL};
use crate::routing::RoutingTable;
use crate::write::{Deletion, Write};

impl Diff {
    /// Deletes all functions. When no main function is left, the routing table is cleared, so that the next wake
    /// starts with an empty one. The deployment keeps its plan.
    pub(super) fn scale_to_zero(
        &mut self,
        stages: DiffInput<'_>,
        table: RoutingTable,
    ) -> Result<(), serde_json::Error> {
        let now = stages.inputs.observed.now;
        let owned = || stages.scaled.pods.iter().filter(|pod| pod.owned);
        // On a lost node, a pod stays listed forever.
        let remaining = owned().filter(|pod| pod.ends_by.is_none_or(|end| now < end)).count();
        let has_main = owned().any(|pod| pod.is_main);
        let deletions = owned().filter(|pod| pod.ends_by.is_none()).map(|pod| {
            Write::Delete(Deletion { name: pod.name.to_string(), uid: pod.uid.clone(), grace_seconds: None })
        });
        let deletions: Vec<Write> = deletions.collect();
        self.writes.extend(deletions);
        let table = if has_main { table } else { RoutingTable::default() };
        if !table.corrupted && stages.inputs.observed.has_routing(stages.inputs.owner) {
            let existing: Vec<_> = stages.inputs.observed.routing.iter().cloned().collect();
            self.write_if_changed(stages, table.record(stages.inputs.owner), &existing, Write::Routing);
        }
        self.settled = remaining == 0;
        if !self.settled {
            self.requeue_within(PROGRESS_INTERVAL);
        }
        Ok(())
    }
}
