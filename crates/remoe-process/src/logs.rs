//! Structured logs.

use crate::Role;
use std::io::IsTerminal;
use tracing_subscriber::{EnvFilter, fmt};

/// Initialises structured logs on standard error: JSON lines, or plain lines on a terminal. `REMOE_LOG` filters them
/// (`info` by default; see `tracing_subscriber::EnvFilter` for the syntax). If standard error is closed or full, logs
/// are lost and the process continues.
pub fn init_logs(role: Role) {
    let filter = EnvFilter::try_from_env("REMOE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // They would be reported on standard error, where a failure panics.
        .log_internal_errors(false);
    // A second initialisation (tests run functions in-process) keeps the first.
    let _already_set = if std::io::stderr().is_terminal() {
        builder.compact().try_init()
    } else {
        builder.json().flatten_event(true).try_init()
    };
    tracing::debug!(?role, version = env!("CARGO_PKG_VERSION"), "logging");
}
