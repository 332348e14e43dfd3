//! Prometheus registries and their HTTP endpoint.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Router, routing::get};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder};
use std::io;
use std::pin::Pin;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Creates a registry with the metrics of every program: `remoe_build_info`, labelled with its version and `facts`
/// (names and values), and on Linux the standard `process_*` metrics.
///
/// # Errors
/// The name of a fact is no valid label name.
pub fn program_registry(facts: &[(&str, &str)]) -> Result<Registry, prometheus::Error> {
    let registry = Registry::new();
    let opts = Opts::new("remoe_build_info", "Build of this program; always 1.");
    let opts = opts.const_label("version", env!("CARGO_PKG_VERSION"));
    let opts = facts.iter().fold(opts, |opts, (name, value)| opts.const_label(*name, *value));
    let build = IntGauge::with_opts(opts)?;
    build.set(1);
    registry.register(Box::new(build))?;
    #[cfg(target_os = "linux")]
    registry.register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))?;
    Ok(registry)
}

/// Returns the [`program_registry`] of a function, labelled with its numerics `class` and instruction `paths`.
/// `one_row` returns the path that computes one row, and is called at each collection.
///
/// # Errors
/// Metrics cannot be registered.
pub fn function_registry(
    class: &str,
    paths: &str,
    one_row: impl Fn() -> &'static str + Send + Sync + 'static,
) -> Result<Registry, prometheus::Error> {
    let registry = program_registry(&[("numerics_class", class), ("instruction_path", paths)])?;
    register_one_row_path(&registry, one_row)?;
    Ok(registry)
}

fn register_one_row_path(
    registry: &Registry,
    path: impl Fn() -> &'static str + Send + Sync + 'static,
) -> Result<(), prometheus::Error> {
    registry.register(Box::new(OneRowPath { described: one_row_path()?, path }))
}

fn one_row_path() -> Result<IntGaugeVec, prometheus::Error> {
    let help = "Instructions that multiply one row with expert weights now; always 1.";
    IntGaugeVec::new(Opts::new("remoe_one_row_path", help), &["path"])
}

/// Collector of the instruction path for one row.
struct OneRowPath<F> {
    described: IntGaugeVec,
    path: F,
}

impl<F: Fn() -> &'static str + Send + Sync> Collector for OneRowPath<F> {
    fn desc(&self) -> Vec<&Desc> {
        self.described.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        // A new family for each collection, so that old paths disappear and concurrent collections do not interfere.
        let Ok(family) = one_row_path() else { return Vec::new() };
        family.with_label_values(&[(self.path)()]).set(1);
        family.collect()
    }
}

/// Serves `registry` at `/metrics` in the Prometheus text format until `shutdown`.
///
/// The future is boxed, so that the server is compiled once here and not in every program.
///
/// # Errors
/// The listener fails.
pub fn serve_metrics(
    listener: TcpListener,
    registry: Registry,
    shutdown: CancellationToken,
) -> Pin<Box<dyn Future<Output = io::Result<()>> + Send>> {
    let router = Router::new().route(
        "/metrics",
        get(move || {
            let registry = registry.clone();
            async move { render(&registry) }
        }),
    );
    let server = axum::serve(listener, router).with_graceful_shutdown(shutdown.cancelled_owned());
    Box::pin(async move { server.await })
}

/// Returns the metrics of `registry` as an HTTP response.
pub fn render(registry: &Registry) -> Response {
    match TextEncoder::new().encode_to_string(&registry.gather()) {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Registers a counter of refused connections by `reason`; all series exist from the start.
///
/// # Errors
/// The name is already registered.
pub fn refused_connections(
    registry: &Registry,
    reasons: impl IntoIterator<Item = &'static str>,
) -> Result<IntCounterVec, prometheus::Error> {
    let counter = IntCounterVec::new(
        Opts::new("remoe_connections_refused_total", "Refused connections by reason."),
        &["reason"],
    )?;
    reasons.into_iter().for_each(|reason| drop(counter.with_label_values(&[reason])));
    registry.register(Box::new(counter.clone()))?;
    Ok(counter)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_program_shows_what_it_is_and_what_it_takes() {
        let registry = program_registry(&[("class", "a\"b")]).unwrap();
        let page = TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        let build =
            concat!(r#"remoe_build_info{class="a\"b",version=""#, env!("CARGO_PKG_VERSION"), r#""} 1"#);
        assert!(page.lines().any(|line| line == build), "{page}");
        if cfg!(target_os = "linux") {
            let memory = page.lines().find_map(|line| line.strip_prefix("process_resident_memory_bytes "));
            assert!(memory.unwrap().parse::<u64>().unwrap() > 0, "{page}");
        }
    }

    #[test]
    fn the_path_is_shown_as_it_is_now() {
        static ASKED: AtomicUsize = AtomicUsize::new(0);
        let registry = Registry::new();
        let value = || ["first", "second"][ASKED.fetch_add(1, Ordering::Relaxed)];
        register_one_row_path(&registry, value).unwrap();
        for now in ["first", "second"] {
            let page = TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
            let lines: Vec<&str> = page.lines().filter(|line| !line.starts_with('#')).collect();
            assert_eq!(lines, [format!("remoe_one_row_path{{path=\"{now}\"}} 1")]);
        }
        let again = register_one_row_path(&registry, || "third");
        assert!(matches!(again, Err(prometheus::Error::AlreadyReg)));
    }
}
