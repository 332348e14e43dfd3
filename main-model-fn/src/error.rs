//! Errors of the function, and the exit codes that launchers read.

use crate::backend::LoadModelError;
use crate::device::DeviceError;
use crate::records::RecordFileError;
use remoe_kernels::KernelError;
use remoe_model::CheckpointError;
use remoe_model::text::TextError;
use remoe_otel::TracesError;
use remoe_proto::identity::IdentityError;
use remoe_weights::LoadError;
use std::io;

/// Failure that prevents the function from starting or continuing.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The checkpoint is unusable.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The tokenizer or chat template is unusable.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The weights cannot be loaded onto the device.
    #[error(transparent)]
    Load(#[from] LoadModelError),
    /// An expert cannot be loaded.
    #[error(transparent)]
    Expert(#[from] LoadError),
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Weights outside of experts cannot have the requested dtype.
    #[error("invalid --dense-dtype {asked}: {why}")]
    DenseDtype {
        /// Requested dtype.
        asked: String,
        /// Reason.
        why: String,
    },
    /// The backend does not support the requested format of the KV cache.
    #[error(
        "cannot keep the KV cache as --kv-cache-dtype says: {operations} operations have keys and values in the compute \
         dtype only; omit the flag, or use --backend native on CPUs"
    )]
    KvCacheDtype {
        /// Name of the backend.
        operations: &'static str,
    },
    /// The chat template does not read a variable that is set.
    #[error("invalid --chat-template-kwargs: the model's chat template does not read `{0}`; omit it")]
    TemplateVariable(String),
    /// The kernels cannot run.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Activations cannot be recorded.
    #[error("activation records: {0}")]
    Records(#[from] RecordFileError),
    /// The certificate cannot be used.
    #[error("--identity-dir: {0}")]
    Identity(#[from] IdentityError),
    /// A metric is registered twice.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
    /// The tracing settings in the environment are invalid.
    #[error(transparent)]
    Traces(#[from] TracesError),
    /// A socket or thread cannot be created.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The gRPC server failed.
    #[error("gRPC server: {0}")]
    Server(#[from] tonic::transport::Error),
    /// The device stopped answering; a new process may be able to use it again.
    #[error("the device is lost; see the log lines above, and nvidia-smi for its state")]
    DeviceLost,
    /// The engine's thread ended by itself.
    #[error("the engine crashed; see the log lines above")]
    Engine,
}

/// Exit code for failures that may not recur at the next start.
const EXIT_RUNTIME: u8 = 1;
/// Exit code if the machine lacks the device.
const EXIT_DEVICE: u8 = 3;
/// Exit code if the checkpoint is at fault: a restart does not help.
const EXIT_CHECKPOINT: u8 = 4;

impl Error {
    /// Returns the exit code of a function that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Device(DeviceError::Missing { .. }) => EXIT_DEVICE,
            error if error.is_checkpoint() => EXIT_CHECKPOINT,
            _ => EXIT_RUNTIME,
        }
    }

    /// Reports if the checkpoint is at fault, so that a restart does not help.
    pub fn is_checkpoint(&self) -> bool {
        match self {
            Self::Checkpoint(error)
            | Self::Text(TextError::Checkpoint(error))
            | Self::Load(LoadModelError::Checkpoint(error))
            | Self::Expert(LoadError::Checkpoint(error)) => !error.is_transient(),
            Self::Text(_) | Self::TemplateVariable(_) => true,
            Self::Load(_) | Self::Expert(_) => false,
            Self::Device(_)
            | Self::DenseDtype { .. }
            | Self::KvCacheDtype { .. }
            | Self::Kernel(_)
            | Self::Records(_)
            | Self::Identity(_)
            | Self::Metrics(_)
            | Self::Io(_)
            | Self::Server(_)
            | Self::Traces(_)
            | Self::DeviceLost
            | Self::Engine => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_code_tells_the_kind_of_failure() {
        let missing = DeviceError::Missing { index: 0, found: 0 };
        assert_eq!(Error::from(missing).exit_code(), 3);
        assert_eq!(Error::from(DeviceError::Unknown("gpu".to_owned())).exit_code(), 1);
        assert_eq!(Error::from(io::Error::other("no thread")).exit_code(), 1);
        let incomplete = CheckpointError::MissingFile { path: "config.json".into(), message: String::new() };
        assert_eq!(Error::from(incomplete).exit_code(), 4);
    }
}
