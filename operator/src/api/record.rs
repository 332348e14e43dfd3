//! `MoERecord`: what the operator found out or told, kept in the cluster.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bytes of `about`.
const MAX_ABOUT: usize = 256;

/// What the operator would have to find out again.
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
    doc = "What the operator found out or told, so that whoever comes after it need not ask again: the facts of a checkpoint, what a profiler measured, and what the main functions of a MoEDeployment were told. Written by the operator alone; what somebody else changes is found out or decided again.",
    printcolumn(name = "Of", type_ = "string", json_path = ".spec.of"),
    printcolumn(name = "About", type_ = "string", json_path = ".spec.about"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.spec.of == 'Routing' ? !has(self.spec.json) : has(self.spec.json) && has(self.spec.subject)").message("facts and figures have a subject and json, routing has neither"),
    validation = Rule::new("self.spec.of == 'Routing' || !has(self.spec.generations)").message("only routing has generations")
)]
#[serde(rename_all = "camelCase")]
pub struct MoERecordSpec {
    /// What it is a record of.
    pub of: RecordOf,
    /// What it says, for people.
    #[schemars(length(max = 256))]
    pub about: String,
    /// Hash of what was looked at: facts and figures of something else are none of this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub subject: Option<String>,
    /// Facts and figures, as the programs print them that find them out: `remoe inspect --json` and
    /// `remoe profile --json`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 262_144))]
    pub json: Option<String>,
    /// The generations that main functions have in force or are to have, by the identity of these main functions: two while
    /// one shape takes over from another.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub generations: BTreeMap<String, Generation>,
}

/// What a record is of.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RecordOf {
    /// A checkpoint: what an inspector found.
    Model,
    /// Hardware: what a profiler measured.
    Profile,
    /// Main functions: what they were told.
    Routing,
}

/// One routing generation.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Generation {
    /// Its number: larger than any before, whatever shape that was for.
    #[schemars(range(max = 274_877_906_944_u64))]
    pub number: u64,
    /// Hash of the plan that it belongs to.
    #[schemars(length(max = 64))]
    pub plan: String,
    /// Hash of the shapes of all functions that it belongs to.
    #[schemars(length(max = 64))]
    pub revision: String,
    /// The remote experts of each layer, as `1:6-7,2:0`.
    #[schemars(length(max = 1_048_576))]
    pub remote: String,
    /// The remote functions, by name.
    #[schemars(length(max = 32_768))]
    pub endpoints: Vec<RoutedPod>,
    /// What each group of remote functions hosts, by number and in the form of `remote`; empty where layers
    /// have functions of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 65_536)))]
    pub groups: Vec<String>,
}

/// A remote function of a generation.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RoutedPod {
    /// Its pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// Where it is reached, as host:port.
    #[schemars(length(max = 64))]
    pub address: String,
    /// The layers whose remote experts it hosts, all of them; empty for one of a group.
    #[schemars(length(max = 512))]
    pub layers: Vec<u32>,
    /// The number of its group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 64))]
    pub group: Option<usize>,
}

impl MoERecordSpec {
    /// Facts or figures about `subject`.
    pub fn found(of: RecordOf, subject: &str, json: String, about: &str) -> Self {
        let (subject, json) = (Some(subject.to_owned()), Some(json));
        Self { of, about: shortened(about), subject, json, generations: BTreeMap::new() }
    }

    /// What main functions were told.
    pub fn told(generations: BTreeMap<String, Generation>, about: &str) -> Self {
        Self { of: RecordOf::Routing, about: shortened(about), subject: None, json: None, generations }
    }

    /// What was found out about `subject`; none where it is a record of something else.
    pub fn json_of(&self, of: RecordOf, subject: &str) -> Option<&str> {
        let is_it = self.of == of && self.subject.as_deref() == Some(subject);
        self.json.as_deref().filter(|_| is_it)
    }
}

/// As much as fits: what programs print has no bound of its own.
fn shortened(about: &str) -> String {
    let end = about.char_indices().map(|(at, char)| at + char.len_utf8()).take_while(|end| *end <= MAX_ABOUT);
    about[..end.last().unwrap_or(0)].to_owned()
}
