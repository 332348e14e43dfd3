//! `MoERecord`: durable state of the operator, in the cluster.

use kube::{CustomResource, KubeSchema};
use remoe_proto::v1::{Endpoint, LayerExperts, Routing};
use remoe_proto::{ListingError, parse_listing, placement_digest};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum bytes of `about`.
const MAX_ABOUT: usize = 256;

/// Durable state of the operator.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "remoe.dev",
    version = "v1alpha1",
    kind = "MoERecord",
    plural = "moerecords",
    singular = "moerecord",
    shortname = "moer",
    category = "moe",
    namespaced,
    derive = "PartialEq",
    doc = "Durable state of the operator: facts of a checkpoint, a measured hardware profile, or the routing generations of a MoEDeployment's main functions. Written by the operator only, which replaces what others change.",
    printcolumn(name = "Of", type_ = "string", json_path = ".spec.of"),
    printcolumn(name = "About", type_ = "string", json_path = ".spec.about"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.spec.of == 'Routing' ? !has(self.spec.json) : has(self.spec.json) && has(self.spec.subject)").message("Model and Profile require subject and json; json is not valid for Routing"),
    validation = Rule::new("self.spec.of == 'Routing' || !has(self.spec.generations)").message("generations is valid for Routing only")
)]
#[serde(rename_all = "camelCase")]
pub struct MoERecordSpec {
    /// Kind of record: `Model` (facts of a checkpoint), `Profile` (measured hardware) or `Routing` (generations).
    pub of: RecordOf,
    /// Human-readable summary.
    #[schemars(length(max = 256))]
    pub about: String,
    /// Hash of what was inspected or measured. The operator ignores a record of another subject.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub subject: Option<String>,
    /// Output of `remoe inspect --json` (`Model`) or `remoe profile --json` (`Profile`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 262_144))]
    pub json: Option<String>,
    /// Routing generations, current or desired, by the identity of the main functions. There are two while one shape
    /// takes over from another.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub generations: BTreeMap<String, Generation>,
}

/// Kind of a record.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RecordOf {
    /// Facts of a checkpoint, by an inspector.
    Model,
    /// Hardware profile, by a profiler.
    Profile,
    /// Routing generations of main functions.
    Routing,
}

/// One routing generation.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Generation {
    /// Generation number. Increases strictly, also from one shape to another.
    #[schemars(range(max = 274_877_906_944_u64))]
    pub number: u64,
    /// Hash of the plan.
    #[schemars(length(max = 64))]
    pub plan: String,
    /// Hash of the shapes of all functions.
    #[schemars(length(max = 64))]
    pub revision: String,
    /// Remote experts of each layer, such as `1:6-7,2:0`.
    #[schemars(length(max = 1_048_576))]
    pub remote: String,
    /// Remote functions, by pod.
    #[schemars(length(max = 32_768))]
    pub endpoints: Vec<RoutedPod>,
    /// Experts of each remote group, by number, in the form of `remote`. Empty with functions by layer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 65_536)))]
    pub groups: Vec<String>,
}

/// A remote function of a generation.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RoutedPod {
    /// Name of the pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// Address, host:port.
    #[schemars(length(max = 64))]
    pub address: String,
    /// Layers whose remote experts it hosts. Empty for a replica of a group.
    #[schemars(length(max = 512))]
    pub layers: Vec<u32>,
    /// Number of its group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 64))]
    pub group: Option<usize>,
}

impl MoERecordSpec {
    /// Returns a record with the output `json` about `subject`.
    pub fn found(of: RecordOf, subject: &str, json: String, about: &str) -> Self {
        let (subject, json) = (Some(subject.to_owned()), Some(json));
        Self { of, about: shortened(about), subject, json, generations: BTreeMap::new() }
    }

    /// Returns a record of the routing generations of main functions.
    pub fn told(generations: BTreeMap<String, Generation>, about: &str) -> Self {
        Self { of: RecordOf::Routing, about: shortened(about), subject: None, json: None, generations }
    }

    /// Returns the output about `subject`; none if the record has another kind or subject.
    pub fn json_of(&self, of: RecordOf, subject: &str) -> Option<&str> {
        let is_it = self.of == of && self.subject.as_deref() == Some(subject);
        self.json.as_deref().filter(|_| is_it)
    }
}

/// Cuts `about` to its maximum: the output of programs has no bound of its own.
fn shortened(about: &str) -> String {
    let end = about.char_indices().map(|(at, char)| at + char.len_utf8()).take_while(|end| *end <= MAX_ABOUT);
    about[..end.last().unwrap_or(0)].to_owned()
}

/// Reason that main functions cannot be told a generation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RoutingError {
    /// A listing of experts.
    #[error(transparent)]
    Listing(#[from] ListingError),
    /// A pod of a group that is not there.
    #[error("pod {pod} is of group-{group}, number of groups: {groups}")]
    Group {
        /// The pod.
        pod: String,
        /// Group of the pod.
        group: usize,
        /// Number of groups.
        groups: usize,
    },
}

impl Generation {
    /// Message for main functions, with the `account` of the plan; empty: none.
    ///
    /// # Errors
    /// The experts of the generation or of a group cannot be read, or a group is not there.
    pub fn routing(&self, account: String) -> Result<Routing, RoutingError> {
        let hosted: Vec<Vec<LayerExperts>> =
            self.groups.iter().map(|group| parse_listing(group)).collect::<Result<_, _>>()?;
        let endpoint = |routed: &RoutedPod| {
            let of_group = |group: usize| {
                let (pod, groups) = (routed.pod.clone(), hosted.len());
                hosted.get(group).cloned().ok_or(RoutingError::Group { pod, group, groups })
            };
            Ok(Endpoint {
                address: routed.address.clone(),
                layers: routed.layers.clone(),
                experts: routed.group.map(of_group).transpose()?.unwrap_or_default(),
            })
        };
        Ok(Routing {
            generation: self.number,
            endpoints: self.endpoints.iter().map(endpoint).collect::<Result<_, RoutingError>>()?,
            remote: parse_listing(&self.remote)?,
            account,
        })
    }

    /// Digest of its content, as main functions report the one in force.
    ///
    /// # Errors
    /// See [`Self::routing`].
    pub fn placement(&self) -> Result<String, RoutingError> {
        self.routing(String::new()).map(|routing| placement_digest(&routing))
    }
}
