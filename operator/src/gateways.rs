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
    /// What selects their Leases.
    selector: String,
    /// Since when this operator has been looking.
    pub(super) since: Timestamp,
    /// When each Lease was last seen to be renewed. By our clock: theirs need not agree.
    renewals: Mutex<BTreeMap<String, (Option<Timestamp>, Instant)>>,
}

impl Gateways {
    /// None of `release` is known yet.
    pub(super) fn new(calls: Calls, release: &str) -> Self {
        let (key, value) = LEASE_LABEL;
        let selector = format!("{key}={value},{RELEASE_LABEL}={release}");
        Self { calls, selector, since: Timestamp::now(), renewals: Mutex::default() }
    }

    /// The identities of those that live, read now. One that is seen for the first time lives.
    ///
    /// # Errors
    /// Leases cannot be read.
    pub(super) async fn live(&self) -> Result<BTreeSet<String>, CallError> {
        let leases = self.calls.list::<Lease>(&self.selector).await?;
        let now = Instant::now();
        // Every change of it is whole.
        let mut renewals = self.renewals.lock().unwrap_or_else(PoisonError::into_inner);
        let mut known = std::mem::take(&mut *renewals);
        for spec in leases.into_iter().filter_map(|lease| lease.spec) {
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
