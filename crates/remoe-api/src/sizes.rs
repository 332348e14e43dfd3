//! Ranges of sizes of functions.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

/// Memory sizes that functions may have, in MB of 1,000,000 bytes: min, min + step, and so on, up to max.
#[derive(KubeSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[x_kube(validation = Rule::new("self.min <= self.max").message("must be at least min").field_path(".max"))]
pub struct MemoryRange {
    /// Smallest size, in MB.
    #[schemars(range(min = 100, max = 10_000_000), extend("multipleOf" = 100))]
    pub min: u32,
    /// Largest size, in MB.
    #[schemars(range(min = 100, max = 10_000_000), extend("multipleOf" = 100))]
    pub max: u32,
    /// Difference between two sizes, in MB.
    #[serde(default = "memory_step")]
    #[schemars(range(min = 100, max = 10_000_000), extend("multipleOf" = 100))]
    pub step: u32,
}

/// vCPUs that functions may have, in millicores: min, min + step, and so on, up to max.
#[derive(KubeSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[x_kube(
    validation = Rule::new("self.min <= self.max").message("must be at least min").field_path(".max"),
    validation = Rule::new("(self.max - self.min) / self.step < 256")
        .message("must give at most 256 sizes; raise step").field_path(".step")
)]
pub struct CpuRange {
    /// Smallest size, in millicores.
    #[schemars(range(min = 10, max = 1_000_000))]
    pub min: u32,
    /// Largest size, in millicores.
    #[schemars(range(min = 10, max = 1_000_000))]
    pub max: u32,
    /// Difference between two sizes, in millicores.
    #[serde(default = "cpu_step")]
    #[schemars(range(min = 10, max = 1_000_000))]
    pub step: u32,
}

fn memory_step() -> u32 {
    100
}

fn cpu_step() -> u32 {
    500
}
