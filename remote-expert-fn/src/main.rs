//! The `remote-expert-fn` process.

use clap::Parser;
use remoe_process::{
    Role, announce, descriptors_for_runtime, end_with_launcher, init_logs, shutdown_on_signal,
};
use remoe_weights::spread_over_nodes;
use remote_expert_fn::{Error, HostError, Listeners, Settings, run};
use std::process::ExitCode;
use std::time::Instant;

/// Exit code for launchers: the experts do not fit into the memory limit.
const EXIT_MEMORY: u8 = 3;
/// Exit code for launchers: the checkpoint is invalid, and a restart does not help.
const EXIT_CHECKPOINT: u8 = 4;

fn main() -> ExitCode {
    let started = Instant::now();
    let settings = Settings::parse();
    init_logs(Role::Remote);
    match serve(settings, started) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            match error {
                Error::Checkpoint(error) if !error.is_transient() => ExitCode::from(EXIT_CHECKPOINT),
                Error::HostedExperts(HostError::TooLarge { .. } | HostError::AddressSpace { .. }) => {
                    ExitCode::from(EXIT_MEMORY)
                }
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn serve(settings: Settings, started: Instant) -> Result<(), Error> {
    if let Some(launcher) = settings.launcher_pid {
        end_with_launcher(launcher).map_err(std::io::Error::other)?;
    }
    descriptors_for_runtime()?;
    spread_over_nodes();
    // One thread drives all connections, which is faster than a pool. Computation has its own threads.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(async {
        let shutdown = shutdown_on_signal()?;
        let listeners = Listeners::bind(&settings)?;
        run(settings, listeners, started, shutdown, announce).await
    });
    // Does not wait for blocking work at exit.
    runtime.shutdown_background();
    outcome
}
