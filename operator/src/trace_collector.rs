//! Where functions export traces to: checked when the operator starts, not by functions that then do not.

use http::Uri;
use k8s_openapi::api::core::v1::{EnvVar, EnvVarSource, ObjectFieldSelector};
use k8s_openapi::api::networking::v1::{IPBlock, NetworkPolicyPeer};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// A collector that takes OTLP over gRPC: `http://HOST:PORT` or `https://HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectorEndpoint {
    url: String,
    host: String,
    port: u16,
}

/// A collector as network policies name it: pods, namespaces or addresses.
#[derive(Debug, Clone, PartialEq)]
pub struct CollectorPeers(Vec<NetworkPolicyPeer>);

/// An endpoint outside of the cluster, as far as its name tells.
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
        let wrong = || "expected http://HOST:PORT or https://HOST:PORT".to_owned();
        // As functions read it, which take no credentials from there.
        if text.contains('@') || !["http://", "https://"].iter().any(|scheme| text.starts_with(scheme)) {
            return Err(wrong());
        }
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        let port = match uri.scheme_str() {
            Some("http") => uri.port_u16().unwrap_or(80),
            Some("https") => uri.port_u16().unwrap_or(443),
            _ => return Err(wrong()),
        };
        if uri.path_and_query().is_some_and(|path| path != "/") {
            return Err(wrong());
        }
        let host = uri.host().ok_or_else(wrong)?.trim_matches(['[', ']']).to_owned();
        Ok(Self { url: text.to_owned(), host, port })
    }
}

impl CollectorEndpoint {
    fn address(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }

    /// Returns the peers behind the endpoint, as narrowly as its name says: an address, all pods of the namespace of a
    /// Service, or of the functions' own namespace where the name has none. Absent if the name is not one of the
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
        let wrong = |why: String| format!("expected a JSON list of NetworkPolicyPeers: {why}");
        let given: Value = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        let peers: Vec<NetworkPolicyPeer> =
            serde_json::from_value(given.clone()).map_err(|error| wrong(error.to_string()))?;
        let is_specific = |peer: &NetworkPolicyPeer| *peer != NetworkPolicyPeer::default();
        if peers.is_empty() || !peers.iter().all(is_specific) {
            return Err(wrong("each needs an ipBlock, a namespaceSelector or a podSelector".to_owned()));
        }
        // What is misspelt would be left out, and let in more than it says.
        match serde_json::to_value(&peers) {
            Ok(read) if read == given => Ok(Self(peers)),
            Ok(read) => Err(wrong(format!("unknown fields, only {read} is read"))),
            Err(error) => Err(wrong(error.to_string())),
        }
    }
}

/// The share of requests that are recorded where their callers do not say: 0 to 1.
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

/// How functions export traces.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TraceCollector {
    /// Endpoint that traces are exported to.
    endpoint: CollectorEndpoint,
    /// Share of requests that are recorded.
    ratio: SamplingRatio,
    /// Peers behind the endpoint.
    to: Vec<NetworkPolicyPeer>,
}

impl TraceCollector {
    /// Returns the export to `endpoint`, whose peers are `to`, or by default those that its name tells.
    ///
    /// # Errors
    /// The name of the endpoint does not tell its peers.
    pub(crate) fn new(
        endpoint: CollectorEndpoint,
        ratio: SamplingRatio,
        to: Option<CollectorPeers>,
    ) -> Result<Self, UnknownCollector> {
        let to = to.map(|CollectorPeers(peers)| peers).or_else(|| endpoint.peers());
        let to = to.ok_or_else(|| UnknownCollector(endpoint.url.clone()))?;
        Ok(Self { endpoint, ratio, to })
    }

    /// Returns the collector's peers in network policies.
    pub(crate) fn peers(&self) -> &[NetworkPolicyPeer] {
        &self.to
    }

    /// Reports if functions resolve a host name for the endpoint.
    pub(crate) fn has_name(&self) -> bool {
        self.endpoint.address().is_none()
    }

    /// Returns the TCP port.
    pub(crate) fn port(&self) -> u16 {
        self.endpoint.port
    }

    /// Returns the environment variables of OpenTelemetry for the functions of the deployment called `deployment`.
    pub(crate) fn environment(&self, deployment: &str) -> Vec<EnvVar> {
        let is = |name: &str, value: &str| EnvVar {
            name: name.to_owned(),
            value: Some(value.to_owned()),
            value_from: None,
        };
        let field = |name: &str, path: &str| EnvVar {
            name: name.to_owned(),
            value: None,
            value_from: Some(EnvVarSource {
                field_ref: Some(ObjectFieldSelector { api_version: None, field_path: path.to_owned() }),
                ..EnvVarSource::default()
            }),
        };
        // Kubernetes puts in what stands before.
        let attributes = format!(
            "service.instance.id=$(POD_NAMESPACE).$(POD_NAME),k8s.namespace.name=$(POD_NAMESPACE),k8s.pod.name=$(POD_NAME),remoe.deployment={deployment}"
        );
        vec![
            field("POD_NAME", "metadata.name"),
            field("POD_NAMESPACE", "metadata.namespace"),
            is("OTEL_EXPORTER_OTLP_ENDPOINT", &self.endpoint.url),
            is("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
            is("OTEL_TRACES_SAMPLER_ARG", &self.ratio.0),
            is("OTEL_RESOURCE_ATTRIBUTES", &attributes),
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
        for wrong in [
            "",
            "otel:4317",
            "grpc://otel:4317",
            "HTTP://otel:4317",
            "http://u:p@otel:4317",
            "http://otel:4318/v1/traces",
            "http://a b",
        ] {
            assert!(port(wrong).is_err_and(|error| error.contains("HOST:PORT")), "{wrong}");
        }
    }

    fn peers(endpoint: &str, to: Option<&str>) -> Result<Value, UnknownCollector> {
        let to = to.map(|to| to.parse().unwrap());
        let trace_collector = TraceCollector::new(endpoint.parse().unwrap(), "1".parse().unwrap(), to)?;
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
        let to = r#"[{"ipBlock": {"cidr": "203.0.113.0/24"}}]"#;
        assert_eq!(peers(outside, Some(to)), Ok(block("203.0.113.0/24")));
        assert_eq!(peers("http://otel.monitoring:4317", Some(to)), Ok(block("203.0.113.0/24")));
    }

    #[test]
    fn peers_are_understood_as_a_whole() {
        for wrong in [
            "",
            "{}",
            "[]",
            "[{}]",
            r#"[{"namespaceselector": {}}]"#,
            r#"[{"podSelector": {"matchlabels": {"a": "b"}}}]"#,
        ] {
            assert!(
                wrong.parse::<CollectorPeers>().is_err_and(|error| error.contains("NetworkPolicyPeer")),
                "{wrong}"
            );
        }
    }

    #[test]
    fn a_ratio_is_a_share() {
        assert!(["0", "1", "0.05"].iter().all(|text| text.parse::<SamplingRatio>().is_ok()));
        assert!(["", "2", "-1", "nan", "5%"].iter().all(|text| text.parse::<SamplingRatio>().is_err()));
    }
}
