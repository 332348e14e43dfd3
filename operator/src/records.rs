//! Objects and logs that tell about the model of a deployment and its hardware.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use remoe_api::{MoEPlan, MoERecord};
use std::collections::BTreeMap;

/// Objects and logs that are read by name: labels of the deployment do not find them.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Details {
    /// Records of measured profiles that were asked for; none: there is none of that name.
    pub profiles: BTreeMap<String, Option<MoERecord>>,
    /// ConfigMaps that were asked for: supplied profiles, and what earlier releases kept. None: there is none of that name.
    pub maps: BTreeMap<String, Option<ConfigMap>>,
    /// Logs of finished inspectors and profilers by pod, or why one cannot be read.
    pub logs: BTreeMap<String, Result<String, String>>,
}

/// Everything from which model and hardware are known.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Records<'a> {
    /// Pods of functions and helpers.
    pub pods: &'a [Pod],
    /// Plans, the newest last.
    pub plans: &'a [MoEPlan],
    /// Facts of the checkpoint.
    pub model: Option<&'a MoERecord>,
    /// Routing generations.
    pub routing: Option<&'a MoERecord>,
    /// Objects and logs that were read by name.
    pub details: &'a Details,
    /// Time of the read.
    pub now: Timestamp,
}
