//! The `remoe-gateway` process: the address of all deployments of a cluster.
//!
//! It follows `MoEDemand`s, in which the operator states the models, their phases, the addresses of their functions
//! and the prices. [`remoe_gateway_core`] serves clients.

mod catalogue;
mod cost_recorder;
mod demand_writer;
mod deployment;
mod history_folder;
mod lease;
mod main_functions;
mod probes;
mod run;
mod settings;
mod shared_budgets;
mod usage_learner;

use clap::Parser;
use remoe_process::{Role, init_logs, shutdown_on_signal};
use settings::GatewaySettings;
use std::error::Error;
use std::process::ExitCode;

fn main() -> ExitCode {
    let settings = GatewaySettings::parse();
    init_logs(Role::Main);
    match serve(settings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(settings: GatewaySettings) -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(async { Ok(run::run(settings, shutdown_on_signal()?).await?) });
    // Requests that did not end in time must not hold up the exit.
    runtime.shutdown_background();
    outcome
}
