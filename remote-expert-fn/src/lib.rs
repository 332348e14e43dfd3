//! Remote-expert function: hosts a set of experts, each named by layer and id, and computes their outputs.
//!
//! At the start, it reads the checkpoint's headers, checks that the experts fit into memory, reads and packs exactly
//! their bytes, and listens. One thread drives all connections and computes small batches with the kernel pool; large
//! batches are computed on another thread ([`compute`]). [`admission`] bounds the queue between reading and
//! computing. No state outlives a request, so every replica can answer every request, also twice.

mod admission;
mod batch;
mod compute;
mod host;
mod metrics;
mod serve;
mod service;
mod settings;
mod spans;

pub use host::{HostError, HostedExperts};
#[doc(hidden)]
pub use service::check_work;
pub use settings::Settings;

use remoe_kernels::KernelError;
use remoe_model::CheckpointError;
use remoe_otel::TracesError;
use remoe_process::{Announcement, listen};
use remoe_proto::ListingError;
use remoe_proto::identity::IdentityError;
use remoe_weights::LoadError;
use std::io;
use std::pin::Pin;
use std::time::Instant;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Reason that a function cannot start or continue.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The checkpoint is invalid or unreadable.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// `--experts` is invalid.
    #[error(transparent)]
    Listing(#[from] ListingError),
    /// The experts cannot be hosted.
    #[error(transparent)]
    HostedExperts(HostError),
    /// The kernels cannot be started.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The certificate is invalid.
    #[error("--identity-dir: {0}")]
    Identity(#[from] IdentityError),
    /// The settings of tracing are invalid.
    #[error(transparent)]
    Traces(#[from] TracesError),
    /// A metric was registered twice.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
    /// The system refused a socket or a thread.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A computation panicked.
    #[error("the computation crashed; see the log lines above")]
    ComputationPanicked,
    /// The gRPC server failed.
    #[error("gRPC server: {0}")]
    Server(#[from] tonic::transport::Error),
}

impl From<HostError> for Error {
    fn from(error: HostError) -> Self {
        match error {
            HostError::Load(LoadError::Checkpoint(error)) => Self::Checkpoint(error),
            error => Self::HostedExperts(error),
        }
    }
}

/// Listening sockets of the function.
pub struct Listeners {
    /// Socket of the gRPC interface, for main functions.
    pub grpc: TcpListener,
    /// Socket of `/metrics`.
    pub metrics: TcpListener,
    /// Socket of `/healthz` and `/readyz`, if enabled.
    pub health: Option<TcpListener>,
}

impl Listeners {
    /// Binds the addresses in `settings`.
    ///
    /// # Errors
    /// An address is in use or not on this machine.
    pub fn bind(settings: &Settings) -> io::Result<Self> {
        Ok(Self {
            grpc: listen(settings.listen)?,
            metrics: listen(settings.metrics_listen)?,
            health: settings.health_listen.map(listen).transpose()?,
        })
    }
}

/// Loads the experts, serves on `listeners`, and drains when `shutdown` is cancelled. Calls `ready` once, when
/// connections are accepted.
///
/// The future is boxed so that this crate compiles it, and not the program again.
///
/// # Errors
/// See [`Error`].
pub fn run(
    settings: Settings,
    listeners: Listeners,
    started: Instant,
    shutdown: CancellationToken,
    ready: fn(&Announcement) -> io::Result<()>,
) -> Pin<Box<dyn Future<Output = Result<(), Error>>>> {
    Box::pin(serve::run_traced(settings, listeners, started, shutdown, ready))
}
