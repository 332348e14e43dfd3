//! Checks a routing against the model: its remote experts, and those that each endpoint hosts.

use remoe_model::ModelConfig;
use remoe_proto::v1::{Endpoint, LayerExperts, Routing};
use remoe_proto::{MAX_ENDPOINTS, ServiceError};
use std::collections::{BTreeMap, BTreeSet};

/// Remote experts of each layer.
pub(crate) type RemoteSets = BTreeMap<usize, BTreeSet<u32>>;

/// Address of each endpoint and the experts that it must serve; layers and experts ascending, without empty sets.
pub(crate) type EndpointSets = Vec<(String, Vec<LayerExperts>)>;

/// Most (endpoint, expert) pairs, more than any deployment has. A placement is stored per endpoint, and a short message
/// can name many endpoints and many experts.
const MAX_HOSTED: usize = 1 << 22;

/// Returns the remote experts of a placement, and those that each endpoint hosts, checked against the model.
///
/// If an endpoint names experts, it hosts those of them that are remote; others do not matter. An endpoint without
/// experts is never asked. A remote expert that no endpoint hosts is computed by the local fallback.
///
/// # Errors
/// Fails if the model lacks a layer or an expert, if there are too many endpoints, or if they host too many experts.
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
    let mut capacity = MAX_HOSTED;
    let endpoints = routing.endpoints.iter().map(|endpoint| {
        let hosted = match endpoint.experts.is_empty() {
            true => whole_layers(endpoint, &remote, &mut capacity)?,
            false => named_experts(config, endpoint, &remote, &mut capacity)?,
        };
        Ok((endpoint.address.clone(), hosted))
    });
    let endpoints = endpoints.collect::<Result<EndpointSets, ServiceError>>()?;
    Ok((remote, endpoints))
}

/// Groups `listed` experts by layer. Fails with an error of `field` if the model lacks a layer or an expert.
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

/// Returns the remote experts of the layers that `endpoint` serves.
fn whole_layers(
    endpoint: &Endpoint,
    remote: &RemoteSets,
    capacity: &mut usize,
) -> Result<Vec<LayerExperts>, ServiceError> {
    let layers: BTreeSet<usize> = endpoint.layers.iter().map(|&layer| layer as usize).collect();
    let served = remote.iter().filter(|(layer, _)| layers.is_empty() || layers.contains(layer));
    served.map(|(&layer, experts)| hosted(layer, experts, capacity)).collect()
}

/// Returns the experts that `endpoint` names and that are remote.
fn named_experts(
    config: &ModelConfig,
    endpoint: &Endpoint,
    remote: &RemoteSets,
    capacity: &mut usize,
) -> Result<Vec<LayerExperts>, ServiceError> {
    let mut named = sets(config, "endpoints", &endpoint.experts)?;
    named.retain(|layer, experts| {
        experts.retain(|expert| remote.get(layer).is_some_and(|set| set.contains(expert)));
        !experts.is_empty()
    });
    named.iter().map(|(&layer, experts)| hosted(layer, experts, capacity)).collect()
}

/// Returns the experts of one layer as a message, and subtracts their number from `capacity`.
fn hosted(layer: usize, experts: &BTreeSet<u32>, capacity: &mut usize) -> Result<LayerExperts, ServiceError> {
    *capacity = capacity.checked_sub(experts.len()).ok_or_else(|| {
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

    /// A message of a few kilobytes with many endpoints and experts must not create gigabytes of sets.
    #[test]
    fn endpoints_times_experts_are_bounded() {
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
    fn endpoint_hosts_the_named_experts_that_are_remote() {
        let hosted = |experts: Vec<LayerExperts>| {
            let remote = vec![set(1, [2, 3, 5]), set(2, [0]), set(3, [])];
            let (_, endpoints) = check_routing(&model(8), &routing(remote, vec![hosting(experts)])).unwrap();
            endpoints.into_iter().next().unwrap().1
        };
        assert_eq!(hosted(vec![]), [set(1, [2, 3, 5]), set(2, [0])], "all remote experts");
        assert_eq!(hosted(vec![set(1, [3])]), [set(1, [3])]);
        assert_eq!(hosted(vec![set(2, [0]), set(1, [5, 2]), set(1, [5])]), [set(1, [2, 5]), set(2, [0])]);
        assert_eq!(hosted(vec![set(1, 0..8), set(4, 0..8)]), [set(1, [2, 3, 5])], "others are local");
        assert_eq!(hosted(vec![set(1, [])]), [], "an empty set hosts nothing");
    }

    #[test]
    fn named_experts_override_layers_of_an_endpoint() {
        let endpoint = Endpoint { layers: vec![2], ..hosting(vec![set(1, [3])]) };
        let remote = vec![set(1, [3, 4]), set(2, [0])];
        let (_, endpoints) = check_routing(&model(8), &routing(remote, vec![endpoint])).unwrap();
        assert_eq!(endpoints[0].1, [set(1, [3])]);
    }

    #[test]
    fn experts_that_the_model_lacks_are_refused() {
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
