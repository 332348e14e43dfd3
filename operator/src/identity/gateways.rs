//! Main functions that accept requests only from gateways, as their arguments show.

use k8s_openapi::api::core::v1::Pod;

/// Flag that makes a main function accept requests only from gateways.
pub(crate) const GATEWAY_IDENTITY: &str = "--gateway-identity";

/// Returns whether the main function in `pod` accepts requests only from gateways. Main functions of earlier
/// versions, and those without a signer, accept plaintext requests from every peer.
pub(crate) fn knows_gateways(pod: &Pod) -> bool {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    containers.flat_map(|each| each.args.iter().flatten()).any(|argument| argument == GATEWAY_IDENTITY)
}
