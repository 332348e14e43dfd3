//! Exposure of a deployment's endpoint, as a condition. Pure.

use super::conditions::ConditionContent;

/// Service of the release's gateways.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct GatewayService {
    /// DNS name of their Service.
    pub name: String,
    /// Set if they serve TLS.
    pub tls: bool,
    /// Set if they accept requests without keys.
    pub open: bool,
    /// Set if any namespace can take a short name.
    pub any_short_name: bool,
}

/// Returns the condition Exposed: clients without a key can use a deployment behind `gateway`, or its requests can
/// reach another one.
pub(crate) fn exposed(gateway: Option<&GatewayService>) -> ConditionContent {
    let Some(gateway) = gateway else {
        let message = "No gateways: every client that reaches main functions may use the model, without a key; \
                       network policies alone limit that. Set gateway.enabled of the operator's chart.";
        return ConditionContent::met("WithoutGateways", message);
    };
    let open = "Every client that reaches the gateways may use and wake the model, without a key. Set \
                gateway.keysSecretName of the operator's chart, or gateway.open=false to have keys drawn.";
    let name = "Any namespace can take the short name of the model, and with it requests that are meant for it. Name \
                NAMESPACE/NAME in requests, and set gateway.scopedNames=true of the operator's chart.";
    match (gateway.open, gateway.any_short_name) {
        (true, true) => ConditionContent::met("GatewayOpen", format!("{open} {name}")),
        (true, false) => ConditionContent::met("GatewayOpen", open),
        (false, true) => ConditionContent::met("AnyShortName", name),
        (false, false) => {
            ConditionContent::unmet("KeysRequired", "Gateways require keys, and names have owners.")
        }
    }
}
