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

/// Why the function cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The checkpoint is unusable.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The tokenizer or chat template is unusable.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The weights cannot be brought to the device.
    #[error(transparent)]
    Load(#[from] LoadModelError),
    /// An expert cannot be brought into memory.
    #[error(transparent)]
    Expert(#[from] LoadError),
    /// The device is not there.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Weights outside of experts cannot be kept as they should.
    #[error("invalid --dense-dtype {asked}: {why}")]
    DenseDtype {
        /// Dtype that was asked for.
        asked: String,
        /// Reason against it.
        why: String,
    },
    /// The operations do not have the form of the KV cache.
    #[error(
        "cannot keep the KV cache as --kv-cache-dtype says: {operations} operations have keys and values in the compute \
         dtype only; omit the flag, or use --backend native on CPUs"
    )]
    KvCacheDtype {
        /// Operations that compute.
        operations: &'static str,
    },
    /// The chat template does not read a variable that is set.
    #[error("invalid --chat-template-kwargs: the model's chat template does not read `{0}`; omit it")]
    TemplateVariable(String),
    /// The kernels cannot be used.
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
    /// Traces are asked for in a way that there is not.
    #[error(transparent)]
    Traces(#[from] TracesError),
    /// A socket or thread cannot be had.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The gRPC server failed.
    #[error("gRPC server: {0}")]
    Server(#[from] tonic::transport::Error),
    /// The device does not answer any more; a new process may find it again.
    #[error("the device is lost; see the log lines above, and nvidia-smi for its state")]
    DeviceLost,
    /// The engine's thread ended on its own.
    #[error("the engine crashed; see the log lines above")]
    Engine,
}

/// Exit code that tells launchers of a failure that may not recur at another start.
const EXIT_RUNTIME: u8 = 1;
/// This machine has no such device.
const EXIT_DEVICE: u8 = 3;
/// The checkpoint is at fault: starting again does not help.
const EXIT_CHECKPOINT: u8 = 4;

impl Error {
    /// The exit code of a function that ends for it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Device(DeviceError::Missing { .. }) => EXIT_DEVICE,
            error if error.is_checkpoint() => EXIT_CHECKPOINT,
            _ => EXIT_RUNTIME,
        }
    }

    /// Reports if the checkpoint is at fault, so that starting again does not help.
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
    fn launchers_read_what_failed_from_the_exit_code() {
        let missing = DeviceError::Missing { index: 0, found: 0 };
        assert_eq!(Error::from(missing).exit_code(), 3);
        assert_eq!(Error::from(DeviceError::Unknown("gpu".to_owned())).exit_code(), 1);
        assert_eq!(Error::from(io::Error::other("no thread")).exit_code(), 1);
        let incomplete = CheckpointError::MissingFile { path: "config.json".into(), message: String::new() };
        assert_eq!(Error::from(incomplete).exit_code(), 4);
    }
}
