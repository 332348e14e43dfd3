//! Table of routing generations, and its stored copy.

use super::names;
use super::ownership::owned_meta;
use super::planning::counted;
pub(crate) use remoe_api::{Generation, RoutedPod};
use remoe_api::{MoEDeployment, MoERecord, MoERecordSpec};
use std::collections::BTreeMap;

/// Upper bound of generation numbers: 64 times the largest step that a main function accepts, so that a new main
/// function can catch up. Higher numbers are rejected wherever they appear: main functions that report one are
/// replaced, and counting starts over.
pub(crate) const MAX_GENERATION: u64 = 1 << 38;

/// Current routing generation of each main-function specification, by its identity. There are two entries while a new
/// specification replaces an old one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RoutingTable {
    /// Generation by identity of the main functions.
    pub entries: BTreeMap<String, Generation>,
    /// Set if the stored copy had invalid entries, so that higher numbers may be in use.
    pub corrupted: bool,
}

impl RoutingTable {
    /// Reads the stored copy.
    pub(crate) fn from_record(record: &MoERecord) -> Self {
        let entries = record.spec.generations.iter();
        Self::valid_entries(
            entries.map(|(identity, generation)| (identity.as_str(), Some(generation.clone()))),
        )
    }

    /// Keeps the valid generations of `entries`. Entries corrupted by another writer are dropped and decided again.
    pub(super) fn valid_entries<'a>(entries: impl Iterator<Item = (&'a str, Option<Generation>)>) -> Self {
        let mut table = Self::default();
        for (identity, read) in entries {
            // The last number is invalid because none could follow it.
            match read.filter(|read| read.number < MAX_GENERATION - 1) {
                Some(generation) => {
                    table.entries.insert(identity.to_owned(), generation);
                }
                None => table.corrupted = true,
            }
        }
        table
    }

    /// Returns the stored copy.
    pub(crate) fn record(&self, owner: &MoEDeployment) -> MoERecord {
        let newest = self.entries.values().max_by_key(|generation| generation.number);
        let summary = newest.map_or_else(
            || "no generation in force".to_owned(),
            |Generation { number, plan, endpoints, .. }| {
                let remote = counted(endpoints.len(), "remote function");
                format!("generation {number} of plan {plan}, {remote}")
            },
        );
        let spec = MoERecordSpec::told(self.entries.clone(), &summary);
        MoERecord { metadata: owned_meta(owner, names::routing_record), spec }
    }

    /// Returns the highest number.
    pub(crate) fn newest(&self) -> u64 {
        self.entries.values().map(|generation| generation.number).max().unwrap_or(0)
    }

    /// Returns whether any generation routes to `pod`.
    pub(crate) fn routes_to(&self, pod: &str) -> bool {
        let endpoints = self.entries.values().flat_map(|generation| &generation.endpoints);
        endpoints.into_iter().any(|routed| routed.pod == pod)
    }
}
