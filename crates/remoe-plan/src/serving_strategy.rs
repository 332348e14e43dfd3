//! Strategies to serve a model.

use serde::Serialize;

/// Strategy to serve a model: where experts and the non-expert part are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ServingStrategy {
    /// Remote experts in groups that each host a slice of every layer.
    Sliced,
    /// Remote experts in one function for each layer (the Remoe paper's form).
    Layers,
    /// All experts on the CPUs of the main function, the rest on the GPU.
    Mix,
    /// Everything on CPUs.
    Cpu,
    /// Everything on the GPU.
    Gpu,
    /// Offloading: experts in host memory, moved to the GPU when they are used, with the time of the moves.
    Fetch,
}

impl ServingStrategy {
    /// Reports if experts are in remote functions.
    #[must_use]
    pub fn has_remote_experts(self) -> bool {
        matches!(self, Self::Sliced | Self::Layers)
    }

    /// Returns the name that reports, pages and errors print.
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

    /// Returns the name of the strategy among [`Baselines`](crate::Baselines), where moves take no time.
    #[must_use]
    pub fn baseline_name(self) -> &'static str {
        match self {
            Self::Fetch => "experts fetched to the GPU on use (instant transfers)",
            other => other.name(),
        }
    }
}
