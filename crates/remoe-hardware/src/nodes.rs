//! Node lists: sizes, speeds and prices of nodes that can be rented or owned.

use crate::error::{NodesError, unreadable};
use crate::node_timing::NodeTiming;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Most shapes of a list.
const MAX_SHAPES: usize = 200;
const LONGEST_NAME: usize = 100;
/// Upper bounds of the fields.
const MAX_VCPUS: f64 = 4096.0;
const MAX_MEMORY_GB: f64 = 100_000.0;
const MAX_GPUS: u32 = 64;
const MAX_GPU_MEMORY_GB: f64 = 4096.0;
const MAX_PER_HOUR: f64 = 1e6;
const MAX_NODES: u32 = 100_000;
const MAX_GB_PER_SECOND: f64 = 1e6;
const MAX_TERAFLOPS: f64 = 1e6;
const MAX_PRICE: f64 = 1e9;
const MAX_WATTS: f64 = 1e6;
const MAX_YEARS: f64 = 50.0;
const MAX_PER_KWH: f64 = 100.0;
const MAX_SOCKETS: u32 = 64;
const HOURS_PER_YEAR: f64 = 8766.0;

/// Shapes of nodes with what they cost, in YAML or JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeList {
    /// Where the prices stand, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Date of the oldest price per hour on demand: `2026-07-20`, `2026-07` or `2026`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
    /// Sources of figures by the short names that [`ListedNode::price_source`] and others give.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sources: BTreeMap<String, PriceSource>,
    /// Figures of the time model that differ from its own on all nodes of the list.
    #[serde(default, skip_serializing_if = "NodeTiming::is_empty")]
    pub timing: NodeTiming,
    /// The shapes.
    #[schemars(length(min = 1, max = MAX_SHAPES))]
    pub nodes: Vec<ListedNode>,
}

/// A source of prices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PriceSource {
    /// Date of its figures: `2026-07-20`, `2026-07` or `2026`.
    pub date: String,
    /// Where they stand, for people.
    pub text: String,
}

/// Price per hour that is paid.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Commitment {
    /// [`ListedNode::per_hour`].
    #[default]
    OnDemand,
    /// [`ListedNode::one_year_per_hour`], where a shape has one.
    OneYear,
    /// [`ListedNode::three_years_per_hour`], where a shape has one.
    ThreeYears,
}

/// A machine of one's own.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Owned {
    /// Dollars that it cost.
    #[schemars(range(max = MAX_PRICE), extend("exclusiveMinimum" = 0))]
    pub price: f64,
    /// Years of use.
    #[schemars(range(max = MAX_YEARS), extend("exclusiveMinimum" = 0))]
    pub years: f64,
    /// Watts that it draws in the mean, cooling included.
    #[schemars(range(max = MAX_WATTS), extend("exclusiveMinimum" = 0))]
    pub watts: f64,
    /// Dollars per kWh.
    #[schemars(range(min = 0.0, max = MAX_PER_KWH))]
    pub per_kwh: f64,
}

impl Owned {
    /// Dollars per hour: the price spread evenly over the years, and power.
    #[must_use]
    pub fn per_hour(&self) -> f64 {
        self.price / (self.years * HOURS_PER_YEAR) + self.watts / 1e3 * self.per_kwh
    }
}

