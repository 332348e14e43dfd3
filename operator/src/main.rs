//! The `remoe-operator` process.

use clap::Parser;
use kube::{Client, Config};
use remoe_api::crds;
use remoe_operator::{Command, RunSettings, Settings, run};
use remoe_process::{Role, init_logs, listen, shutdown_on_signal};
use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// Timeout of connections to the API server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let settings = Settings::parse();
    let outcome = match settings.command {
        Some(Command::Crds { out }) => print_crds(out.as_deref()),
        None => {
            init_logs(Role::Main);
            operate(settings.run)
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            // Logging may not have been set up.
            let _closed = writeln!(std::io::stderr(), "remoe-operator: {error}");
            ExitCode::FAILURE
        }
    }
}

fn operate(settings: RunSettings) -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let outcome = runtime.block_on(async {
        let shutdown = shutdown_on_signal()?;
        let mut config = Config::infer().await?;
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        // Every call has its own deadline, and failed reconciles are retried as a whole.
        config.default_retry = false;
        let client = Client::try_from(config)?;
        let listener = listen(settings.metrics_listen)?;
        tracing::info!(address = %listener.local_addr()?, "serving probes and metrics");
        Ok(run(client, settings, listener, shutdown).await?)
    });
    // Remaining blocking work must not delay the exit.
    runtime.shutdown_background();
    outcome
}

fn print_crds(out: Option<&Path>) -> Result<(), Box<dyn Error>> {
    for (name, yaml) in crds()? {
        match out {
            Some(folder) => std::fs::write(folder.join(name), yaml)?,
            None => write!(std::io::stdout().lock(), "---\n{yaml}")?,
        }
    }
    Ok(())
}
