//! The Lease of this pod: while it is renewed, the operator waits for what this gateway says.
//!
//! A gateway that cannot renew it for [`FENCE`] holds newcomers: the operator takes it for dead a moment later
//! ([`LEASE_SECONDS`]), and may then end functions without asking it. Both count by their own clocks.

use crate::settings::Settings;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use remoe_demand::{LEASE_LABEL, LEASE_SECONDS, RELEASE_LABEL, SHOWN_ANNOTATION};
use remoe_wire::identity::Keyring;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};

/// Between two renewals.
const RENEW: Duration = Duration::from_secs(3);
/// After one that failed.
const AGAIN: Duration = Duration::from_millis(500);
/// One call takes at most this long.
const CALL: Duration = Duration::from_secs(3);
/// Two thirds of what the Lease lasts for the operator, counted from before it was renewed.
const FENCE: Duration = Duration::from_secs(LEASE_SECONDS as u64 * 2 / 3);

/// Who holds the Lease.
#[derive(Clone)]
pub(crate) struct Holder {
    api: Api<Lease>,
    namespace: String,
    release: String,
    pod: String,
    uid: String,
    /// What is shown to main functions that want to know who asks.
    keyring: Option<Arc<Keyring>>,
}

impl Holder {
    pub(crate) fn new(client: Client, settings: &Settings, keyring: Option<Arc<Keyring>>) -> Self {
        Self {
            api: Api::namespaced(client, &settings.namespace),
            namespace: settings.namespace.clone(),
            release: settings.release.clone(),
            pod: settings.pod.clone(),
            uid: settings.uid.clone(),
            keyring,
        }
    }

    async fn renew(&self) -> kube::Result<()> {
        self.write(&self.uid).await
    }

    /// Gives the Lease back: nobody is waited for any more. The object goes with the pod, so that a gateway need not be allowed
    /// to delete any Lease, which would be every Lease of the namespace.
    pub(crate) async fn release(&self) {
        if let Err(error) = self.write("").await {
            tracing::warn!(%error, "cannot release the Lease");
        }
    }

    /// Says that it is held by `holder` from now on; by nobody where that is empty.
    async fn write(&self, holder: &str) -> kube::Result<()> {
        let (key, value) = LEASE_LABEL;
        let shown =
            self.keyring.iter().map(|keyring| (SHOWN_ANNOTATION, keyring.current().identity().to_string()));
        let shown: BTreeMap<&str, String> = shown.collect();
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": self.pod,
                "namespace": self.namespace,
                "labels": {key: value, RELEASE_LABEL: self.release, "app.kubernetes.io/part-of": "remoe"},
                "annotations": shown,
                // It goes with the pod, however that ends.
                "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": self.pod, "uid": self.uid}],
            },
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": LEASE_SECONDS,
                "renewTime": MicroTime(jiff::Timestamp::now()),
            },
        });
        let params = PatchParams::apply("remoe-gateway").force();
        self.api.patch(&self.pod, &params, &Patch::Apply(&lease)).await.map(drop)
    }
}

/// Renews the Lease for ever, and says whether it is held.
pub(crate) async fn keep(holder: Holder, holds: watch::Sender<bool>) {
    let mut until = Instant::now();
    loop {
        let begun = Instant::now();
        let deadline = match *holds.borrow() {
            true => until.min(begun + CALL),
            false => begun + CALL,
        };
        let next = match timeout_at(deadline, holder.renew()).await {
            Ok(Ok(())) => {
                until = begun + FENCE;
                holds.send_replace(true);
                begun + RENEW
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot renew the Lease");
                Instant::now() + AGAIN
            }
            Err(_late) => {
                tracing::warn!("cannot renew the Lease: timeout");
                Instant::now() + AGAIN
            }
        };
        if *holds.borrow() && until <= next {
            sleep_until(until).await;
            tracing::error!("lost the Lease: queueing new requests");
            holds.send_replace(false);
        }
        sleep_until(next).await;
    }
}
