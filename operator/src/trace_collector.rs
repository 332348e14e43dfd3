//! Export of traces from functions. The settings are checked when the operator starts, so that functions need not
//! fail on them.

use http::Uri;
use k8s_openapi::api::core::v1::{EnvVar, EnvVarSource, ObjectFieldSelector};
use k8s_openapi::api::networking::v1::{IPBlock, NetworkPolicyPeer};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// Collector of traces by OTLP over gRPC: `http://HOST:PORT` or `https://HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectorEndpoint {
    url: String,
    host: String,
    port: u16,
}

/// Peers of the collector in network policies: pods, namespaces or addresses.
#[derive(Debug, Clone, PartialEq)]
pub struct CollectorPeers(Vec<NetworkPolicyPeer>);

/// Endpoint whose network peers cannot be derived from its name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid --tracing-endpoint {0}: expected an address, or a Service as NAME.NAMESPACE; set --tracing-to \
     (tracing.to of the chart) to the peers that functions may reach, such as \
     [{{\"ipBlock\": {{\"cidr\": \"203.0.113.7/32\"}}}}]"
)]
pub struct UnknownCollector(String);

impl FromStr for CollectorEndpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || "expected http://HOST:PORT or https://HOST:PORT".to_owned();
        // Functions do not accept credentials in the URL.
        if text.contains('@') || !["http://", "https://"].iter().any(|scheme| text.starts_with(scheme)) {
            return Err(invalid());
        }
        let uri: Uri = text.parse().map_err(|_| invalid())?;
        let port = match uri.scheme_str() {
            Some("http") => uri.port_u16().unwrap_or(80),
            Some("https") => uri.port_u16().unwrap_or(443),
            _ => return Err(invalid()),
        };
        if uri.path_and_query().is_some_and(|path| path != "/") {
            return Err(invalid());
        }
        let host = uri.host().ok_or_else(invalid)?.trim_matches(['[', ']']).to_owned();
        Ok(Self { url: text.to_owned(), host, port })
    }
}

impl CollectorEndpoint {
    fn address(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }

    /// Returns the narrowest peers that the endpoint's name implies: an address; all pods of a Service's namespace;
    /// or, without a namespace in the name, those of the functions' own. Absent if the name is not one of the
    /// cluster.
    fn peers(&self) -> Option<Vec<NetworkPolicyPeer>> {
        if let Some(address) = self.address() {
            let cidr = format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 });
            return Some(vec![NetworkPolicyPeer {
                ip_block: Some(IPBlock { cidr, except: None }),
                ..NetworkPolicyPeer::default()
            }]);
        }
        let mut labels = self.host.trim_end_matches('.').split('.').skip(1);
        let peer = match (labels.next(), labels.next()) {
            (None, _) => NetworkPolicyPeer {
                pod_selector: Some(LabelSelector::default()),
                ..NetworkPolicyPeer::default()
            },
            (Some(namespace), None | Some("svc")) => {
                let name = ("kubernetes.io/metadata.name".to_owned(), namespace.to_owned());
                let selector =
                    LabelSelector { match_labels: Some(BTreeMap::from([name])), match_expressions: None };
                NetworkPolicyPeer { namespace_selector: Some(selector), ..NetworkPolicyPeer::default() }
            }
            (Some(_), Some(_)) => return None,
        };
        Some(vec![peer])
    }
}

impl FromStr for CollectorPeers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = |why: String| format!("expected a JSON list of NetworkPolicyPeers: {why}");
        let json: Value = serde_json::from_str(text).map_err(|error| invalid(error.to_string()))?;
        let peers: Vec<NetworkPolicyPeer> =
            serde_json::from_value(json.clone()).map_err(|error| invalid(error.to_string()))?;
        let is_specific = |peer: &NetworkPolicyPeer| *peer != NetworkPolicyPeer::default();
        if peers.is_empty() || !peers.iter().all(is_specific) {
            return Err(invalid("each needs an ipBlock, a namespaceSelector or a podSelector".to_owned()));
        }
        // A misspelt field would be dropped, and the peer would allow more than intended.
        match serde_json::to_value(&peers) {
            Ok(read) if read == json => Ok(Self(peers)),
            Ok(read) => Err(invalid(format!("unknown fields, only {read} is read"))),
            Err(error) => Err(invalid(error.to_string())),
        }
    }
}

/// Sampling ratio of traces without a sampling decision of the caller, from 0 to 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SamplingRatio(String);

impl FromStr for SamplingRatio {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<f64>() {
            Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(Self(text.to_owned())),
            _ => Err("expected a ratio from 0 to 1".to_owned()),
        }
    }
}

impl fmt::Display for SamplingRatio {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Settings of the trace export.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TraceCollector {
    /// Endpoint of the collector.
    endpoint: CollectorEndpoint,
    /// Sampling ratio.
    ratio: SamplingRatio,
    /// Peers of the endpoint in network policies.
    peers: Vec<NetworkPolicyPeer>,
}

impl TraceCollector {
    /// Creates the settings for `endpoint`. Its peers are `peers`, or by default derived from its name.
    ///
    /// # Errors
    /// The peers cannot be derived from the endpoint's name.
    pub(crate) fn new(
        endpoint: CollectorEndpoint,
        ratio: SamplingRatio,
        peers: Option<CollectorPeers>,
    ) -> Result<Self, UnknownCollector> {
        let peers = peers.map(|CollectorPeers(peers)| peers).or_else(|| endpoint.peers());
        let peers = peers.ok_or_else(|| UnknownCollector(endpoint.url.clone()))?;
        Ok(Self { endpoint, ratio, peers })
    }

