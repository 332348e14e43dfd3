//! Command-line arguments.

mod examples;

use crate::commands::check::CheckArgs;
use crate::commands::completions::{CompletionsArgs, ManArgs};
use crate::commands::convert::ConvertArgs;
use crate::commands::cost::CostArgs;
use crate::commands::dashboards::DashboardsArgs;
use crate::commands::doctor::DoctorArgs;
use crate::commands::eval::EvalArgs;
use crate::commands::generate::GenerateArgs;
use crate::commands::inspect::InspectArgs;
use crate::commands::logits::LogitsArgs;
use crate::commands::models::{ListArgs, PullArgs, RmArgs};
use crate::commands::plan::PlanArgs;
use crate::commands::predictor::PredictorArgs;
use crate::commands::profile::ProfileArgs;
use crate::commands::ps::{PsArgs, StopArgs};
use crate::commands::record::RecordArgs;
use crate::commands::run::RunArgs;
use crate::commands::schema::SchemaArgs;
use crate::commands::top::TopArgs;
use crate::commands::up::UpArgs;
use clap::{Parser, Subcommand};

/// Serves Mixture-of-Experts models with remote experts.
#[derive(Debug, Parser)]
#[command(name = "remoe", version, about = ABOUT, propagate_version = true, after_help = EXAMPLES)]
pub(crate) struct Cli {
    /// Print JSON on standard output (one object; `up`: one per event), everything else on standard error
    #[arg(long, global = true, help_heading = "Output")]
    pub(crate) json: bool,
    /// Show all log lines of the functions, not only warnings and errors; in `plan`, show how the plan was found
    #[arg(long, short, global = true, help_heading = "Output")]
    pub(crate) verbose: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show the architecture of a checkpoint and the sizes of its parts
    #[command(after_help = examples::INSPECT)]
    Inspect(InspectArgs),
    /// Show the next-token logits of a prompt and the experts that it used
    #[command(after_help = examples::LOGITS)]
    Logits(LogitsArgs),
    /// Answer one prompt
    #[command(after_help = examples::GENERATE)]
    Generate(GenerateArgs),
    /// Chat with a model in the terminal, or answer prompts from a pipe
    #[command(after_help = examples::RUN)]
    Run(RunArgs),
    /// Serve a model over HTTP until Ctrl-C
    #[command(after_help = examples::UP, override_usage = "remoe up [OPTIONS] [MODEL]...")]
    Up(Box<UpArgs>),
    /// Fetch a whole model into the cache, if disk has room for it; a download that ended early is continued
    #[command(after_help = examples::PULL)]
    Pull(PullArgs),
    /// List the models in the cache and the disk space that they take
    #[command(after_help = examples::LIST)]
    List(ListArgs),
    /// Remove a model from the cache
    #[command(after_help = examples::RM)]
    Rm(RmArgs),
    /// List the deployments on this machine
    #[command(after_help = examples::PS)]
    Ps(PsArgs),
    /// Stop a deployment on this machine, by model name or process id
    #[command(after_help = examples::STOP)]
    Stop(StopArgs),
    /// Show requests, rates, latencies, memory and cost of each model at an endpoint, every second until q or Ctrl-C
    #[command(after_help = examples::TOP)]
    Top(TopArgs),
    /// Show the cost of requests and of functions in US dollars, from a ledger
    #[command(after_help = examples::COST)]
    Cost(CostArgs),
    /// Write a configuration for Prometheus and Grafana, with dashboards of cost, serving, plan and health
    #[command(after_help = examples::DASHBOARDS)]
    Dashboards(DashboardsArgs),
    /// Plan the placement of experts, with its latency and cost
    #[command(after_help = examples::PLAN)]
    Plan(PlanArgs),
    /// Measure the hardware profile of this machine for a model
    #[command(after_help = examples::PROFILE)]
    Profile(ProfileArgs),
    /// Run a set of prompts and record which experts they use
    #[command(after_help = examples::RECORD)]
    Record(RecordArgs),
    /// Predict which experts a prompt will use, from recorded activations
    Predictor(PredictorArgs),
    /// Compare the cost of placement strategies, on published models and on your own
    #[command(after_help = examples::EVAL)]
    Eval(EvalArgs),
    /// Convert a dense checkpoint into a Mixture-of-Experts one
    Convert(ConvertArgs),
    /// Check this machine for serving models, and advise on what is missing
    #[command(after_help = examples::DOCTOR)]
    Doctor(DoctorArgs),
    /// Check files before they are used: keys, workloads, plans, problems, profiles, nodes, prices, MoEDeployments
    #[command(after_help = examples::CHECK)]
    Check(CheckArgs),
    /// Print the JSON schema of a file that planning reads, or list these files
    #[command(after_help = examples::SCHEMA)]
    Schema(SchemaArgs),
    /// Print the completion script of a shell
    #[command(visible_alias = "completion", after_help = examples::COMPLETIONS)]
    Completions(CompletionsArgs),
    /// Write the manual pages into a folder
    #[command(after_help = examples::MAN)]
    Man(ManArgs),
}

