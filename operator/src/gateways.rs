//! Which gateways live: those whose Leases are renewed.

use super::api::{CallError, NamespaceApi};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::ResourceExt;
use remoe_api::{LEASE_LABEL, LEASE_SECONDS, RELEASE_LABEL, SHOWN_ANNOTATION};
use remoe_proto::identity::Identity;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The gateways of this release, as one operator knows them.
pub(super) struct Gateways {
    /// API of the namespace that they run in.
    api: NamespaceApi,
    /// The release.
    release: String,
    /// Identity that they show to main functions; absent without a signer of certificates.
    identity: Option<Identity>,
    /// Since when this operator has been looking.
    pub(super) since: Timestamp,
    /// When each Lease was last seen to be renewed. By our clock: theirs need not agree.
    renewals: Mutex<BTreeMap<String, (Option<Timestamp>, Instant)>>,
}

/// The gateways that live.
#[derive(Debug, Default)]
pub(super) struct LiveGateways {
    /// Their identities as pods.
    pub(super) uids: BTreeSet<String>,
    /// Set if any of them shows no certificate, or another one: it is of a version that has none, or of a release
    /// without a signer.
    pub(super) has_uncertified: bool,
}

impl Gateways {
    /// Starts without a known gateway of `release`; each has to show `identity`, if there is one.
    pub(super) fn new(api: NamespaceApi, release: &str, identity: Option<Identity>) -> Self {
        let (release, since) = (release.to_owned(), Timestamp::now());
        Self { api, release, identity, since, renewals: Mutex::default() }
    }

    /// Reports if they have certificates to show.
    pub(super) fn have_certificates(&self) -> bool {
        self.identity.is_some()
    }

    /// Returns the gateways that live, read now. One that is seen for the first time lives.
    ///
    /// # Errors
    /// Leases cannot be read.
    pub(super) async fn live(&self) -> Result<LiveGateways, CallError> {
        let (key, value) = LEASE_LABEL;
        let leases = self.api.list::<Lease>(&format!("{key}={value}")).await?;
        let now = Instant::now();
        // Every change of it is whole.
        let mut renewals = self.renewals.lock().unwrap_or_else(PoisonError::into_inner);
        let mut known = std::mem::take(&mut *renewals);
        let mut shows = BTreeMap::new();
        for lease in leases.into_iter().filter(|lease| is_of(lease, &self.release)) {
            let shown = shown(&lease);
            let Some(spec) = lease.spec else { continue };
            let Some(holder) = spec.holder_identity.filter(|holder| !holder.is_empty()) else { continue };
            let renewed = spec.renew_time.map(|time| time.0);
            let seen = known.remove(&holder).filter(|(before, _)| *before == renewed);
            shows.insert(holder.clone(), shown);
            renewals.insert(holder, seen.unwrap_or((renewed, now)));
        }
        let lasts = Duration::from_secs(LEASE_SECONDS.into());
        let live = renewals.iter().filter(|(_, (_, seen))| now.duration_since(*seen) < lasts);
        let uids: BTreeSet<String> = live.map(|(holder, _)| holder.clone()).collect();
        let has_uncertified = uids.iter().any(|uid| shows.get(uid) != Some(&self.identity));
        Ok(LiveGateways { uids, has_uncertified })
    }
}

/// Reports if `lease` may be of a gateway of `release`. Leases of gateways from before there were releases do not name
/// one, and such gateways may have requests of ours during an upgrade.
fn is_of(lease: &Lease, release: &str) -> bool {
    let labels = lease.metadata.labels.as_ref();
    labels.and_then(|labels| labels.get(RELEASE_LABEL)).is_none_or(|other| other == release)
}

/// Returns the identity that the holder of `lease` says it shows, if any.
fn shown(lease: &Lease) -> Option<Identity> {
    lease.annotations().get(SHOWN_ANNOTATION)?.parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lease_without_identity_shows_none() {
        let lease = |shown| serde_json::from_value(json!({"metadata": {"annotations": shown}})).unwrap();
        let name = "spiffe://remoe/remoe-system/gateway";
        assert_eq!(shown(&lease(json!({SHOWN_ANNOTATION: name}))).unwrap().to_string(), name);
        for anonymous in [json!({}), json!({SHOWN_ANNOTATION: "yes"})] {
            assert_eq!(shown(&lease(anonymous)), None);
        }
    }

    #[test]
    fn a_lease_without_a_release_may_be_of_ours() {
        let lease = |labels| serde_json::from_value(json!({"metadata": {"labels": labels}})).unwrap();
        let (key, value) = LEASE_LABEL;
        assert!(is_of(&lease(json!({key: value, RELEASE_LABEL: "ours"})), "ours"));
        assert!(is_of(&lease(json!({key: value})), "ours"), "a gateway of an earlier version");
        assert!(!is_of(&lease(json!({key: value, RELEASE_LABEL: "another"})), "ours"));
    }
}
