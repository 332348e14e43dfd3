//! Names of compute devices.

use std::fmt;
use std::str::FromStr;

/// A compute device by the name that users write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceName {
    /// The CPU.
    Cpu,
    /// A CUDA device, by index.
    Cuda(usize),
}

/// An unknown or missing device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The name has an invalid form.
    #[error("expected cpu, cuda or cuda:INDEX, got {0:?}")]
    Unknown(String),
    /// LibTorch does not find the device.
    #[error(
        "cannot use device cuda:{index}: LibTorch lacks it (CUDA devices found: {found}); use a LibTorch with CUDA \
         (image remoe-main-cuda, or LIBTORCH at build time) and the NVIDIA driver, and request a GPU in a pod"
    )]
    Missing {
        /// Requested index.
        index: usize,
        /// Number of CUDA devices found.
        found: usize,
    },
    /// The program's backend does not support the device.
    #[error(
        "backend {backend} does not support {device}; use LibTorch (main-model-fn-torch, --backend torch, image \
         remoe-main-cuda)"
    )]
    Foreign {
        /// Requested device.
        device: DeviceName,
        /// Name of the backend.
        backend: &'static str,
    },
}

impl FromStr for DeviceName {
    type Err = DeviceError;

    fn from_str(name: &str) -> Result<Self, DeviceError> {
        let unknown = || DeviceError::Unknown(name.to_owned());
        match name.split_once(':') {
            None if name == "cpu" => Ok(Self::Cpu),
            None if name == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", index)) => index.parse().map(Self::Cuda).map_err(|_| unknown()),
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_are_parsed() {
        assert_eq!("cpu".parse(), Ok(DeviceName::Cpu));
        assert_eq!("cuda".parse(), Ok(DeviceName::Cuda(0)));
        assert_eq!("cuda:3".parse(), Ok(DeviceName::Cuda(3)));
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cpu:0"] {
            assert!(wrong.parse::<DeviceName>().is_err(), "{wrong}");
        }
    }
}
