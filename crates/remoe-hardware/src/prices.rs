//! Prices in the units that bills have.

use crate::error::{PricesError, unreadable};
use remoe_planner::{Billing, Pricing};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::json;
use std::ops::RangeInclusive;

const HOUR: f64 = 3600.0;
/// No price is higher, in dollars per hour.
const HIGHEST: f64 = 1e6;
const MB: f64 = 1e6;
/// MB that may bring one vCPU.
const MEMORY_PER_VCPU_MB: RangeInclusive<f64> = 1.0..=1e6;
/// MB of one GPU.
const GPU_MEMORY_MB: RangeInclusive<f64> = 1.0..=1e9;

/// Prices in dollars, as a bill or a price list states them; in YAML or JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Prices {
    /// Where the prices stand, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// When they were read, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
    /// Basis on which remote functions are billed. `Invocation`: while they work. `Reserved`: as long as they exist.
    #[serde(default)]
    pub billing: PricesBilling,
    /// Dollars for one CPU core for one hour; may be 0 beside `memoryPerVcpuMB`.
    #[serde(deserialize_with = "number")]
    #[schemars(schema_with = "core_schema")]
    pub cpu_core_hour: f64,
    /// Dollars for 1 GB (1e9 bytes) of main memory for one hour.
    #[serde(rename = "memoryGBHour", deserialize_with = "number")]
    #[schemars(schema_with = "price_schema")]
    pub memory_gb_hour: f64,
    /// MB (1e6 bytes) of memory that bring one vCPU, where functions are sold by their memory; 1,000 where absent.
    #[serde(
        rename = "memoryPerVcpuMB",
        default,
        deserialize_with = "optional_number",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(schema_with = "memory_per_vcpu_schema")]
    pub memory_per_vcpu_mb: Option<f64>,
    /// Dollars for one GPU for one hour; without it there is no GPU to pay for.
    #[serde(default, deserialize_with = "optional_number", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "price_schema")]
    pub gpu_hour: Option<f64>,
    /// MB (1e6 bytes) of memory of one GPU; only with `gpuHour`.
    #[serde(
        rename = "gpuMemoryMB",
        default,
        deserialize_with = "optional_number",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(schema_with = "gpu_memory_schema")]
    pub gpu_memory_mb: Option<f64>,
}

/// Billing basis of remote functions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PricesBilling {
    /// The seconds in which they work.
    Invocation,
    /// As long as they exist: a plain cluster.
    #[default]
    Reserved,
}

impl Default for Prices {
    /// Round figures in the middle of what clouds ask, without a GPU: see `examples/pricing/`.
    fn default() -> Self {
        Self {
            source: None,
            date: None,
            billing: PricesBilling::default(),
            cpu_core_hour: 0.04,
            memory_gb_hour: 0.004,
            memory_per_vcpu_mb: None,
            gpu_hour: None,
            gpu_memory_mb: None,
        }
    }
}

impl Prices {
    /// Reads and checks a price list.
    ///
    /// # Errors
    /// The first field that is missing, unknown, stated twice, of the wrong type or out of range.
    pub fn from_yaml(text: &str) -> Result<Self, PricesError> {
        let prices: Self =
            serde_path_to_error::deserialize(serde_yaml::Deserializer::from_str(text)).map_err(unreadable)?;
        prices.pricing()?;
        Ok(prices)
    }

