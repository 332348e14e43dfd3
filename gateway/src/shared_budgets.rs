//! Budgets that all gateways of a release share: each writes its spending to its Lease, and reads that of the others.

use crate::settings::GatewaySettings;
use futures_util::{StreamExt, pin_mut};
use k8s_openapi::api::coordination::v1::Lease;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt};
use remoe_api::{LEASE_LABEL, RELEASE_LABEL};
use remoe_gateway_core::{DaySpending, Gateway};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tokio::sync::watch;

/// Annotation of a gateway's Lease with its spending today.
pub(crate) const SPENDING_ANNOTATION: &str = "remoe.dev/spending";
/// Largest annotation that is written or read, in bytes.
const MAX_ANNOTATION_BYTES: usize = 128 << 10;

/// Value of the annotation. It names the gateway, because a Lease may pass from one gateway to another.
#[derive(Serialize, Deserialize)]
struct ReportedSpending {
    /// Uid of the gateway's pod.
    gateway: String,
    #[serde(flatten)]
    spending: DaySpending,
}

/// Returns the annotation of `gateway`, whose pod has this uid. Returns `None` if there is no spending to report.
pub(crate) fn annotation(gateway: &Gateway, uid: &str) -> Option<String> {
    let reported = ReportedSpending { gateway: uid.to_owned(), spending: gateway.spending()? };
    let text = serde_json::to_string(&reported).ok()?;
    if text.len() > MAX_ANNOTATION_BYTES {
        tracing::error!(
            bytes = text.len(),
            limit = MAX_ANNOTATION_BYTES,
            "spending not shared: too many budgets for a Lease"
        );
        return None;
    }
    Some(text)
}

/// Follows the spending of the other gateways of the release. Never returns. Sets `listed` once all Leases have been
/// read.
pub(crate) async fn follow(
    client: Client,
    settings: GatewaySettings,
    gateway: Arc<Gateway>,
    listed: watch::Sender<bool>,
) {
    let api: Api<Lease> = Api::namespaced(client, &settings.namespace);
    let (key, value) = LEASE_LABEL;
    let selector = format!("{key}={value},{RELEASE_LABEL}={}", settings.release);
    let events = watcher::watcher(api, watcher::Config::default().labels(&selector)).default_backoff();
    pin_mut!(events);
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::InitApply(lease) | Event::Apply(lease)) => {
                if let Some(reported) = reported(&lease).filter(|other| other.gateway != settings.uid) {
                    gateway.spent_elsewhere(&reported.gateway, reported.spending);
                }
            }
            Ok(Event::InitDone) => {
                listed.send_replace(true);
            }
            // The spending of a gateway that has ended still counts today.
            Ok(Event::Init | Event::Delete(_)) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot watch the Leases of gateways: budgets are not shared")
            }
        }
    }
}

/// Parses the spending that a gateway reports in its Lease.
fn reported(lease: &Lease) -> Option<ReportedSpending> {
    let text =
        lease.annotations().get(SPENDING_ANNOTATION).filter(|text| text.len() <= MAX_ANNOTATION_BYTES)?;
    match serde_json::from_str(text) {
        Ok(reported) => Some(reported),
        Err(error) => {
            tracing::warn!(lease = lease.name_any(), %error, "invalid spending of another gateway ignored");
            None
        }
    }
}