    /// Returns the collector's peers in network policies.
    pub(crate) fn peers(&self) -> &[NetworkPolicyPeer] {
        &self.peers
    }

    /// Returns whether the endpoint has a host name, which functions must resolve.
    pub(crate) fn has_name(&self) -> bool {
        self.endpoint.address().is_none()
    }

    /// Returns the TCP port.
    pub(crate) fn port(&self) -> u16 {
        self.endpoint.port
    }

    /// Returns the OpenTelemetry environment variables for the functions of `deployment`.
    pub(crate) fn environment(&self, deployment: &str) -> Vec<EnvVar> {
        let literal = |name: &str, value: &str| EnvVar {
            name: name.to_owned(),
            value: Some(value.to_owned()),
            value_from: None,
        };
        let field_ref = |name: &str, path: &str| EnvVar {
            name: name.to_owned(),
            value: None,
            value_from: Some(EnvVarSource {
                field_ref: Some(ObjectFieldSelector { api_version: None, field_path: path.to_owned() }),
                ..EnvVarSource::default()
            }),
        };
        // Kubernetes expands variables that are defined earlier in the list.
        let attributes = format!(
            "service.instance.id=$(POD_NAMESPACE).$(POD_NAME),k8s.namespace.name=$(POD_NAMESPACE),k8s.pod.name=$(POD_NAME),remoe.deployment={deployment}"
        );
        vec![
            field_ref("POD_NAME", "metadata.name"),
            field_ref("POD_NAMESPACE", "metadata.namespace"),
            literal("OTEL_EXPORTER_OTLP_ENDPOINT", &self.endpoint.url),
            literal("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
            literal("OTEL_TRACES_SAMPLER_ARG", &self.ratio.0),
            literal("OTEL_RESOURCE_ATTRIBUTES", &attributes),
        ]
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_an_address_for_grpc() {
        let port = |text: &str| text.parse::<CollectorEndpoint>().map(|endpoint| endpoint.port);
        assert_eq!(port("http://otel.monitoring:4317"), Ok(4317));
        assert_eq!(port("https://otel.example/"), Ok(443));
        assert_eq!(port("http://[::1]"), Ok(80));
        for invalid in [
            "",
            "otel:4317",
            "grpc://otel:4317",
            "HTTP://otel:4317",
            "http://u:p@otel:4317",
            "http://otel:4318/v1/traces",
            "http://a b",
        ] {
            assert!(port(invalid).is_err_and(|error| error.contains("HOST:PORT")), "{invalid}");
        }
    }

    fn peers(endpoint: &str, peers: Option<&str>) -> Result<Value, UnknownCollector> {
        let peers = peers.map(|peers| peers.parse().unwrap());
        let trace_collector = TraceCollector::new(endpoint.parse().unwrap(), "1".parse().unwrap(), peers)?;
        Ok(serde_json::to_value(trace_collector.peers()).unwrap())
    }

    #[test]
    fn collector_is_identified_by_its_name_only() {
        let namespace = |name: &str| {
            let labels = serde_json::json!({"kubernetes.io/metadata.name": name});
            serde_json::json!([{"namespaceSelector": {"matchLabels": labels}}])
        };
        let block = |cidr: &str| serde_json::json!([{"ipBlock": {"cidr": cidr}}]);
        for (endpoint, expected) in [
            ("http://otel.monitoring:4317", namespace("monitoring")),
            ("http://otel.monitoring.svc:4317", namespace("monitoring")),
            ("https://otel.monitoring.svc.cluster.local.:4317", namespace("monitoring")),
            ("http://otel:4317", serde_json::json!([{"podSelector": {}}])),
            ("http://10.1.2.3:4317", block("10.1.2.3/32")),
            ("http://[fd00::1]:4317", block("fd00::1/128")),
        ] {
            assert_eq!(peers(endpoint, None), Ok(expected), "{endpoint}");
        }
        let outside = "https://api.traces.example";
        assert!(peers(outside, None).unwrap_err().to_string().contains("--tracing-to"));
        let explicit = r#"[{"ipBlock": {"cidr": "203.0.113.0/24"}}]"#;
        assert_eq!(peers(outside, Some(explicit)), Ok(block("203.0.113.0/24")));
        assert_eq!(peers("http://otel.monitoring:4317", Some(explicit)), Ok(block("203.0.113.0/24")));
    }

    #[test]
    fn peers_are_understood_as_a_whole() {
        for invalid in [
            "",
            "{}",
            "[]",
            "[{}]",
            r#"[{"namespaceselector": {}}]"#,
            r#"[{"podSelector": {"matchlabels": {"a": "b"}}}]"#,
        ] {
            assert!(
                invalid.parse::<CollectorPeers>().is_err_and(|error| error.contains("NetworkPolicyPeer")),
                "{invalid}"
            );
        }
    }

    #[test]
    fn a_ratio_is_a_share() {
        assert!(["0", "1", "0.05"].iter().all(|text| text.parse::<SamplingRatio>().is_ok()));
        assert!(["", "2", "-1", "nan", "5%"].iter().all(|text| text.parse::<SamplingRatio>().is_err()));
    }
}
