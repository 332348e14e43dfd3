//! Tracks live gateways: those that renew their Leases.

use super::api::{CallError, NamespaceApi};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::ResourceExt;
use remoe_api::{LEASE_LABEL, LEASE_SECONDS, RELEASE_LABEL, SHOWN_ANNOTATION};
use remoe_proto::identity::Identity;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Gateways of this release.
pub(super) struct Gateways {
    /// API client of their namespace.
    api: NamespaceApi,
    /// Name of the release.
    release: String,
    /// Identity that they present to main functions; absent without a signer of certificates.
    identity: Option<Identity>,
    /// Time since which this operator observes gateways.
    pub(super) since: Timestamp,
    /// Last observed renewal of each Lease: its time stamp, and the local time of the observation. The clocks need
    /// not agree.
    renewals: Mutex<BTreeMap<String, (Option<Timestamp>, Instant)>>,
}

/// Live gateways.
#[derive(Debug, Default)]
pub(super) struct LiveGateways {
    /// UIDs of their pods.
    pub(super) uids: BTreeSet<String>,
    /// Set if any gateway presents no certificate or another identity, because it is of an older version or of a
    /// release without a signer.
    pub(super) has_uncertified: bool,
}

impl Gateways {
    /// Creates the tracker of the gateways of `release`, which present `identity`, if there is one.
    pub(super) fn new(api: NamespaceApi, release: &str, identity: Option<Identity>) -> Self {
        let (release, since) = (release.to_owned(), Timestamp::now());
        Self { api, release, identity, since, renewals: Mutex::default() }
    }

    /// Returns whether gateways have certificates.
    pub(super) fn have_certificates(&self) -> bool {
        self.identity.is_some()
    }

    /// Reads the Leases and returns the live gateways. A gateway seen for the first time counts as live.
    ///
    /// # Errors
    /// Leases cannot be read.
    pub(super) async fn live(&self) -> Result<LiveGateways, CallError> {
        let (key, value) = LEASE_LABEL;
        let leases = self.api.list::<Lease>(&format!("{key}={value}")).await?;
        let now = Instant::now();
        // Every critical section keeps the map consistent up to any panic.
        let mut renewals = self.renewals.lock().unwrap_or_else(PoisonError::into_inner);
        let mut known = std::mem::take(&mut *renewals);
        let mut identities = BTreeMap::new();
        for lease in leases.into_iter().filter(|lease| is_of_release(lease, &self.release)) {
            let claimed_identity = claimed_identity(&lease);
            let Some(spec) = lease.spec else { continue };
            let Some(holder) = spec.holder_identity.filter(|holder| !holder.is_empty()) else { continue };
            let renewed = spec.renew_time.map(|time| time.0);
            let observed_renewal = known.remove(&holder).filter(|(before, _)| *before == renewed);
            identities.insert(holder.clone(), claimed_identity);
            renewals.insert(holder, observed_renewal.unwrap_or((renewed, now)));
        }
        let lease_duration = Duration::from_secs(LEASE_SECONDS.into());
        let live = renewals
            .iter()
            .filter(|(_, (_, observed_renewal))| now.duration_since(*observed_renewal) < lease_duration);
        let uids: BTreeSet<String> = live.map(|(holder, _)| holder.clone()).collect();
        let has_uncertified = uids.iter().any(|uid| identities.get(uid) != Some(&self.identity));
        Ok(LiveGateways { uids, has_uncertified })
    }
}

/// Returns whether `lease` may belong to a gateway of `release`. Leases of old gateways name no release; such
/// gateways may hold requests during an upgrade.
fn is_of_release(lease: &Lease, release: &str) -> bool {
    let labels = lease.metadata.labels.as_ref();
    labels.and_then(|labels| labels.get(RELEASE_LABEL)).is_none_or(|other| other == release)
}

/// Returns the identity that the holder of `lease` claims to present, if any.
fn claimed_identity(lease: &Lease) -> Option<Identity> {
    lease.annotations().get(SHOWN_ANNOTATION)?.parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lease_without_identity_shows_none() {
        let lease = |claimed_identity| {
            serde_json::from_value(json!({"metadata": {"annotations": claimed_identity}})).unwrap()
        };
        let name = "spiffe://remoe/remoe-system/gateway";
        assert_eq!(claimed_identity(&lease(json!({SHOWN_ANNOTATION: name}))).unwrap().to_string(), name);
        for anonymous in [json!({}), json!({SHOWN_ANNOTATION: "yes"})] {
            assert_eq!(claimed_identity(&lease(anonymous)), None);
        }
    }

    #[test]
    fn a_lease_without_a_release_may_be_of_ours() {
        let lease = |labels| serde_json::from_value(json!({"metadata": {"labels": labels}})).unwrap();
        let (key, value) = LEASE_LABEL;
        assert!(is_of_release(&lease(json!({key: value, RELEASE_LABEL: "ours"})), "ours"));
        assert!(is_of_release(&lease(json!({key: value})), "ours"), "a gateway of an earlier version");
        assert!(!is_of_release(&lease(json!({key: value, RELEASE_LABEL: "another"})), "ours"));
    }
}
