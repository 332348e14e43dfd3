//! Entry point of the process, for any backend.

use crate::{Backend, Error, Listeners, Settings, run};
use clap::Parser;
use remoe_process::{
    Role, announce, descriptors_for_runtime, end_with_launcher, init_logs, process_start, shutdown_on_signal,
};
use remoe_weights::spread_over_nodes;
use std::process::ExitCode;
use std::time::Instant;

/// Runs the function with the backend `B`, as the command line says. Returns the exit code.
pub fn main<B: Backend>() -> ExitCode {
    let started = process_start();
    let settings = Settings::parse();
    init_logs(Role::Main);
    match serve::<B>(settings, started) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn serve<B: Backend>(settings: Settings, started: Instant) -> Result<(), Error> {
    if let Some(launcher) = settings.launcher_pid {
        end_with_launcher(launcher).map_err(std::io::Error::other)?;
    }
    descriptors_for_runtime()?;
    spread_over_nodes();
    // HTTP and control need few threads; the engine has its own thread and runtime.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let outcome = runtime.block_on(async {
        let shutdown = shutdown_on_signal()?;
        let listeners = Listeners::bind(&settings)?;
        run::<B>(settings, listeners, started, shutdown, announce).await
    });
    // Blocking work that is left must not delay the exit.
    runtime.shutdown_background();
    outcome
}
