use std::fmt;
use std::str::FromStr;

/// A device by the name that users write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceName {
    /// The processor.
    Cpu,
    /// A CUDA device by index.
    Cuda(usize),
}

/// A device that is unknown or not there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Not of the form.
    #[error("device {0:?} is none of cpu, cuda, cuda:INDEX")]
    Unknown(String),
    /// LibTorch does not see it.
    #[error(
        "device cuda:{index} is not there: LibTorch sees {found} CUDA devices; it takes a LibTorch with CUDA (the image remoe-main-cuda, or LIBTORCH at build time), NVIDIA's driver and, in a pod, a GPU that it was given"
    )]
    Missing {
        /// The index asked for.
        index: usize,
        /// How many there are.
        found: usize,
    },
    /// The program's set of operations does not run there.
    #[error(
        "the {backend} operations do not run on {device}: take those of LibTorch (main-model-fn-torch, --backend torch, the image remoe-main-cuda)"
    )]
    Foreign {
        /// The device asked for.
        device: DeviceName,
        /// The set of operations.
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
    fn names() {
        assert_eq!("cpu".parse(), Ok(DeviceName::Cpu));
        assert_eq!("cuda".parse(), Ok(DeviceName::Cuda(0)));
        assert_eq!("cuda:3".parse(), Ok(DeviceName::Cuda(3)));
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cpu:0"] {
            assert!(wrong.parse::<DeviceName>().is_err(), "{wrong}");
        }
    }
}
