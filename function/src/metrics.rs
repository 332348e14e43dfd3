use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Router, routing::get};
use prometheus::{IntCounterVec, IntGauge, Opts, Registry, TextEncoder};
use std::io;
use std::pin::Pin;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// A registry with what every program shows: `remoe_build_info`, whose labels are its version and `facts`, names with
/// values, and on Linux the `process_*` that Prometheus defines, of the calling process.
///
/// # Errors
/// The name of a fact is no name of a label.
pub fn program_registry(facts: &[(&str, &str)]) -> Result<Registry, prometheus::Error> {
    let registry = Registry::new();
    let opts = Opts::new("remoe_build_info", "1, with what this program is.");
    let opts = opts.const_label("version", env!("CARGO_PKG_VERSION"));
    let opts = facts.iter().fold(opts, |opts, (name, value)| opts.const_label(*name, *value));
    let build = IntGauge::with_opts(opts)?;
    build.set(1);
    registry.register(Box::new(build))?;
    #[cfg(target_os = "linux")]
    registry.register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))?;
    Ok(registry)
}

/// Serves `registry` at `/metrics` in the Prometheus text format until `shutdown`.
///
/// The future is boxed, so that a server is compiled here and not once more in every program.
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

/// The metrics of `registry` as an HTTP answer.
pub fn render(registry: &Registry) -> Response {
    match TextEncoder::new().encode_to_string(&registry.gather()) {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Counts connections that a port did not let in, by `reason`, each of which there is from the start.
///
/// # Errors
/// The name is taken in `registry`.
pub fn refused_connections(
    registry: &Registry,
    reasons: impl IntoIterator<Item = &'static str>,
) -> Result<IntCounterVec, prometheus::Error> {
    let counter = IntCounterVec::new(
        Opts::new("remoe_connections_refused_total", "Connections that were not let in, by reason."),
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
}
