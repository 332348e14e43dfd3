//! Placements for tests: sets of remote experts, and the calls that follow from them.

use remoe_model::Checkpoint;
use remoe_proto::format_listing;
use remoe_proto::v1::{ExpertCalls, InspectReply, LayerExperts};

/// Returns the last floor(ratio x experts + 0.5) experts of every layer.
#[must_use]
pub fn remote_sets(checkpoint: &Checkpoint, ratio: f64) -> Vec<LayerExperts> {
    let config = checkpoint.config();
    let layers = config.moe_layers().into_iter();
    layers
        .map(|layer| {
            let experts = config.moe(layer).expect("the layer has experts").experts as u32;
            let remote = (ratio * f64::from(experts) + 0.5).floor() as u32;
            LayerExperts { layer: layer as u32, experts: (experts - remote..experts).collect() }
        })
        .filter(|set| !set.experts.is_empty())
        .collect()
}

/// Distributes the experts of each layer round-robin among `groups` groups. Omits empty groups.
#[must_use]
pub fn dealt(remote: &[LayerExperts], groups: usize) -> Vec<Vec<LayerExperts>> {
    let group = |index: usize| -> Vec<LayerExperts> {
        let sets = remote.iter().map(|set| LayerExperts {
            layer: set.layer,
            experts: set.experts.iter().skip(index).step_by(groups).copied().collect(),
        });
        sets.filter(|set| !set.experts.is_empty()).collect()
    };
    (0..groups).map(group).filter(|sets| !sets.is_empty()).collect()
}

/// Returns the listing of all experts for a remote function's command line.
#[must_use]
pub fn all_experts(checkpoint: &Checkpoint) -> String {
    format_listing(&remote_sets(checkpoint, 1.0))
}

/// Returns the number of (token, expert) pairs per forwarded position.
#[must_use]
pub fn pairs_per_position(checkpoint: &Checkpoint) -> u64 {
    let config = checkpoint.config();
    let layers = config.moe_layers().into_iter();
    layers.map(|layer| config.moe(layer).expect("the layer has experts").top_k as u64).sum()
}

/// Returns the local and remote calls that the routing in an inspection requires.
#[must_use]
pub fn calls_of(reply: &InspectReply, remote: &[LayerExperts]) -> ExpertCalls {
    let mut calls = ExpertCalls::default();
    for layer in &reply.routing {
        let set = remote.iter().find(|set| set.layer == layer.layer);
        let experts = layer.tokens.iter().flat_map(|token| &token.experts);
        for expert in experts {
            let is_remote = set.is_some_and(|set| set.experts.contains(expert));
            *(if is_remote { &mut calls.remote } else { &mut calls.local }) += 1;
        }
    }
    calls
}
