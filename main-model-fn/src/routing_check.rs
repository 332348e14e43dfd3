//! Routing, checked against the model: the remote sets, and which of them each endpoint hosts. Pure.

use remoe_model::ModelConfig;
use remoe_proto::v1::{Endpoint, LayerExperts, Routing};
use remoe_proto::{MAX_ENDPOINTS, ServiceError};
use std::collections::{BTreeMap, BTreeSet};

/// The remote experts of each layer.
pub(crate) type RemoteSets = BTreeMap<usize, BTreeSet<u32>>;

/// Every endpoint's address and what it is to serve: layers and experts ascending, no set empty.
pub(crate) type EndpointSets = Vec<(String, Vec<LayerExperts>)>;

/// More (endpoint, expert) pairs than any deployment has: a placement is kept per endpoint, and a short
/// message can name many endpoints and many experts.
const MAX_HOSTED: usize = 1 << 22;

/// The remote sets of a placement and what each endpoint hosts of them, checked against the model.
///
/// An endpoint that names experts hosts those of them that are remote; what it has beside them does not
/// matter, and one that is left with nothing is never asked. A remote expert that no endpoint hosts is
/// computed from local loads.
///
/// # Errors
/// A layer or an expert that the model does not have, too many endpoints, or endpoints that host too much
/// together.
#[doc(hidden)]
pub fn check_routing(
    config: &ModelConfig,
    routing: &Routing,
) -> Result<(RemoteSets, EndpointSets), ServiceError> {
    let mut remote = sets(config, "remote", &routing.remote)?;
    remote.retain(|_, experts| !experts.is_empty());
    let given = routing.endpoints.len();
    if given > MAX_ENDPOINTS {
        let message = format!("expected at most {MAX_ENDPOINTS} endpoints, got {given}");
        return Err(ServiceError::invalid("endpoints", message));
    }
    let mut room = MAX_HOSTED;
    let endpoints = routing.endpoints.iter().map(|endpoint| {
        let hosted = match endpoint.experts.is_empty() {
            true => whole_layers(endpoint, &remote, &mut room)?,
            false => named_experts(config, endpoint, &remote, &mut room)?,
        };
        Ok((endpoint.address.clone(), hosted))
    });
    let endpoints = endpoints.collect::<Result<EndpointSets, ServiceError>>()?;
    Ok((remote, endpoints))
}

/// The sets of `listed`, layer by layer; the field `field` is wrong where they are not in the model.
fn sets(config: &ModelConfig, field: &str, listed: &[LayerExperts]) -> Result<RemoteSets, ServiceError> {
    let mut sets = RemoteSets::new();
    for set in listed {
        let layer = set.layer as usize;
        let Some(moe) = config.moe(layer) else {
            return Err(ServiceError::invalid(field, format!("layer {layer} has no routed experts")));
        };
        if let Some(expert) = set.experts.iter().find(|&&expert| expert as usize >= moe.experts) {
            let last = moe.experts.saturating_sub(1);
            let message = format!("invalid expert {expert} of layer {layer}: expected 0 to {last}");
            return Err(ServiceError::invalid(field, message));
        }
        sets.entry(layer).or_default().extend(&set.experts);
    }
    Ok(sets)
}

/// The remote sets of the layers that `endpoint` serves.
fn whole_layers(
    endpoint: &Endpoint,
    remote: &RemoteSets,
    room: &mut usize,
) -> Result<Vec<LayerExperts>, ServiceError> {
    let layers: BTreeSet<usize> = endpoint.layers.iter().map(|&layer| layer as usize).collect();
    let served = remote.iter().filter(|(layer, _)| layers.is_empty() || layers.contains(layer));
    served.map(|(&layer, experts)| hosted(layer, experts, room)).collect()
}

/// The experts that `endpoint` names, as far as they are remote.
fn named_experts(
    config: &ModelConfig,
    endpoint: &Endpoint,
    remote: &RemoteSets,
    room: &mut usize,
) -> Result<Vec<LayerExperts>, ServiceError> {
    let mut named = sets(config, "endpoints", &endpoint.experts)?;
    named.retain(|layer, experts| {
        experts.retain(|expert| remote.get(layer).is_some_and(|set| set.contains(expert)));
        !experts.is_empty()
    });
    named.iter().map(|(&layer, experts)| hosted(layer, experts, room)).collect()
}

