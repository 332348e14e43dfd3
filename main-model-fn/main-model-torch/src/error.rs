use main_model_fn::backend::BackendError;
use tch::TchError;

/// LibTorch refused.
pub(crate) fn refused(error: TchError) -> BackendError {
    BackendError::Library { library: "LibTorch", message: error.to_string() }
}

/// Converts the errors of LibTorch into [`BackendError`].
pub(crate) trait Refused<T> {
    /// # Errors
    /// LibTorch's own.
    fn told(self) -> Result<T, BackendError>;
}

impl<T> Refused<T> for Result<T, TchError> {
    fn told(self) -> Result<T, BackendError> {
        self.map_err(refused)
    }
}
