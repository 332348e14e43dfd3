//! Start order of remote functions: those that requests need most come first. Pure.

use crate::launcher::FunctionSpec;
use crate::placement::MoeLayer;
use remoe_process::Role;
use remoe_proto::v1::LayerExperts;
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// Need for a remote function. The smallest one starts first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReplicaNeed<'a> {
    /// Number of functions with the same experts that start before it: one of each group suffices to serve.
    pub replica: u32,
    /// Share of requests' (token, expert) pairs on its experts, summed over layers.
    pub work: f64,
    /// Name of the function.
    pub name: &'a str,
}

impl ReplicaNeed<'_> {
    /// Compares two needs: first replicas come before second ones, then by work, then by name.
    #[must_use]
    pub fn order(&self, other: &Self) -> Ordering {
        let work = || other.work.total_cmp(&self.work);
        self.replica.cmp(&other.replica).then_with(work).then_with(|| self.name.cmp(other.name))
    }
}

/// Returns the share of each layer's pairs on `hosted`, summed over layers. `usage` has a row of shares for each
/// index in `layers`. Unknown experts count as 0.
#[must_use]
pub fn work(hosted: &[LayerExperts], layers: &[u32], usage: &[Vec<f64>]) -> f64 {
    let rows: BTreeMap<u32, &Vec<f64>> = layers.iter().copied().zip(usage).collect();
    let of_set = |set: &LayerExperts| -> f64 {
        let row = rows.get(&set.layer).map_or(&[][..], |row| row.as_slice());
        set.experts.iter().filter_map(|expert| row.get(*expert as usize)).sum()
    };
    hosted.iter().map(of_set).sum()
}

/// (token, expert) pairs that requests are expected to have.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpectedPairs {
    layers: Vec<u32>,
    pairs: Vec<Vec<f64>>,
}

impl ExpectedPairs {
    /// Creates the expectation of `pairs` pairs in each layer of `layers` (layer indices), distributed by the rows of
    /// `usage`.
    #[must_use]
    pub fn new(layers: Vec<u32>, mut usage: Vec<Vec<f64>>, pairs: f64) -> Self {
        usage.iter_mut().flatten().for_each(|share| *share *= pairs);
        Self { layers, pairs: usage }
    }

    /// Returns whether at least one expected pair is on `hosted`, which justifies starting its function in advance.
    #[must_use]
    pub fn is_on(&self, hosted: &[LayerExperts]) -> bool {
        work(hosted, &self.layers, &self.pairs) >= 1.0
    }
}

/// Sorts the remote functions among `functions` by how much requests with expert usage `usage` need them
/// ([layers][experts] by position in `layers`). Main functions come first.
pub fn by_need(functions: &mut Vec<FunctionSpec>, layers: &[MoeLayer], usage: &[Vec<f64>]) {
    let ids: Vec<u32> = layers.iter().map(|moe| moe.layer).collect();
    let (mut sorted, remote): (Vec<_>, Vec<_>) =
        functions.drain(..).partition(|function| function.role == Role::Main);
    let mut needs: Vec<(ReplicaNeed<'_>, &FunctionSpec)> = Vec::new();
    for function in &remote {
        let before = needs.iter().filter(|(_, other)| other.hosted == function.hosted).count();
        let replica = u32::try_from(before).unwrap_or(u32::MAX);
        let work = work(&function.hosted, &ids, usage);
        needs.push((ReplicaNeed { replica, work, name: &function.name }, function));
    }
    needs.sort_by(|(one, _), (other, _)| one.order(other));
    sorted.extend(needs.into_iter().map(|(_, function)| function.clone()));
    *functions = sorted;
}
