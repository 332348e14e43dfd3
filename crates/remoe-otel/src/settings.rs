//! Settings from the environment, by the names that OpenTelemetry gives. Pure.

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

/// More than what waits for a collector that comes back soon; a span takes about 1 KB.
const MOST_WAITING: usize = 1 << 20;

/// Why traces cannot be exported as the environment asks for it.
#[derive(Debug, thiserror::Error)]
pub enum TracesError {
    /// A variable has a value that means nothing here.
    #[error("{variable} is {value:?}, expected {expected}")]
    Variable {
        /// Name of the variable.
        variable: &'static str,
        /// Value of the variable.
        value: String,
        /// Values that are supported.
        expected: &'static str,
    },
    /// The exporter refuses its settings.
    #[error("cannot export traces: {0}")]
    Exporter(String),
    /// No thread can be started for the exporter.
    #[error("cannot export traces: {0}")]
    Thread(#[from] std::io::Error),
    /// A metric of this name is there.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
}

/// How traces are exported.
#[derive(Debug)]
pub(crate) struct ExportSettings {
    /// `http://HOST:PORT` or `https://HOST:PORT`.
    pub(crate) endpoint: String,
    pub(crate) sampler: Sampler,
    /// Spans that wait for the exporter; further ones are dropped.
    pub(crate) queue: usize,
    /// Spans of one message to the collector.
    pub(crate) batch: usize,
    /// How long a batch is waited for.
    pub(crate) delay: Duration,
    /// The environment says what the service is called.
    pub(crate) is_named: bool,
    /// It says which instance of the service this is.
    pub(crate) is_numbered: bool,
}

impl ExportSettings {
    /// Reads the settings from what `variable` returns; none if traces are not asked for. An empty variable counts as
    /// absent.
    ///
    /// # Errors
    /// A variable has an invalid or unsupported value.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, TracesError> {
        let said =
            |name: &str| variable(name).map(|value| value.trim().to_owned()).filter(|it| !it.is_empty());
        let first = |names: [&'static str; 2]| names.into_iter().find_map(|name| Some((name, said(name)?)));
        let Some((name, endpoint)) = first(ENDPOINT) else { return Ok(None) };
        if said(DISABLED).is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        match said(EXPORTER).as_deref() {
            None | Some("otlp") => {}
            Some("none") => return Ok(None),
            Some(other) => return Err(wrong(EXPORTER, other, "otlp or none")),
        }
        if let Some((name, other)) = first(PROTOCOL).filter(|(_, protocol)| protocol != "grpc") {
            let expected = "grpc; omit it or set grpc, and use the collector's gRPC port (usually 4317)";
            return Err(wrong(name, &other, expected));
        }
        let address = ["http://", "https://"].iter().find_map(|scheme| endpoint.strip_prefix(scheme));
        let is_address = |address: &str| {
            let authority = address.trim_end_matches('/');
            !authority.is_empty()
                && !authority.contains('@')
                && authority.parse::<http::uri::Authority>().is_ok()
        };
        if !address.is_some_and(is_address) {
            return Err(wrong(name, &endpoint, "http://HOST:PORT or https://HOST:PORT"));
        }
        let number = |name: &'static str, usual: usize| match said(name) {
            None => Ok(usual),
            Some(value) => match value.parse() {
                Ok(number @ 1..=MOST_WAITING) => Ok(number),
                _ => Err(wrong(name, &value, "a whole number from 1 to 1048576")),
            },
        };
        let queue = number(QUEUE, 2048)?;
        let attributes = said(ATTRIBUTES).unwrap_or_default();
        let has = |key: &str| {
            attributes.split(',').any(|pair| pair.split_once('=').is_some_and(|(name, _)| name.trim() == key))
        };
        Ok(Some(Self {
            sampler: sampler(said(SAMPLER).as_deref(), said(RATIO).as_deref())?,
            queue,
            batch: number(BATCH, 512)?.min(queue),
            delay: Duration::from_millis(number(DELAY, 5000)? as u64),
            is_named: said(NAME).is_some() || has("service.name"),
            is_numbered: has("service.instance.id"),
            endpoint,
        }))
    }
}

/// Which traces are recorded: by default those that the caller records, and all that begin here.
fn sampler(name: Option<&str>, argument: Option<&str>) -> Result<Sampler, TracesError> {
    let ratio = || match argument {
        None => Ok(1.0),
        Some(text) => match text.parse::<f64>() {
            Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
            _ => Err(wrong(RATIO, text, "a ratio from 0 to 1")),
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
            return Err(wrong(SAMPLER, other, expected));
        }
    })
}

fn wrong(variable: &'static str, value: &str, expected: &'static str) -> TracesError {
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
    fn who_asks_for_nothing_gets_nothing() {
        for pairs in [
            &[][..],
            &[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")],
            &[("OTEL_SERVICE_NAME", "x"), ("OTEL_TRACES_SAMPLER", "always_on")],
            // Nothing else is looked at then.
            &[("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")],
            &[AT, ("OTEL_SDK_DISABLED", "TRUE"), ("OTEL_TRACES_SAMPLER", "wrong")],
            &[AT, ("OTEL_TRACES_EXPORTER", "none")],
        ] {
            assert!(read(pairs).unwrap().is_none(), "{pairs:?}");
        }
    }

    #[test]
    fn the_usual_is_what_opentelemetry_says() {
        let settings = read(&[AT]).unwrap().unwrap();
        assert_eq!((settings.queue, settings.batch, settings.delay), (2048, 512, Duration::from_secs(5)));
        assert_eq!(format!("{:?}", settings.sampler), "ParentBased(AlwaysOn)");
        assert!(!settings.is_named && !settings.is_numbered);
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://[::1]:4317/");
        let settings = read(&[AT, own, ("OTEL_SDK_DISABLED", "no")]).unwrap().unwrap();
        assert_eq!(settings.endpoint, own.1);
        let few = [("OTEL_BSP_MAX_QUEUE_SIZE", "7"), ("OTEL_BSP_SCHEDULE_DELAY", "100")];
        let settings = read(&[&[AT][..], &few].concat()).unwrap().unwrap();
        assert_eq!((settings.queue, settings.batch, settings.delay.as_millis()), (7, 7, 100));
    }

    #[test]
    fn names_of_the_environment_count() {
        let named = |pair| {
            let settings = read(&[AT, pair]).unwrap().unwrap();
            (settings.is_named, settings.is_numbered)
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
    fn what_there_is_not_is_refused_by_name() {
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
