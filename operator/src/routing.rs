//! Routing generations: what main functions are told, and the durable copy of it.

use super::names;
use super::ownership::owned_meta;
use super::planning::counted;
pub(crate) use remoe_api::{Generation, RoutedPod};
use remoe_api::{MoEDeployment, MoERecord, MoERecordSpec};
use std::collections::BTreeMap;

/// Numbers are counted up to here: 64 times what a main function takes in one step, so that one that has just started
/// can be brought there. Numbers from here on are not believed, wherever they stand: main functions that have one are
/// replaced, and counting starts over.
pub(crate) const MOST_GENERATIONS: u64 = 1 << 38;

/// The generations in force or on their way there, by the identity of the main functions that they are
/// for. Two while main functions of a new shape take over from those of an old one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RoutingTable {
    /// One generation per shape.
    pub entries: BTreeMap<String, Generation>,
    /// Set if the durable copy had more that could not be believed: numbers beyond these may be in use.
    pub corrupted: bool,
}

impl RoutingTable {
    /// Reads the durable copy.
    pub(crate) fn from_record(record: &MoERecord) -> Self {
        let entries = record.spec.generations.iter();
        Self::believed(entries.map(|(identity, generation)| (identity.as_str(), Some(generation.clone()))))
    }

    /// Returns the generations of `entries` that can be believed. Those that another writer spoiled are left out, and
    /// decided again.
    pub(super) fn believed<'a>(entries: impl Iterator<Item = (&'a str, Option<Generation>)>) -> Self {
        let mut table = Self::default();
        for (identity, read) in entries {
            // The last one is none: nothing could follow it.
            match read.filter(|read| read.number < MOST_GENERATIONS - 1) {
                Some(generation) => {
                    table.entries.insert(identity.to_owned(), generation);
                }
                None => table.corrupted = true,
            }
        }
        table
    }

    /// The durable copy.
    pub(crate) fn record(&self, owner: &MoEDeployment) -> MoERecord {
        let newest = self.entries.values().max_by_key(|generation| generation.number);
        let about = newest.map_or_else(
            || "no generation in force".to_owned(),
            |Generation { number, plan, endpoints, .. }| {
                let remote = counted(endpoints.len(), "remote function");
                format!("generation {number} of plan {plan}, {remote}")
            },
        );
        let spec = MoERecordSpec::told(self.entries.clone(), &about);
        MoERecord { metadata: owned_meta(owner, names::routing_record), spec }
    }

    /// The largest number so far.
    pub(crate) fn newest(&self) -> u64 {
        self.entries.values().map(|generation| generation.number).max().unwrap_or(0)
    }

    /// Reports if any generation leads to the pod.
    pub(crate) fn leads_to(&self, pod: &str) -> bool {
        let endpoints = self.entries.values().flat_map(|generation| &generation.endpoints);
        endpoints.into_iter().any(|routed| routed.pod == pod)
    }
}