/// The set, which takes its part of the `room` that there is for what endpoints host.
fn hosted(layer: usize, experts: &BTreeSet<u32>, room: &mut usize) -> Result<LayerExperts, ServiceError> {
    *room = room.checked_sub(experts.len()).ok_or_else(|| {
        let message = format!("expected at most {MAX_HOSTED} hosted experts of all endpoints together");
        ServiceError::invalid("endpoints", message)
    })?;
    Ok(LayerExperts { layer: layer as u32, experts: experts.iter().copied().collect() })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::path::Path;

    fn model(experts: u32) -> ModelConfig {
        let text = format!(r#"{{"model_type": "qwen2_moe", "num_experts": {experts}}}"#);
        ModelConfig::from_json(Path::new("config.json"), text.as_bytes()).unwrap()
    }

    fn set(layer: u32, experts: impl IntoIterator<Item = u32>) -> LayerExperts {
        LayerExperts { layer, experts: experts.into_iter().collect() }
    }

    fn routing(remote: Vec<LayerExperts>, endpoints: Vec<Endpoint>) -> Routing {
        Routing { generation: 1, remote, endpoints, ..Routing::default() }
    }

    fn hosting(experts: Vec<LayerExperts>) -> Endpoint {
        Endpoint { address: "a:1".to_owned(), layers: vec![], experts }
    }

    /// A few kilobytes that name many endpoints and many experts are not gigabytes of sets.
    #[test]
    fn endpoints_and_experts_do_not_multiply_without_bound() {
        let remote: Vec<LayerExperts> = (0..8).map(|layer| set(layer, 0..1024)).collect();
        let check = |endpoint: Endpoint, count: usize, remote: &[LayerExperts]| {
            check_routing(&model(1024), &routing(remote.to_vec(), vec![endpoint; count]))
        };
        for endpoint in [Endpoint::default(), hosting(remote.clone())] {
            let (sets, endpoints) = check(endpoint.clone(), 512, &remote).unwrap();
            assert_eq!((sets.len(), endpoints.len()), (8, 512));
            assert!(endpoints.iter().all(|(_, hosted)| *hosted == remote));
            let error = check(endpoint, 513, &remote).unwrap_err();
            assert_eq!(error.field.as_deref(), Some("endpoints"));
        }
        assert_eq!(check(Endpoint::default(), MAX_ENDPOINTS, &[]).unwrap().1.len(), MAX_ENDPOINTS);
        let error = check(Endpoint::default(), MAX_ENDPOINTS + 1, &[]).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("endpoints"));
    }

    #[test]
    fn an_endpoint_hosts_what_it_names_as_far_as_that_is_remote() {
        let hosted = |experts: Vec<LayerExperts>| {
            let remote = vec![set(1, [2, 3, 5]), set(2, [0]), set(3, [])];
            let (_, endpoints) = check_routing(&model(8), &routing(remote, vec![hosting(experts)])).unwrap();
            endpoints.into_iter().next().unwrap().1
        };
        assert_eq!(hosted(vec![]), [set(1, [2, 3, 5]), set(2, [0])], "the whole remote sets");
        assert_eq!(hosted(vec![set(1, [3])]), [set(1, [3])]);
        assert_eq!(hosted(vec![set(2, [0]), set(1, [5, 2]), set(1, [5])]), [set(1, [2, 5]), set(2, [0])]);
        assert_eq!(hosted(vec![set(1, 0..8), set(4, 0..8)]), [set(1, [2, 3, 5])], "others are local");
        assert_eq!(hosted(vec![set(1, [])]), [], "an empty set hosts nothing");
    }

    #[test]
    fn layers_count_for_nothing_beside_experts() {
        let endpoint = Endpoint { layers: vec![2], ..hosting(vec![set(1, [3])]) };
        let remote = vec![set(1, [3, 4]), set(2, [0])];
        let (_, endpoints) = check_routing(&model(8), &routing(remote, vec![endpoint])).unwrap();
        assert_eq!(endpoints[0].1, [set(1, [3])]);
    }

    #[test]
    fn what_the_model_does_not_have_is_refused() {
        let refused = |experts: LayerExperts| {
            let asked = routing(vec![set(1, [3])], vec![hosting(vec![experts])]);
            let error = check_routing(&model(8), &asked).unwrap_err();
            assert_eq!(error.field.as_deref(), Some("endpoints"), "{error}");
            error.to_string()
        };
        assert!(refused(set(1, [3, 8])).contains("expert 8 of layer 1"));
        assert!(refused(set(1, [u32::MAX])).contains("4294967295"));
        assert!(refused(set(u32::MAX, [0])).contains("layer 4294967295"));
    }
}
