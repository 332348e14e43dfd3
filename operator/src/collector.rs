//! Where functions export traces to: checked when the operator starts, not by functions that then do not.

use http::Uri;
use k8s_openapi::api::core::v1::{EnvVar, EnvVarSource, ObjectFieldSelector};
use std::fmt;
use std::str::FromStr;

/// A collector that takes OTLP over gRPC: `http://HOST:PORT` or `https://HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    url: String,
    port: u16,
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not http://HOST:PORT or https://HOST:PORT");
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
        Ok(Self { url: text.to_owned(), port })
    }
}

/// The share of requests that are recorded where their callers do not say: 0 to 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ratio(String);

impl FromStr for Ratio {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<f64>() {
            Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(Self(text.to_owned())),
            _ => Err(format!("{text:?} is no ratio from 0 to 1")),
        }
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// How functions export traces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collector {
    /// Where to.
    pub endpoint: Endpoint,
    /// How many.
    pub ratio: Ratio,
}

impl Collector {
    /// Its TCP port.
    pub fn port(&self) -> u16 {
        self.endpoint.port
    }

    /// What it is to the functions of the deployment called `deployment`: the environment of OpenTelemetry.
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
        let port = |text: &str| text.parse::<Endpoint>().map(|endpoint| endpoint.port);
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

    #[test]
    fn a_ratio_is_a_share() {
        assert!(["0", "1", "0.05"].iter().all(|text| text.parse::<Ratio>().is_ok()));
        assert!(["", "2", "-1", "nan", "5%"].iter().all(|text| text.parse::<Ratio>().is_err()));
    }
}