const ABOUT: &str = "Serves Mixture-of-Experts models with remote experts.\n\
                     A model runs as one main function and, if planned or asked for, remote functions that hold some \
                     of its experts. Each function is a process.";

const EXAMPLES: &str = "Examples:
  remoe run ./model
  remoe inspect ./model
  remoe generate ./model --prompt 'Once upon a time' --remote-ratio 0.5
  remoe up ./model --port 8000

Values:
  SIZE   500MB, 2GiB or plain bytes
  TIME   200ms, 10s, 1.5s, 10m, 2h or 1m30s: always with the unit
  SHARE  0.05 for 5%; --cold-share accepts both forms

Environment:
  REMOE_BIN_DIR          Folder of main-model-fn and remote-expert-fn [default: that of remoe]
  REMOE_BACKEND          Same as --backend
  REMOE_LOG              Log level or filter of the functions, e.g. debug; implies --verbose
  REMOE_API_KEY          Same as --api-key
  REMOE_MODEL_CACHE      Same as --model-cache
  HF_TOKEN, HF_ENDPOINT  Access to models hf://ORGANISATION/NAME
  AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL
                         Access to models s3://BUCKET/PREFIX";

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::commands::up::UpArgs;
    use crate::flags::READY_TIMEOUT;

    fn up(arguments: &[&str]) -> Result<UpArgs, String> {
        let line = [&["remoe", "up", "model"], arguments].concat();
        match Cli::try_parse_from(line).map_err(|error| error.to_string())?.command {
            Command::Up(args) => Ok(*args),
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn duration_flags_share_one_grammar() {
        for (text, seconds) in [("10m", 600), ("2h", 7200), ("1m30s", 90), ("1500ms", 1)] {
            let args =
                up(&["--idle", text, "--tpot", text, "--queue-deadline", text, "--ready-timeout", text]);
            let args = args.unwrap();
            let parsed = [
                args.idle,
                Some(args.planning.tpot),
                args.queue_deadline,
                Some(args.deployment.ready_timeout),
            ];
            assert!(parsed.iter().all(|parsed| parsed.unwrap().as_secs() == seconds), "{text}: {parsed:?}");
        }
        let error = up(&["--idle", "10"]).unwrap_err();
        assert!(error.contains("'10'") && error.contains("write 10ms, 10s, 10m or 10h"), "{error}");
    }

    #[test]
    fn ready_timeout_without_unit_is_in_seconds() {
        for (text, seconds) in [("120", 120), ("120s", 120), ("2m", 120), ("3600", 3600)] {
            assert_eq!(up(&["--ready-timeout", text]).unwrap().deployment.ready_timeout.as_secs(), seconds);
        }
        assert_eq!(up(&[]).unwrap().deployment.ready_timeout, READY_TIMEOUT);
        for text in ["0", "soon", "1e3", "-1"] {
            assert!(
                up(&[&format!("--ready-timeout={text}")]).unwrap_err().contains("--ready-timeout"),
                "{text}"
            );
        }
    }
}