    /// Returns the planner's prices for functions whose vCPUs follow from their memory: one per
    /// [`Self::memory_per_vcpu_mb`], or one per GB. A GB then costs itself and its share of a core. GPUs are billed whole.
    ///
    /// # Errors
    /// A price is not above 0 or too large. The price of a core may be 0 if `memoryPerVcpuMB` is set.
    pub fn pricing(&self) -> Result<Pricing, PricesError> {
        if let Some(megabytes) = self.memory_per_vcpu_mb.filter(|mb| !MEMORY_PER_VCPU_MB.contains(mb)) {
            let (least, most) = MEMORY_PER_VCPU_MB.into_inner();
            let message = format!("is {megabytes}, expected {least} to {most} MB of memory per vCPU");
            return Err(invalid_field("memoryPerVcpuMB", message));
        }
        // Sellers of memory that includes vCPUs may have no price for these.
        if self.memory_per_vcpu_mb.is_none() || self.cpu_core_hour != 0.0 {
            check_price("cpuCoreHour", self.cpu_core_hour)?;
        }
        check_price("memoryGBHour", self.memory_gb_hour)?;
        if let Some(value) = self.gpu_hour {
            check_price("gpuHour", value)?;
        }
        match (self.gpu_hour, self.gpu_memory_mb) {
            (Some(_), None) => {
                return Err(invalid_field("gpuMemoryMB", "is required with gpuHour; add it".to_owned()));
            }
            (None, Some(_)) => {
                return Err(invalid_field("gpuHour", "is required with gpuMemoryMB; add it".to_owned()));
            }
            (Some(_), Some(memory)) if !GPU_MEMORY_MB.contains(&memory) => {
                return Err(invalid_field(
                    "gpuMemoryMB",
                    format!("is {memory}, expected 1 to 1e9 MB of one GPU"),
                ));
            }
            _ => {}
        }
        let vcpus_per_gb = self.memory_per_vcpu_mb.map_or(1.0, |megabytes| 1e3 / megabytes);
        Ok(Pricing {
            cpu_per_gb_second: (self.cpu_core_hour * vcpus_per_gb + self.memory_gb_hour) / HOUR,
            memory_per_gb_second: Some(self.memory_gb_hour / HOUR),
            cpu_per_core_second: None,
            memory_per_vcpu_bytes: self.memory_per_vcpu_mb.map(|megabytes| megabytes * MB),
            gpu_per_gb_second: None,
            gpu_bytes_each: self.gpu_memory_mb.map(|megabytes| megabytes * MB),
            gpu_per_second_each: self.gpu_hour.map(|price| price / HOUR),
            billing: match self.billing {
                PricesBilling::Invocation => Billing::Invocation,
                PricesBilling::Reserved => Billing::Reserved,
            },
            main_replicas: 1,
        })
    }

    /// Returns the planner's prices for functions whose vCPUs are chosen and billed separately from memory.
    ///
    /// # Errors
    /// A price is invalid as in [`Self::pricing`], or the price list bundles vCPUs with memory.
    pub fn separate_pricing(&self) -> Result<Pricing, PricesError> {
        let together = self.pricing()?;
        if let Some(megabytes) = self.memory_per_vcpu_mb {
            let message = format!(
                "is {megabytes}: this price list bundles vCPUs with memory; omit it, or the vCPU ranges"
            );
            return Err(invalid_field("memoryPerVcpuMB", message));
        }
        Ok(Pricing { cpu_per_core_second: Some(self.cpu_core_hour / HOUR), ..together })
    }
}

fn invalid_field(field: &str, message: String) -> PricesError {
    PricesError { field: field.to_owned(), message }
}

/// Checks that `value` is a valid price.
fn check_price(field: &str, value: f64) -> Result<(), PricesError> {
    if value > 0.0 && value <= HIGHEST {
        return Ok(());
    }
    Err(invalid_field(field, format!("is {value}, expected dollars per hour above 0 and up to {HIGHEST}")))
}

/// Decimal numbers in strings.
const DECIMAL: &str = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$";

/// Returns the JSON schema of a number in `range` (its bounds as a schema has them), or of a string that holds one.
#[must_use]
pub fn number_schema(range: serde_json::Value) -> Schema {
    let mut schema = json_schema!({"type": ["number", "string", "null"], "pattern": DECIMAL});
    for (bound, value) in range.as_object().into_iter().flatten() {
        schema.insert(bound.clone(), value.clone());
    }
    schema
}

fn price_schema(_: &mut SchemaGenerator) -> Schema {
    number_schema(json!({"exclusiveMinimum": 0, "maximum": HIGHEST}))
}

fn core_schema(_: &mut SchemaGenerator) -> Schema {
    number_schema(json!({"minimum": 0, "maximum": HIGHEST}))
}

fn memory_per_vcpu_schema(_: &mut SchemaGenerator) -> Schema {
    let (least, most) = MEMORY_PER_VCPU_MB.into_inner();
    number_schema(json!({"minimum": least, "maximum": most}))
}

fn gpu_memory_schema(_: &mut SchemaGenerator) -> Schema {
    let (least, most) = GPU_MEMORY_MB.into_inner();
    number_schema(json!({"minimum": least, "maximum": most}))
}

/// A number, or a string that holds one: custom resources write prices as strings.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number such as 0.04 or \"0.04\"")]
enum NumberOrText {
    Number(f64),
    Text(String),
}

impl NumberOrText {
    fn value<E: serde::de::Error>(self) -> Result<f64, E> {
        match self {
            Self::Number(value) => Ok(value),
            Self::Text(text) => text
                .parse()
                .map_err(|_| E::custom(format!("expected a number such as 0.04 or \"0.04\", got {text:?}"))),
        }
    }
}

fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    NumberOrText::deserialize(deserializer)?.value()
}

fn optional_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    Option::<NumberOrText>::deserialize(deserializer)?.map(NumberOrText::value).transpose()
}
