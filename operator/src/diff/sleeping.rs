//! Asleep as what is to be: no function runs.

use super::{Diff, DiffInput, LATER};
use crate::routing::RoutingTable;
use crate::write::{Deletion, Write};

impl Diff {
    /// Ends all functions. Once no main function is left, no generation is in force any more: the next wake starts with
    /// an empty routing table. The plan that ran stays the deployment's.
    pub(super) fn sleep(
        &mut self,
        scene: DiffInput<'_>,
        table: RoutingTable,
    ) -> Result<(), serde_json::Error> {
        let now = scene.inputs.observed.now;
        let owned = || scene.scaled.pods.iter().filter(|pod| pod.owned);
        // On a node that is lost, a pod is listed for ever.
        let left = owned().filter(|pod| pod.ends_by.is_none_or(|end| now < end)).count();
        let has_main = owned().any(|pod| pod.is_main);
        let ending = owned().filter(|pod| pod.ends_by.is_none()).map(|pod| {
            Write::Delete(Deletion { name: pod.name.to_string(), uid: pod.uid.clone(), grace_seconds: None })
        });
        let ending: Vec<Write> = ending.collect();
        self.writes.extend(ending);
        let table = if has_main { table } else { RoutingTable::default() };
        if !table.corrupted && scene.inputs.observed.has_routing(scene.inputs.owner) {
            let there: Vec<_> = scene.inputs.observed.routing.iter().cloned().collect();
            self.keep(scene, table.record(scene.inputs.owner), &there, Write::Routing);
        }
        self.settled = left == 0;
        if !self.settled {
            self.requeue_within(LATER);
        }
        Ok(())
    }
}
