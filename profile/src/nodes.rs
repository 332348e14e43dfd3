//! Nodes as a price list has them.

use crate::error::{NodesError, unreadable};
use serde::{Deserialize, Serialize};

/// Shapes of a list, at most.
const MOST_SHAPES: usize = 200;
const LONGEST_NAME: usize = 100;
/// No node has more.
const MOST_VCPUS: f64 = 4096.0;
const MOST_MEMORY_GB: f64 = 100_000.0;
const MOST_GPUS: u32 = 64;
const MOST_GPU_MEMORY_GB: f64 = 4096.0;
const MOST_PER_HOUR: f64 = 1e6;
const MOST_NODES: u32 = 100_000;
const MOST_GB_PER_SECOND: f64 = 1e6;
const MOST_TERAFLOPS: f64 = 1e6;

/// Shapes of nodes with what they cost, in YAML or JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeList {
    /// Where the prices stand, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// When they were read, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
    /// The shapes.
    pub nodes: Vec<ListedNode>,
}

/// A node as it is sold. 1 GB is 1e9 bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ListedNode {
    /// Its name.
    pub name: String,
    /// vCPUs.
    pub vcpus: f64,
    /// Main memory in GB.
    #[serde(rename = "memoryGB")]
    pub memory_gb: f64,
    /// GPUs.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gpus: u32,
    /// Memory of each GPU in GB.
    #[serde(rename = "gpuMemoryGB", default, skip_serializing_if = "Option::is_none")]
    pub gpu_memory_gb: Option<f64>,
    /// Dollars per hour.
    pub per_hour: f64,
    /// Whether it may be taken back at any time, at this price.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub spot: bool,
    /// How many can be had; as many as one likes where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
    /// GB that its memory is specified to move per second, all of it; derived from the vCPUs where absent.
    #[serde(rename = "memoryBandwidthGBs", default, skip_serializing_if = "Option::is_none")]
    pub memory_bandwidth_gbs: Option<f64>,
    /// The same of each GPU; derived from its memory where absent.
    #[serde(rename = "gpuBandwidthGBs", default, skip_serializing_if = "Option::is_none")]
    pub gpu_bandwidth_gbs: Option<f64>,
    /// Operations in bfloat16 that each GPU is specified for, dense, in 10^12 per second; derived from its
    /// memory where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_teraflops: Option<f64>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde calls it.
fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl NodeList {
    /// Reads a list and checks that it can be one.
    ///
    /// # Errors
    /// The first field that is missing, unknown, of the wrong type or out of range.
    pub fn from_yaml(text: &str) -> Result<Self, NodesError> {
        let list: Self =
            serde_path_to_error::deserialize(serde_yaml::Deserializer::from_str(text)).map_err(|error| {
                let path = error.path().to_string();
                let field = if path == "." { String::new() } else { path };
                NodesError { message: unreadable(&field, error.into_inner()), field }
            })?;
        list.check()?;
        Ok(list)
    }

    fn check(&self) -> Result<(), NodesError> {
        if !(1..=MOST_SHAPES).contains(&self.nodes.len()) {
            let message = format!("lists {} shapes, expected 1 to {MOST_SHAPES}", self.nodes.len());
            return Err(NodesError { field: "nodes".to_owned(), message });
        }
        for (index, node) in self.nodes.iter().enumerate() {
            node.check()
                .map_err(|error| NodesError { field: format!("nodes[{index}].{}", error.field), ..error })?;
            if let Some(first) = self.nodes[..index].iter().position(|other| other.name == node.name) {
                let message =
                    format!("is `{}` as in nodes[{first}]; give each shape its own name", node.name);
                return Err(NodesError { field: format!("nodes[{index}].name"), message });
            }
        }
        Ok(())
    }
}

impl ListedNode {
    fn check(&self) -> Result<(), NodesError> {
        let named = !self.name.trim().is_empty() && self.name.len() <= LONGEST_NAME;
        if !named || self.name.chars().any(char::is_control) {
            let message = format!("is invalid: expected 1 to {LONGEST_NAME} printable characters");
            return Err(wrong("name", message));
        }
        within("vcpus", self.vcpus, MOST_VCPUS, "vCPUs")?;
        within("memoryGB", self.memory_gb, MOST_MEMORY_GB, "GB")?;
        within("perHour", self.per_hour, MOST_PER_HOUR, "dollars per hour")?;
        if self.gpus > MOST_GPUS {
            return Err(wrong("gpus", format!("is {}, expected at most {MOST_GPUS}", self.gpus)));
        }
        match (self.gpus, self.gpu_memory_gb) {
            (0, Some(memory)) if memory != 0.0 => {
                return Err(wrong("gpus", "is required with gpuMemoryGB; add it".to_owned()));
            }
            (1.., None) => {
                return Err(wrong("gpuMemoryGB", "is required with gpus; add the GB of each GPU".to_owned()));
            }
            (1.., Some(memory)) => within("gpuMemoryGB", memory, MOST_GPU_MEMORY_GB, "GB of each GPU")?,
            (0, _) => {}
        }
        if let Some(max) = self.max
            && !(1..=MOST_NODES).contains(&max)
        {
            let message = format!("is {max}, expected 1 to {MOST_NODES} nodes; omit unavailable shapes");
            return Err(wrong("max", message));
        }
        for (field, stated, most, unit) in [
            ("memoryBandwidthGBs", self.memory_bandwidth_gbs, MOST_GB_PER_SECOND, "GB per second"),
            ("gpuBandwidthGBs", self.gpu_bandwidth_gbs, MOST_GB_PER_SECOND, "GB per second"),
            ("gpuTeraflops", self.gpu_teraflops, MOST_TERAFLOPS, "10^12 operations per second"),
        ] {
            let Some(value) = stated else { continue };
            within(field, value, most, unit)?;
            if field.starts_with("gpu") && self.gpus == 0 {
                return Err(wrong(field, "is set for a node without gpus; remove it".to_owned()));
            }
        }
        Ok(())
    }
}

fn wrong(field: &str, message: String) -> NodesError {
    NodesError { field: field.to_owned(), message }
}

fn within(field: &str, value: f64, most: f64, unit: &str) -> Result<(), NodesError> {
    match value > 0.0 && value <= most {
        true => Ok(()),
        false => Err(wrong(field, format!("is {value}, expected {unit} above 0 and up to {most}"))),
    }
}
