//! Audit log of the API server: requests with their users and whether they were allowed.

use crate::cluster::Cluster;
use jiff::Timestamp;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

/// Key of the credential's id in the user's extra fields.
pub const CREDENTIAL: &str = "authentication.kubernetes.io/credential-id";

/// Position in the log.
#[derive(Debug, Clone, Copy)]
pub struct LogPosition(u64);

/// Answered request.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditEntry {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete` or `deletecollection`.
    pub verb: String,
    /// Path and query.
    #[serde(rename = "requestURI")]
    pub uri: String,
    /// Time at which the API server received it.
    #[serde(rename = "requestReceivedTimestamp")]
    pub received: Timestamp,
    user: User,
    #[serde(default)]
    object_ref: Object,
    #[serde(default)]
    annotations: Annotations,
}

#[derive(Debug, Clone, Deserialize)]
struct User {
    /// Empty for an invalid credential, such as that of a deleted pod.
    #[serde(default)]
    username: String,
    #[serde(default)]
    extra: BTreeMap<String, Vec<String>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Object {
    #[serde(default)]
    resource: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    subresource: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Annotations {
    #[serde(default, rename = "authorization.k8s.io/decision")]
    decision: String,
}

impl AuditEntry {
    /// Returns the name of the user that sent the request.
    #[must_use]
    pub fn user(&self) -> &str {
        &self.user.username
    }

    /// Returns the id of the credential, of which an account may have several. Empty if it has none.
    #[must_use]
    pub fn credential(&self) -> &str {
        self.user.extra.get(CREDENTIAL).and_then(|ids| ids.first()).map_or("", String::as_str)
    }

    /// Returns the subresource, such as `status`. Empty for the whole object.
    #[must_use]
    pub fn subresource(&self) -> &str {
        &self.object_ref.subresource
    }

    /// Returns the resource in the plural. Empty for requests without one.
    #[must_use]
    pub fn resource(&self) -> &str {
        &self.object_ref.resource
    }

    /// Returns the namespace of the object. Empty for cluster-scoped objects.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.object_ref.namespace
    }

    /// Returns the name of the object. Empty for lists.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.object_ref.name
    }

    /// Returns true if the user's roles forbid the request.
    #[must_use]
    pub fn denied(&self) -> bool {
        self.annotations.decision == "forbid"
    }

    /// Returns true if the request writes.
    #[must_use]
    pub fn writes(&self) -> bool {
        !matches!(self.verb.as_str(), "get" | "list" | "watch")
    }
}

/// Returns the end of the log.
#[must_use]
pub fn position(cluster: &Cluster) -> LogPosition {
    LogPosition(open(cluster).metadata().expect("the audit log has a size").len())
}

/// Returns the requests answered after `mark`. Watches are logged when they end.
#[must_use]
pub fn entries_since(cluster: &Cluster, mark: LogPosition) -> Vec<AuditEntry> {
    let mut log = open(cluster);
    log.seek(SeekFrom::Start(mark.0)).expect("the audit log can be read from a mark");
    let mut text = String::new();
    log.read_to_string(&mut text).expect("the audit log is text");
    // The last line may be incomplete.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}")))
        .collect()
}

fn open(cluster: &Cluster) -> File {
    File::open(&cluster.audit_log).unwrap_or_else(|error| panic!("{}: {error}", cluster.audit_log.display()))
}
