//! Additions to all pods, from the operator's settings.

use k8s_openapi::api::core::v1::{EnvVar, LocalObjectReference, PodSpec};
use kube::api::ObjectMeta;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

/// Reserved prefixes of labels and annotations.
const RESERVED_PREFIXES: [&str; 2] = ["remoe.dev/", "app.kubernetes.io/"];

/// Additions to the pods of all deployments.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PodExtras {
    /// Secrets in the pods' namespaces for pulling images.
    image_pull_secrets: Vec<LocalObjectReference>,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    /// Additional environment variables.
    env: Vec<EnvVar>,
    /// Set if the cluster assigns the user, which is still not root.
    arbitrary_user: bool,
}

impl FromStr for PodExtras {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let extras: Self = serde_json::from_str(text).map_err(|error| {
            format!(
                "expected JSON with imagePullSecrets, labels, annotations, env and arbitraryUser: {error}"
            )
        })?;
        // Missing names are parsed as empty.
        let is_named = extras.image_pull_secrets.iter().all(|secret| !secret.name.is_empty())
            && extras.env.iter().all(|variable| !variable.name.is_empty());
        if !is_named {
            return Err("expected a name in each entry of imagePullSecrets and env".to_owned());
        }
        let mut names = BTreeSet::new();
        // The API server would keep both, and the pod would always differ from its desired spec.
        if let Some(duplicate) = extras.env.iter().find(|variable| !names.insert(&variable.name)) {
            return Err(format!("expected each name in env once, got {:?} twice", duplicate.name));
        }
        let is_reserved = |key: &&String| RESERVED_PREFIXES.iter().any(|prefix| key.starts_with(prefix));
        match extras.labels.keys().chain(extras.annotations.keys()).find(is_reserved) {
            Some(key) => {
                Err(format!("expected labels and annotations without a reserved prefix, got {key:?}"))
            }
            None => Ok(extras),
        }
    }
}

impl PodExtras {
    /// Adds labels and annotations to a pod. They are not part of its identity: running pods are updated in place.
    pub(super) fn add_metadata(&self, metadata: &mut ObjectMeta) {
        if !self.labels.is_empty() {
            metadata.labels.get_or_insert_default().extend(self.labels.clone());
        }
        if !self.annotations.is_empty() {
            metadata.annotations.get_or_insert_default().extend(self.annotations.clone());
        }
    }

    /// Adds everything else to `spec`.
    pub(super) fn apply(&self, spec: &mut PodSpec) {
        if !self.image_pull_secrets.is_empty() {
            spec.image_pull_secrets = Some(self.image_pull_secrets.clone());
        }
        if let (false, Some(container)) = (self.env.is_empty(), spec.containers.first_mut()) {
            let known = container.env.get_or_insert_default();
            // Variables that functions have anyway take precedence.
            let more: Vec<EnvVar> = self
                .env
                .iter()
                .filter(|more| !known.iter().any(|it| it.name == more.name))
                .cloned()
                .collect();
            known.extend(more);
        }
        if let (true, Some(security)) = (self.arbitrary_user, &mut spec.security_context) {
            (security.run_as_user, security.run_as_group, security.fs_group) = (None, None, None);
            security.fs_group_change_policy = None;
        }
    }
}
