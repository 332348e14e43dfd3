//! Main functions that take requests from gateways alone, as their arguments say it.

use k8s_openapi::api::core::v1::Pod;

/// Flag by which a main function takes requests from gateways alone.
pub(crate) const GATEWAY_IDENTITY: &str = "--gateway-identity";

/// Returns whether the main function in `pod` takes requests from gateways alone. Main functions of earlier versions, and
/// those made without a signer, take requests from every peer, in plaintext.
pub(crate) fn knows_gateways(pod: &Pod) -> bool {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    containers.flat_map(|each| each.args.iter().flatten()).any(|argument| argument == GATEWAY_IDENTITY)
}
