//! A remote-expert function: it hosts a set of (layer, expert) and computes their outputs.
//!
//! Start: read the headers, refuse what does not fit, read and pack exactly the hosted byte ranges,
//! listen. One thread drives the connections and computes small work with the kernel pool; large
//! work is computed on another ([`compute`]). Between reading and computing stands a queue that
//! [`admission`] bounds. It holds no state that outlives a request, so any replica can answer any
//! request, twice if need be.

mod admission;
mod compute;
mod host;
mod metrics;
mod pass;
mod serve;
mod service;
mod settings;
mod spans;

pub use host::{Host, HostError};
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

/// Why a function cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The checkpoint is unusable.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// `--experts` cannot be read.
    #[error(transparent)]
    Listing(#[from] ListingError),
    /// The experts cannot be hosted.
    #[error(transparent)]
    Host(HostError),
    /// The kernels cannot be used.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The certificate cannot be used.
    #[error("--identity-dir: {0}")]
    Identity(#[from] IdentityError),
    /// Traces are asked for in a way that there is not.
    #[error(transparent)]
    Traces(#[from] TracesError),
    /// A metric is registered twice.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
    /// A socket or thread cannot be had.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A computation panicked.
    #[error("the computation crashed; see the log lines above")]
    Computer,
    /// The gRPC server failed.
    #[error("gRPC server: {0}")]
    Server(#[from] tonic::transport::Error),
}

impl From<HostError> for Error {
    fn from(error: HostError) -> Self {
        match error {
            HostError::Load(LoadError::Checkpoint(error)) => Self::Checkpoint(error),
            error => Self::Host(error),
        }
    }
}

/// The sockets of the function.
pub struct Listeners {
    /// For main functions.
    pub grpc: TcpListener,
    /// For scrapers.
    pub metrics: TcpListener,
    /// For probes; absent if there are none.
    pub health: Option<TcpListener>,
}

impl Listeners {
    /// Binds what `settings` name.
    ///
    /// # Errors
    /// An address is taken or not ours.
    pub fn bind(settings: &Settings) -> io::Result<Self> {
        Ok(Self {
            grpc: listen(settings.listen)?,
            metrics: listen(settings.metrics_listen)?,
            health: settings.health_listen.map(listen).transpose()?,
        })
    }
}

/// Loads what `settings` name, serves on `listeners` and drains when `shutdown` is cancelled.
/// `ready` is called once, when connections are accepted.
///
/// The future is boxed, so that the function is compiled here and not once more in its program.
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
    Box::pin(serve::traced(settings, listeners, started, shutdown, ready))
}
