//! Settings of the program.

use clap::builder::RangedU64ValueParser;
use remoe_hub::ModelArgs;
use remoe_kernels::{InstructionPath, MAX_THREADS};
use remoe_model::ExpertsDtype;
use remoe_process::{sizes, whole_microseconds};
use remoe_weights::ComputeDtype;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Hosts a set of experts of a Mixture-of-Experts checkpoint and computes them over gRPC.
#[derive(Debug, Clone, clap::Parser)]
#[command(name = "remote-expert-fn", version)]
pub struct Settings {
    /// The model.
    #[command(flatten)]
    pub source: ModelArgs,
    /// Experts to host, as LAYER:IDS with ids and ranges, such as 1:6-7,2:0,5-7.
    #[arg(long)]
    pub experts: String,
    /// Compute dtype: float32 or bfloat16. Defaults to that of the checkpoint (float32 for float16).
    #[arg(long)]
    pub dtype: Option<ComputeDtype>,
    /// Quantisation of experts at load time: int8, int4 or mxfp4, or fp8 if they are stored as fp8. Defaults to the
    /// compute dtype. Must be equal for all functions of a deployment.
    #[arg(long)]
    pub experts_dtype: Option<ExpertsDtype>,
    /// Memory limit. Default: none. The part beyond weights and working memory bounds the bytes in flight.
    #[arg(long, value_name = "SIZE", value_parser = sizes::<u64>(1..=u64::MAX))]
    pub memory_bytes: Option<u64>,
    /// Compute threads. Defaults to all cores.
    #[arg(long, value_parser = RangedU64ValueParser::<usize>::new().range(1..=MAX_THREADS as u64))]
    pub threads: Option<usize>,
    /// Polling time for the next request before the thread sleeps, such as 1ms or a number of microseconds. Polling keeps a core busy; use
    /// 0 below one vCPU.
    #[arg(long, value_name = "TIME", default_value_t = 1000, value_parser = whole_microseconds::<u64>(0..=1_000_000))]
    pub poll_us: u64,
    /// Instruction path of the kernels. Defaults to the fastest measured one.
    #[arg(long)]
    pub instruction_path: Option<InstructionPath>,
    /// Address of the gRPC interface. Port 0 selects a free port.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Address of /metrics. Port 0 selects a free port.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub metrics_listen: SocketAddr,
    /// Address of /healthz and /readyz. Default: none. Port 0 selects a free port.
    #[arg(long)]
    pub health_listen: Option<SocketAddr>,
    /// Folder with tls.crt, tls.key and ca.crt: enables mutual TLS for main functions of the same deployment. Files
    /// are reloaded on change.
    #[arg(long, value_name = "DIR", env = "REMOE_IDENTITY_DIR")]
    pub identity_dir: Option<PathBuf>,
    /// Maximum number of requests in flight, all streams together.
    #[arg(long, default_value_t = 1024, value_parser = RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    pub max_in_flight: usize,
    /// Maximum bytes in flight (requests and their answers), also bounded by `--memory-bytes`.
    #[arg(long, value_name = "SIZE", default_value_t = 256 << 20, value_parser = sizes::<usize>(1..=1 << 40))]
    pub max_in_flight_bytes: usize,
    /// Process id of the launcher; the function ends with it.
    #[arg(long)]
    pub launcher_pid: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn polling_time_accepts_a_unit_or_microseconds() {
        let parsed = |poll: &str| {
            let arguments = ["remote-expert-fn", "model", "--experts", "0:0", "--poll-us", poll];
            Settings::try_parse_from(arguments).map(|settings| settings.poll_us).ok()
        };
        assert_eq!(
            ["0", "250", "250us", "1ms", "2s"].map(parsed),
            [Some(0), Some(250), Some(250), Some(1000), None]
        );
    }
}
