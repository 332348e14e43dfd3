//! Sleep groups: remote functions that sleep and wake together, and the usage of their experts. Pure.

use crate::launcher::FunctionSpec;
use remoe_process::Role;
use remoe_proto::v1::{LayerExperts, LayerPairs};
use std::collections::{BTreeMap, BTreeSet};

/// Remote functions that sleep and wake together; no other function hosts any of their experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SleepGroup {
    /// Slots of the functions.
    pub places: Vec<String>,
    /// Hosted experts, layers and experts ascending.
    pub hosted: Vec<LayerExperts>,
}

/// Set of (layer, expert) pairs.
type ExpertSet = BTreeSet<(u32, u32)>;

/// Returns the groups among `functions`, in the order of their first functions. Replicas are in one group, and so are
/// functions that only share some experts: requests for the shared experts can go to any of them.
#[must_use]
pub fn groups(functions: &[FunctionSpec]) -> Vec<SleepGroup> {
    let mut groups: Vec<(Vec<String>, ExpertSet)> = Vec::new();
    for function in functions.iter().filter(|function| function.role == Role::Remote) {
        let hosted: ExpertSet = pairs_of(&function.hosted).collect();
        let (mut joined, others): (Vec<_>, Vec<_>) =
            groups.into_iter().partition(|(_, experts)| !experts.is_disjoint(&hosted));
        joined.push((vec![function.name.clone()], hosted));
        groups = others;
        let places = joined.iter().flat_map(|(places, _)| places.clone()).collect();
        groups.push((places, joined.into_iter().flat_map(|(_, experts)| experts).collect()));
    }
    let order = |places: &[String]| functions.iter().position(|function| places.contains(&function.name));
    groups.sort_by_key(|(places, _)| order(places));
    let listed = groups.into_iter().map(|(places, experts)| SleepGroup { places, hosted: listing(experts) });
    listed.collect()
}

fn pairs_of(hosted: &[LayerExperts]) -> impl Iterator<Item = (u32, u32)> {
    hosted.iter().flat_map(|set| set.experts.iter().map(|expert| (set.layer, *expert)))
}

fn listing(experts: ExpertSet) -> Vec<LayerExperts> {
    let mut layers: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (layer, expert) in experts {
        layers.entry(layer).or_default().push(expert);
    }
    layers.into_iter().map(|(layer, experts)| LayerExperts { layer, experts }).collect()
}

/// Expert usage that main functions have reported so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReportedUsage {
    /// (token, expert) pairs by main function, layer and expert.
    mains: BTreeMap<String, BTreeMap<(u32, u32), u64>>,
}

/// (token, expert) pairs by layer and expert.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExpertUses(BTreeMap<(u32, u32), u64>);

impl ReportedUsage {
    /// Records the counts of the main function `main` since its start, and returns the new ones. If a count
    /// decreased, the main function has restarted. For an unknown main function, all counts are new if it is `young`
    /// (started since the last poll of the others), and none otherwise.
    pub fn note(&mut self, main: &str, said: &[LayerPairs], young: bool) -> ExpertUses {
        let listed = said.iter().flat_map(|of| {
            of.experts.iter().zip(&of.pairs).map(|(expert, pairs)| ((of.layer, *expert), *pairs))
        });
        let counted: BTreeMap<(u32, u32), u64> = listed.collect();
        let baseline = || if young { BTreeMap::new() } else { counted.clone() };
        let known = self.mains.entry(main.to_owned()).or_insert_with(baseline);
        // Experts that are no longer remote are not listed, which is no decrease.
        let is_anew = counted.iter().any(|(expert, pairs)| known.get(expert) > Some(pairs));
        if is_anew {
            known.clear();
        }
        let new = counted
            .iter()
            .map(|(expert, pairs)| (*expert, pairs.saturating_sub(known.get(expert).copied().unwrap_or(0))));
        let new = new.filter(|(_, pairs)| *pairs > 0).collect();
        known.extend(counted);
        ExpertUses(new)
    }

    /// Forgets main functions for which `stays` is false.
    pub fn keep(&mut self, stays: impl Fn(&str) -> bool) {
        self.mains.retain(|main, _| stays(main));
    }
}

impl ExpertUses {
    /// Returns the number of pairs on the experts `hosted`.
    #[must_use]
    pub fn of(&self, hosted: &[LayerExperts]) -> u64 {
        pairs_of(hosted)
            .filter_map(|expert| self.0.get(&expert))
            .fold(0, |sum, pairs| sum.saturating_add(*pairs))
    }

    /// Adds the pairs of `other`.
    pub fn add(&mut self, other: &Self) {
        for (expert, pairs) in &other.0 {
            let sum = self.0.entry(*expert).or_default();
            *sum = sum.saturating_add(*pairs);
        }
    }
}