/// A node as it is sold. 1 GB is 1e9 bytes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ListedNode {
    /// Name of the shape, unique in the list.
    #[schemars(length(min = 1, max = LONGEST_NAME))]
    pub name: String,
    /// Number of vCPUs.
    #[schemars(range(max = MAX_VCPUS), extend("exclusiveMinimum" = 0))]
    pub vcpus: f64,
    /// GB (1e9 bytes) of main memory.
    #[serde(rename = "memoryGB")]
    #[schemars(range(max = MAX_MEMORY_GB), extend("exclusiveMinimum" = 0))]
    pub memory_gb: f64,
    /// Number of GPUs.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0, max = MAX_GPUS))]
    pub gpus: u32,
    /// GB of memory of each GPU; required with `gpus`.
    #[serde(rename = "gpuMemoryGB", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = MAX_GPU_MEMORY_GB))]
    pub gpu_memory_gb: Option<f64>,
    /// Dollars per hour on demand. This, or `owned`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MAX_PER_HOUR), extend("exclusiveMinimum" = 0))]
    pub per_hour: Option<f64>,
    /// Dollars per hour as a spot node, which may be taken back at any time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MAX_PER_HOUR), extend("exclusiveMinimum" = 0))]
    pub spot_per_hour: Option<f64>,
    /// Dollars per hour when committed for a year.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MAX_PER_HOUR), extend("exclusiveMinimum" = 0))]
    pub one_year_per_hour: Option<f64>,
    /// Dollars per hour when committed for three years.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MAX_PER_HOUR), extend("exclusiveMinimum" = 0))]
    pub three_years_per_hour: Option<f64>,
    /// Costs of a machine of one's own, in place of `perHour`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owned: Option<Owned>,
    /// Source of `perHour`, by its name in `sources`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_source: Option<String>,
    /// Source of `spotPerHour`, by its name in `sources`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spot_source: Option<String>,
    /// Source of `oneYearPerHour` and `threeYearsPerHour`, by its name in `sources`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub committed_source: Option<String>,
    /// True if it may be taken back at any time, at `perHour`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub spot: bool,
    /// Number of nodes that can be had; any number where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = MAX_NODES))]
    pub max: Option<u32>,
    /// CPU sockets; derived from the bandwidth where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = MAX_SOCKETS))]
    pub sockets: Option<u32>,
    /// GB that its memory is specified to move per second, all sockets together; derived from the vCPUs where absent.
    #[serde(rename = "memoryBandwidthGBs", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MAX_GB_PER_SECOND), extend("exclusiveMinimum" = 0))]
    pub memory_bandwidth_gbs: Option<f64>,
    /// GB per second that the memory of each GPU is specified to move; derived from its size where absent.
    #[serde(rename = "gpuBandwidthGBs", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MAX_GB_PER_SECOND), extend("exclusiveMinimum" = 0))]
    pub gpu_bandwidth_gbs: Option<f64>,
    /// Operations in bfloat16 that each GPU is specified for, dense, in 10^12 per second; derived from its
    /// memory where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MAX_TERAFLOPS), extend("exclusiveMinimum" = 0))]
    pub gpu_teraflops: Option<f64>,
    /// GB per second that each GPU sends to the others of the node; derived from its memory and their number where absent.
    #[serde(rename = "gpuLinkGBs", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MAX_GB_PER_SECOND), extend("exclusiveMinimum" = 0))]
    pub gpu_link_gbs: Option<f64>,
    /// Figures of the time model that differ on this node.
    #[serde(default, skip_serializing_if = "NodeTiming::is_empty")]
    pub timing: NodeTiming,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde calls it.
fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl NodeList {
    /// Reads a list and checks that it can be one.
    ///
    /// # Errors
    /// The first field that is missing, unknown, stated twice, of the wrong type or out of range.
    pub fn from_yaml(text: &str) -> Result<Self, NodesError> {
        let list: Self =
            serde_path_to_error::deserialize(serde_yaml::Deserializer::from_str(text)).map_err(unreadable)?;
        list.check()?;
        Ok(list)
    }

    fn check(&self) -> Result<(), NodesError> {
        if !(1..=MAX_SHAPES).contains(&self.nodes.len()) {
            let message = format!("lists {} shapes, expected 1 to {MAX_SHAPES}", self.nodes.len());
            return Err(NodesError { field: "nodes".to_owned(), message });
        }
        self.timing.check("timing")?;
        for (name, source) in &self.sources {
            if date_of(&source.date).is_none() {
                return Err(invalid_date(&format!("sources.{name}.date"), &source.date));
            }
        }
        if let Some(date) = self.date.as_ref().filter(|date| date_of(date).is_none()) {
            return Err(invalid_date("date", date));
        }
        for (index, node) in self.nodes.iter().enumerate() {
            let at =
                |error: NodesError| NodesError { field: format!("nodes[{index}].{}", error.field), ..error };
            node.check().map_err(at)?;
            for (field, named) in [
                ("priceSource", &node.price_source),
                ("spotSource", &node.spot_source),
                ("committedSource", &node.committed_source),
            ] {
                if let Some(name) = named.as_ref().filter(|name| !self.sources.contains_key(*name)) {
                    let message = format!("is `{name}`, which `sources` does not have; add it there");
                    return Err(at(invalid_field(field, message)));
                }
            }
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
            return Err(invalid_field("name", message));
        }
        check_range("vcpus", self.vcpus, MAX_VCPUS, "vCPUs")?;
        check_range("memoryGB", self.memory_gb, MAX_MEMORY_GB, "GB")?;
        self.check_prices()?;
        if let Some(sockets) = self.sockets.filter(|sockets| !(1..=MAX_SOCKETS).contains(sockets)) {
            return Err(invalid_field("sockets", format!("is {sockets}, expected 1 to {MAX_SOCKETS}")));
        }
        if self.gpus > MAX_GPUS {
            return Err(invalid_field("gpus", format!("is {}, expected at most {MAX_GPUS}", self.gpus)));
        }
        match (self.gpus, self.gpu_memory_gb) {
            (0, Some(memory)) if memory != 0.0 => {
                return Err(invalid_field("gpus", "is required with gpuMemoryGB; add it".to_owned()));
            }
            (1.., None) => {
                return Err(invalid_field(
                    "gpuMemoryGB",
                    "is required with gpus; add the GB of each GPU".to_owned(),
                ));
            }
            (1.., Some(memory)) => check_range("gpuMemoryGB", memory, MAX_GPU_MEMORY_GB, "GB of each GPU")?,
            (0, _) => {}
        }
        if let Some(max) = self.max
            && !(1..=MAX_NODES).contains(&max)
        {
            let message = format!("is {max}, expected 1 to {MAX_NODES} nodes; omit unavailable shapes");
            return Err(invalid_field("max", message));
        }
        for (field, stated, most, unit) in [
            ("memoryBandwidthGBs", self.memory_bandwidth_gbs, MAX_GB_PER_SECOND, "GB per second"),
            ("gpuBandwidthGBs", self.gpu_bandwidth_gbs, MAX_GB_PER_SECOND, "GB per second"),
            ("gpuLinkGBs", self.gpu_link_gbs, MAX_GB_PER_SECOND, "GB per second"),
            ("gpuTeraflops", self.gpu_teraflops, MAX_TERAFLOPS, "10^12 operations per second"),
        ] {
            let Some(value) = stated else { continue };
            check_range(field, value, most, unit)?;
            if field.starts_with("gpu") && self.gpus == 0 {
                return Err(invalid_field(field, "is set for a node without gpus; remove it".to_owned()));
            }
        }
        self.timing.check("timing")
    }

    fn check_prices(&self) -> Result<(), NodesError> {
        match (self.per_hour, &self.owned) {
            (None, None) => {
                return Err(invalid_field(
                    "perHour",
                    "is missing; add dollars per hour, or `owned`".to_owned(),
                ));
            }
            (Some(_), Some(_)) => {
                return Err(invalid_field("owned", "stands beside perHour; remove one of them".to_owned()));
            }
            _ => {}
        }
        for (field, price) in [
            ("perHour", self.per_hour),
            ("spotPerHour", self.spot_per_hour),
            ("oneYearPerHour", self.one_year_per_hour),
            ("threeYearsPerHour", self.three_years_per_hour),
        ] {
            if let Some(price) = price {
                check_range(field, price, MAX_PER_HOUR, "dollars per hour")?;
            }
        }
        let Some(owned) = &self.owned else { return Ok(()) };
        check_range("owned.price", owned.price, MAX_PRICE, "dollars")?;
        check_range("owned.years", owned.years, MAX_YEARS, "years")?;
        check_range("owned.watts", owned.watts, MAX_WATTS, "watts")?;
        match (0.0..=MAX_PER_KWH).contains(&owned.per_kwh) {
            true => Ok(()),
            false => {
                let message = format!("is {}, expected 0 to {MAX_PER_KWH} dollars per kWh", owned.per_kwh);
                Err(invalid_field("owned.perKwh", message))
            }
        }
    }

    /// Returns the dollars per hour under `commitment`; `None` on demand, or if the shape has no price for it.
    #[must_use]
    pub fn committed_per_hour(&self, commitment: Commitment) -> Option<f64> {
        match commitment {
            Commitment::OnDemand => None,
            Commitment::OneYear => self.one_year_per_hour,
            Commitment::ThreeYears => self.three_years_per_hour,
        }
    }

    /// Returns the dollars per hour under `commitment`, or on demand if the shape has no price for it.
    #[must_use]
    pub fn dollars_per_hour(&self, commitment: Commitment) -> f64 {
        let owned = || self.owned.as_ref().map(Owned::per_hour);
        self.committed_per_hour(commitment).or(self.per_hour).or_else(owned).unwrap_or(f64::INFINITY)
    }
}

/// Parses a date such as `2026-07-20`, `2026-07` or `2026` into year, month and day; an omitted month or day is 1.
#[must_use]
pub fn date_of(text: &str) -> Option<(i32, u32, u32)> {
    let mut parts = text.trim().splitn(3, '-');
    let year = parts.next()?.parse().ok().filter(|year| (2000..=2200).contains(year))?;
    let mut part = |most: u32| match parts.next() {
        None => Some(1),
        Some(text) => text.parse().ok().filter(|number| (1..=most).contains(number)),
    };
    Some((year, part(12)?, part(31)?))
}

/// Error of a field that is no date.
fn invalid_date(field: &str, date: &str) -> NodesError {
    invalid_field(field, format!("is `{date}`, expected a date such as 2026-07-20 or 2026-07"))
}

fn invalid_field(field: &str, message: String) -> NodesError {
    NodesError { field: field.to_owned(), message }
}

/// Checks that `value` is above 0 and up to `most`.
fn check_range(field: &str, value: f64, most: f64, unit: &str) -> Result<(), NodesError> {
    match value > 0.0 && value <= most {
        true => Ok(()),
        false => Err(invalid_field(field, format!("is {value}, expected {unit} above 0 and up to {most}"))),
    }
}
