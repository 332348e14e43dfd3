//! Objects and logs from which model and hardware are resolved.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use remoe_api::{MoEPlan, MoERecord};
use std::collections::BTreeMap;

/// Objects and logs that are read by name, since the deployment's labels do not select them.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Details {
    /// Records of measured profiles by name; `None` if a record does not exist.
    pub profiles: BTreeMap<String, Option<MoERecord>>,
    /// ConfigMaps with supplied profiles or data of earlier releases, by name; `None` if one does not exist.
    pub maps: BTreeMap<String, Option<ConfigMap>>,
    /// Logs of completed inspectors and profilers by pod, or the reason why one cannot be read.
    pub logs: BTreeMap<String, Result<String, String>>,
}

/// Stored objects and logs from which model and hardware are resolved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Records<'a> {
    /// Pods of functions, inspectors and profilers.
    pub pods: &'a [Pod],
    /// Plans, newest last.
    pub plans: &'a [MoEPlan],
    /// Record with the facts of the checkpoint.
    pub model: Option<&'a MoERecord>,
    /// Record with the routing generations.
    pub routing: Option<&'a MoERecord>,
    /// Objects and logs that were read by name.
    pub details: &'a Details,
    /// Time of the read.
    pub now: Timestamp,
}
