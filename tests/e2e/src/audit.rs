//! The API server's audit log: which user sent which request, and if it was allowed.

use crate::cluster::Cluster;
use jiff::Timestamp;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

/// Key under which the API server names the credential.
pub const CREDENTIAL: &str = "authentication.kubernetes.io/credential-id";

/// A place in the log.
#[derive(Debug, Clone, Copy)]
pub struct LogPosition(u64);

/// One answered request.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditEntry {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete` or `deletecollection`.
    pub verb: String,
    /// The path and query.
    #[serde(rename = "requestURI")]
    pub uri: String,
    /// When the API server received it.
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
    /// Empty where the API server does not believe the credential, as that of a pod that is gone.
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

    /// Returns the credential that was shown: one account may have several. Empty for those without a name.
    #[must_use]
    pub fn credential(&self) -> &str {
        self.user.extra.get(CREDENTIAL).and_then(|ids| ids.first()).map_or("", String::as_str)
    }

    /// The part of the object that was asked for, such as `status`; empty for the whole.
    #[must_use]
    pub fn subresource(&self) -> &str {
        &self.object_ref.subresource
    }

    /// The kind of object, in the plural; empty for requests that are about none.
    #[must_use]
    pub fn resource(&self) -> &str {
        &self.object_ref.resource
    }

    /// The object's namespace; empty for those that have none.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.object_ref.namespace
    }

    /// The object's name; empty for lists.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.object_ref.name
    }

    /// Reports if the user's roles do not permit the request.
    #[must_use]
    pub fn denied(&self) -> bool {
        self.annotations.decision == "forbid"
    }

    /// Reports if the request changes anything.
    #[must_use]
    pub fn writes(&self) -> bool {
        !matches!(self.verb.as_str(), "get" | "list" | "watch")
    }
}

/// The end of the log.
#[must_use]
pub fn mark(cluster: &Cluster) -> LogPosition {
    LogPosition(open(cluster).metadata().expect("the audit log has a size").len())
}

/// The requests that were answered after `mark`. Watches are written down when they end.
#[must_use]
pub fn since(cluster: &Cluster, mark: LogPosition) -> Vec<AuditEntry> {
    let mut log = open(cluster);
    log.seek(SeekFrom::Start(mark.0)).expect("the audit log can be read from a mark");
    let mut text = String::new();
    log.read_to_string(&mut text).expect("the audit log is text");
    // The last line may be in the course of being written.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}")))
        .collect()
}

fn open(cluster: &Cluster) -> File {
    File::open(&cluster.audit_log).unwrap_or_else(|error| panic!("{}: {error}", cluster.audit_log.display()))
}
