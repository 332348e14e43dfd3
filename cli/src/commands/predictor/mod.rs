//! `remoe predictor`: which experts a prompt will use, learned from what was recorded.

mod args;
mod build;
mod eval;
mod explain;
mod plot;

pub(crate) use args::PredictorArgs;

use crate::exit::CliError;
use args::Action;

/// Runs one of the actions.
pub(crate) fn run(args: &PredictorArgs, as_json: bool) -> Result<(), CliError> {
    match &args.action {
        Action::Build(args) => build::run(args, as_json),
        Action::Eval(args) => eval::run(args, as_json),
        Action::Explain(args) => explain::run(args, as_json),
    }
}
