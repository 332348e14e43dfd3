use clap::builder::RangedU64ValueParser;
use remoe_experts::ComputeDtype;
use remoe_fetch::ModelArgs;
use remoe_function::sizes;
use remoe_kernels::{InstructionPath, MAX_THREADS};
use remoe_model::ExpertsDtype;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Hosts a set of experts of a Mixture-of-Experts checkpoint and computes them over gRPC.
#[derive(Debug, Clone, clap::Parser)]
#[command(name = "remote-expert-fn", version)]
pub struct Settings {
    /// The model.
    #[command(flatten)]
    pub source: ModelArgs,
    /// What to host, as LAYER:IDS with ids and ranges, for example 1:6-7,2:0,5-7.
    #[arg(long)]
    pub experts: String,
    /// Compute dtype: float32 or bfloat16; the checkpoint's by default (float32 for float16).
    #[arg(long)]
    pub dtype: Option<ComputeDtype>,
    /// Form in which experts are kept: int8, int4 or mxfp4, quantised as they are loaded, or fp8, as it is stored; the compute dtype by
    /// default. The same for all functions of a deployment.
    #[arg(long)]
    pub experts_dtype: Option<ExpertsDtype>,
    /// Memory that the function may take; no limit by default. What weights and working memory leave of it
    /// bounds the bytes in flight.
    #[arg(long, value_name = "SIZE", value_parser = sizes::<u64>(1..=u64::MAX))]
    pub memory_bytes: Option<u64>,
    /// Threads of the kernels; all cores by default.
    #[arg(long, value_parser = RangedU64ValueParser::<usize>::new().range(1..=MAX_THREADS as u64))]
    pub threads: Option<usize>,
    /// Microseconds for which the function polls for the next request before it sleeps. Polling keeps a
    /// core busy: 0 for a function with less than a vCPU of its own.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    pub poll_us: u64,
    /// Instruction path of the kernels: what is measured fastest, by default.
    #[arg(long)]
    pub instruction_path: Option<InstructionPath>,
    /// Where to speak gRPC; port 0 takes any free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Where to serve /metrics; port 0 takes any free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub metrics_listen: SocketAddr,
    /// Where probes find /healthz and /readyz; nowhere by default. Port 0 takes any free one.
    #[arg(long)]
    pub health_listen: Option<SocketAddr>,
    /// Folder with tls.crt, tls.key and ca.crt: only main functions of the deployment that the certificate
    /// names are answered then, within TLS. Files are read again when they change.
    #[arg(long, value_name = "DIR", env = "REMOE_IDENTITY_DIR")]
    pub identity_dir: Option<PathBuf>,
    /// Requests accepted and not yet answered, all streams together.
    #[arg(long, default_value_t = 1024, value_parser = RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    pub max_in_flight: usize,
    /// Bytes of accepted requests and their answers, as far as `--memory-bytes` leaves room.
    #[arg(long, value_name = "SIZE", default_value_t = 256 << 20, value_parser = sizes::<usize>(1..=1 << 40))]
    pub max_in_flight_bytes: usize,
    /// End with this process.
    #[arg(long)]
    pub launcher_pid: Option<u32>,
}
