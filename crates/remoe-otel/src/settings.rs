//! Settings from the environment, under OpenTelemetry's standard names. Pure.

use opentelemetry_sdk::trace::Sampler;
use std::time::Duration;

const ENDPOINT: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
const PROTOCOL: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
const DISABLED: &str = "OTEL_SDK_DISABLED";
const EXPORTER: &str = "OTEL_TRACES_EXPORTER";
const SAMPLER: &str = "OTEL_TRACES_SAMPLER";
const RATIO: &str = "OTEL_TRACES_SAMPLER_ARG";
const NAME: &str = "OTEL_SERVICE_NAME";
const ATTRIBUTES: &str = "OTEL_RESOURCE_ATTRIBUTES";
const DELAY: &str = "OTEL_BSP_SCHEDULE_DELAY";
const QUEUE: &str = "OTEL_BSP_MAX_QUEUE_SIZE";
const BATCH: &str = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE";

/// Largest number that is accepted, for example for the queue's size: a span takes about 1 KB.
const MAX_NUMBER: usize = 1 << 20;

/// Reason why traces cannot be exported as the environment configures it.
#[derive(Debug, thiserror::Error)]
pub enum TracesError {
    /// A variable has an invalid or unsupported value.
    #[error("{variable} is {value:?}, expected {expected}")]
    Variable {
        /// Name of the variable.
        variable: &'static str,
        /// Value of the variable.
        value: String,
        /// Values that are supported.
        expected: &'static str,
    },
    /// The exporter cannot be made with its settings.
    #[error("cannot export traces: {0}")]
    Exporter(String),
    /// The export thread cannot be started.
    #[error("cannot export traces: {0}")]
    Thread(#[from] std::io::Error),
    /// A metric of the same name is registered.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
}

/// Settings of the export of traces.
#[derive(Debug)]
pub(crate) struct ExportSettings {
    /// `http://HOST:PORT` or `https://HOST:PORT`.
    pub(crate) endpoint: String,
    pub(crate) sampler: Sampler,
    /// Largest number of spans that wait for the exporter. Further ones are dropped.
    pub(crate) queue: usize,
    /// Largest number of spans of one message to the collector.
    pub(crate) batch: usize,
    /// Longest wait for a full batch.
    pub(crate) delay: Duration,
    /// Set if the environment has a service name.
    pub(crate) has_service_name: bool,
    /// Set if the environment has an id of this instance.
    pub(crate) has_instance_id: bool,
}

impl ExportSettings {
    /// Reads the settings through `variable`. Returns `None` if traces are not configured. An empty variable counts
    /// as absent.
    ///
    /// # Errors
    /// A variable has an invalid or unsupported value.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, TracesError> {
        let value_of = |name: &str| {
            variable(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
        };
        let first =
            |names: [&'static str; 2]| names.into_iter().find_map(|name| Some((name, value_of(name)?)));
        let Some((name, endpoint)) = first(ENDPOINT) else { return Ok(None) };
        if value_of(DISABLED).is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        match value_of(EXPORTER).as_deref() {
            None | Some("otlp") => {}
            Some("none") => return Ok(None),
            Some(other) => return Err(invalid(EXPORTER, other, "otlp or none")),
        }
        if let Some((name, other)) = first(PROTOCOL).filter(|(_, protocol)| protocol != "grpc") {
            let expected = "grpc; omit it or set grpc, and use the collector's gRPC port (usually 4317)";
            return Err(invalid(name, &other, expected));
        }
        let address = ["http://", "https://"].iter().find_map(|scheme| endpoint.strip_prefix(scheme));
        let is_address = |address: &str| {
            let authority = address.trim_end_matches('/');
            !authority.is_empty()
                && !authority.contains('@')
                && authority.parse::<http::uri::Authority>().is_ok()
        };
        if !address.is_some_and(is_address) {
            return Err(invalid(name, &endpoint, "http://HOST:PORT or https://HOST:PORT"));
        }
        let number = |name: &'static str, default: usize| match value_of(name) {
            None => Ok(default),
            Some(value) => match value.parse() {
                Ok(number @ 1..=MAX_NUMBER) => Ok(number),
                _ => Err(invalid(name, &value, "a whole number from 1 to 1048576")),
            },
        };
        let queue = number(QUEUE, 2048)?;
        let attributes = value_of(ATTRIBUTES).unwrap_or_default();
        let has = |key: &str| {
            attributes.split(',').any(|pair| pair.split_once('=').is_some_and(|(name, _)| name.trim() == key))
        };
        Ok(Some(Self {
            sampler: sampler(value_of(SAMPLER).as_deref(), value_of(RATIO).as_deref())?,
            queue,
            batch: number(BATCH, 512)?.min(queue),
            delay: Duration::from_millis(number(DELAY, 5000)? as u64),
            has_service_name: value_of(NAME).is_some() || has("service.name"),
            has_instance_id: has("service.instance.id"),
            endpoint,
        }))
    }
}

/// Returns the sampler. By default it records traces that the caller records, and all that begin in this process.
fn sampler(name: Option<&str>, argument: Option<&str>) -> Result<Sampler, TracesError> {
    let ratio = || match argument {
        None => Ok(1.0),
        Some(text) => match text.parse::<f64>() {
            Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
            _ => Err(invalid(RATIO, text, "a ratio from 0 to 1")),
        },
    };
    let by_parent = |root: Sampler| Sampler::ParentBased(Box::new(root));
    Ok(match name {
        None | Some("parentbased_always_on") => by_parent(Sampler::AlwaysOn),
        Some("parentbased_always_off") => by_parent(Sampler::AlwaysOff),
        Some("parentbased_traceidratio") => by_parent(Sampler::TraceIdRatioBased(ratio()?)),
        Some("always_on") => Sampler::AlwaysOn,
        Some("always_off") => Sampler::AlwaysOff,
        Some("traceidratio") => Sampler::TraceIdRatioBased(ratio()?),
        Some(other) => {
            let expected = "always_on, always_off or traceidratio, optionally after parentbased_";
            return Err(invalid(SAMPLER, other, expected));
        }
    })
}

fn invalid(variable: &'static str, value: &str, expected: &'static str) -> TracesError {
    TracesError::Variable { variable, value: value.to_owned(), expected }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const AT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317");

    fn read(pairs: &[(&str, &str)]) -> Result<Option<ExportSettings>, String> {
        let variable = |name: &str| pairs.iter().find(|(known, _)| *known == name).map(|it| it.1.to_owned());
        ExportSettings::read(variable).map_err(|error| error.to_string())
    }

    #[test]
    fn without_endpoint_there_are_no_settings() {
        for pairs in [
            &[][..],
            &[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")],
            &[("OTEL_SERVICE_NAME", "x"), ("OTEL_TRACES_SAMPLER", "always_on")],
            // Without an endpoint other variables are not checked.
            &[("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")],
            &[AT, ("OTEL_SDK_DISABLED", "TRUE"), ("OTEL_TRACES_SAMPLER", "wrong")],
            &[AT, ("OTEL_TRACES_EXPORTER", "none")],
        ] {
            assert!(read(pairs).unwrap().is_none(), "{pairs:?}");
        }
    }

    #[test]
    fn defaults_are_those_of_opentelemetry() {
        let settings = read(&[AT]).unwrap().unwrap();
        assert_eq!((settings.queue, settings.batch, settings.delay), (2048, 512, Duration::from_secs(5)));
        assert_eq!(format!("{:?}", settings.sampler), "ParentBased(AlwaysOn)");
        assert!(!settings.has_service_name && !settings.has_instance_id);
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://[::1]:4317/");
        let settings = read(&[AT, own, ("OTEL_SDK_DISABLED", "no")]).unwrap().unwrap();
        assert_eq!(settings.endpoint, own.1);
        let few = [("OTEL_BSP_MAX_QUEUE_SIZE", "7"), ("OTEL_BSP_SCHEDULE_DELAY", "100")];
        let settings = read(&[&[AT][..], &few].concat()).unwrap().unwrap();
        assert_eq!((settings.queue, settings.batch, settings.delay.as_millis()), (7, 7, 100));
    }

    #[test]
    fn service_names_of_the_environment_are_found() {
        let named = |pair| {
            let settings = read(&[AT, pair]).unwrap().unwrap();
            (settings.has_service_name, settings.has_instance_id)
        };
        assert_eq!(named(("OTEL_SERVICE_NAME", "mine")), (true, false));
        assert_eq!(named(("OTEL_RESOURCE_ATTRIBUTES", "a=b, service.name = mine")), (true, false));
        assert_eq!(
            named(("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=7,x=service.name")),
            (false, true)
        );
    }

    #[test]
    fn samplers_have_the_standard_names() {
        let sampler = |name, argument: Option<&'static str>| {
            let argument = argument.map(|it| ("OTEL_TRACES_SAMPLER_ARG", it));
            let pairs: Vec<_> = [AT, ("OTEL_TRACES_SAMPLER", name)].into_iter().chain(argument).collect();
            format!("{:?}", read(&pairs).unwrap().unwrap().sampler)
        };
        assert_eq!(sampler("always_on", None), "AlwaysOn");
        assert_eq!(sampler("parentbased_always_off", Some("ignored")), "ParentBased(AlwaysOff)");
        assert_eq!(sampler("traceidratio", Some("0.25")), "TraceIdRatioBased(0.25)");
        assert_eq!(sampler("parentbased_traceidratio", Some("0.05")), "ParentBased(TraceIdRatioBased(0.05))");
        assert_eq!(sampler("traceidratio", None), "TraceIdRatioBased(1.0)");
    }

    #[test]
    fn unsupported_values_are_refused_by_name() {
        for (name, value) in [
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "collector:4317"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://a b:1"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://collector:4318/v1/traces"),
            ("OTEL_TRACES_EXPORTER", "zipkin"),
            ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
            ("OTEL_BSP_SCHEDULE_DELAY", "soon"),
        ] {
            let error = read(&[AT, (name, value)]).unwrap_err();
            assert!(error.starts_with(&format!("{name} is {value:?}, expected ")), "{error}");
        }
        for ratio in ["1.5", "-0.1", "nan", "half"] {
            let pairs = [AT, ("OTEL_TRACES_SAMPLER", "traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", ratio)];
            assert!(read(&pairs).unwrap_err().starts_with("OTEL_TRACES_SAMPLER_ARG is "), "{ratio}");
        }
    }
}
