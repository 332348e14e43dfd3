//! Ways to serve a model.

use serde::Serialize;

/// A way to serve a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// Remote experts in groups that each hold a part of every layer.
    Sliced,
    /// Remote experts in a function per layer (the Remoe paper's form).
    Layers,
    /// All experts on the CPUs of the main function, everything else on the device.
    Mix,
    /// Everything on CPUs.
    Cpu,
    /// Everything on the device.
    Gpu,
    /// Experts in host memory, moved to the device when they are used; moves take their time.
    Fetch,
}

impl Way {
    /// Reports if experts are in functions of their own.
    #[must_use]
    pub fn has_remote_experts(self) -> bool {
        matches!(self, Self::Sliced | Self::Layers)
    }

    /// Returns the name that every report, page and error prints.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sliced => "remote experts in groups",
            Self::Layers => "remote experts by layer",
            Self::Mix => "experts on the main function's CPUs",
            Self::Cpu => "everything on CPUs",
            Self::Gpu => "everything on GPUs",
            Self::Fetch => "experts fetched to the GPU on use",
        }
    }

    /// Returns the name as one of [`Baselines`], where fetching takes no time.
    #[must_use]
    pub fn baseline_name(self) -> &'static str {
        match self {
            Self::Fetch => "experts fetched to the GPU on use (instant transfers)",
            other => other.name(),
        }
    }
}
