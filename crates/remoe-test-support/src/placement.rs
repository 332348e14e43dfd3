//! Which experts are remote, and what follows from it.

use remoe_model::Checkpoint;
use remoe_proto::format_listing;
use remoe_proto::v1::{ExpertCalls, InspectReply, LayerExperts};

/// The last floor(ratio x experts + 0.5) experts of every layer of `checkpoint`.
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

/// The sets dealt to `groups` groups in turn, layer by layer; groups that get nothing are left out.
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

/// Every expert, as a remote function's command line names them.
#[must_use]
pub fn all_experts(checkpoint: &Checkpoint) -> String {
    format_listing(&remote_sets(checkpoint, 1.0))
}

/// (token, expert) pairs that one forwarded position causes.
#[must_use]
pub fn pairs_per_position(checkpoint: &Checkpoint) -> u64 {
    let config = checkpoint.config();
    let layers = config.moe_layers().into_iter();
    layers.map(|layer| config.moe(layer).expect("the layer has experts").top_k as u64).sum()
}

/// Where the experts of an inspected prompt had to be computed, by the routing in the reply.
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
