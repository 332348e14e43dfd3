//! The `remoe-gateway` process: the front door of a cluster.
//!
//! It reads `MoEDemand`s and nothing else: the operator says there which models there are, whether functions run, where, and
//! what they cost. What clients see is [`remoe_gateway_core`]'s.

mod catalogue;
mod cost_recorder;
mod demand_writer;
mod experience;
mod lease;
mod mains;
mod probes;
mod run;
mod served;
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
