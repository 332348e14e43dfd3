//! Which gateways live: those whose Leases are renewed.

use super::api::{LEASE_LABEL, LEASE_SECONDS, RELEASE_LABEL};
use super::calls::{CallError, Calls};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The gateways of this release, as one operator knows them.
pub(super) struct Gateways {
    /// Of the namespace that they run in.
    calls: Calls,
    /// The release.
    release: String,
    /// Since when this operator has been looking.
    pub(super) since: Timestamp,
    /// When each Lease was last seen to be renewed. By our clock: theirs need not agree.
    renewals: Mutex<BTreeMap<String, (Option<Timestamp>, Instant)>>,
}

impl Gateways {
    /// None of `release` is known yet.
    pub(super) fn new(calls: Calls, release: &str) -> Self {
        Self { calls, release: release.to_owned(), since: Timestamp::now(), renewals: Mutex::default() }
    }

    /// The identities of those that live, read now. One that is seen for the first time lives.
    ///
    /// # Errors
    /// Leases cannot be read.
    pub(super) async fn live(&self) -> Result<BTreeSet<String>, CallError> {
        let (key, value) = LEASE_LABEL;
        let leases = self.calls.list::<Lease>(&format!("{key}={value}")).await?;
        let now = Instant::now();
        // Every change of it is whole.
        let mut renewals = self.renewals.lock().unwrap_or_else(PoisonError::into_inner);
        let mut known = std::mem::take(&mut *renewals);
        for spec in
            leases.into_iter().filter(|lease| is_of(lease, &self.release)).filter_map(|lease| lease.spec)
        {
            let Some(holder) = spec.holder_identity.filter(|holder| !holder.is_empty()) else { continue };
            let renewed = spec.renew_time.map(|time| time.0);
            let seen = known.remove(&holder).filter(|(before, _)| *before == renewed);
            renewals.insert(holder, seen.unwrap_or((renewed, now)));
        }
        let lasts = Duration::from_secs(LEASE_SECONDS.into());
        let live = renewals.iter().filter(|(_, (_, seen))| now.duration_since(*seen) < lasts);
        Ok(live.map(|(holder, _)| holder.clone()).collect())
    }
}

/// Whether `lease` may be of a gateway of `release`. Gateways of versions before releases had Leases of their own do not
/// say whose they are, and may have requests of ours while an upgrade goes on.
fn is_of(lease: &Lease, release: &str) -> bool {
    let labels = lease.metadata.labels.as_ref();
    labels.and_then(|labels| labels.get(RELEASE_LABEL)).is_none_or(|other| other == release)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_lease_without_a_release_may_be_of_ours() {
        let lease = |labels| serde_json::from_value(json!({"metadata": {"labels": labels}})).unwrap();
        let (key, value) = LEASE_LABEL;
        assert!(is_of(&lease(json!({key: value, RELEASE_LABEL: "ours"})), "ours"));
        assert!(is_of(&lease(json!({key: value})), "ours"), "a gateway of an earlier version");
        assert!(!is_of(&lease(json!({key: value, RELEASE_LABEL: "another"})), "ours"));
    }
}
