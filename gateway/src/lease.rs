//! Lease of this pod. While it is renewed, the operator counts on this gateway's reports.
//!
//! Leases have names of a fixed set, `RELEASE-gateway-N`, so that the role of gateways names them and covers no other
//! Lease of the namespace, such as the one of the operators. A gateway takes a free one by server-side apply without
//! force, under a field manager of its own: of two gateways that apply the same Lease, one gets a conflict.
//!
//! A gateway that cannot renew its Lease for [`FENCE`] queues new requests. Soon after ([`LEASE_SECONDS`]) the
//! operator considers the gateway dead, and may end functions without asking it. Both measure time by their own
//! clocks.

use crate::settings::GatewaySettings;
use crate::shared_budgets::{SPENDING_ANNOTATION, annotation};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use remoe_api::{LEASE_LABEL, LEASE_SECONDS, RELEASE_LABEL, SHOWN_ANNOTATION};
use remoe_gateway_core::Gateway;
use remoe_proto::identity::Keyring;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};

/// Time between two renewals.
const RENEW_INTERVAL: Duration = Duration::from_secs(3);
/// Time after a failed renewal.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Timeout of a renewal.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);
/// Time without renewal after which new requests are queued: two thirds of the Lease's duration, from the start of
/// the last renewal.
const FENCE: Duration = Duration::from_secs(LEASE_SECONDS as u64 * 2 / 3);
/// Time without renewal after which a Lease is free even if its pod exists, because evicted pods stay as objects. The
/// clocks of two nodes differ by less.
const ABANDONED: SignedDuration = SignedDuration::from_mins(5);
/// Status code of a conflict.
const CONFLICT: u16 = 409;

/// Means to take, renew and release a Lease.
#[derive(Clone)]
pub(crate) struct LeaseHolder {
    api: Api<Lease>,
    /// Number of Lease names of the release.
    slots: u16,
    /// Name of the Lease that is held, if one is.
    lease: watch::Sender<Option<String>>,
    namespace: String,
    release: String,
    pod: String,
    uid: String,
    /// Credentials for main functions that authenticate gateways.
    keyring: Option<Arc<Keyring>>,
    /// Gateway whose spending the Lease reports.
    gateway: Arc<Gateway>,
}

impl LeaseHolder {
    pub(crate) fn new(
        client: Client,
        settings: &GatewaySettings,
        keyring: Option<Arc<Keyring>>,
        gateway: Arc<Gateway>,
    ) -> Self {
        Self {
            api: Api::namespaced(client, &settings.namespace),
            slots: settings.lease_slots,
            lease: watch::Sender::default(),
            namespace: settings.namespace.clone(),
            release: settings.release.clone(),
            pod: settings.pod.clone(),
            uid: settings.uid.clone(),
            keyring,
            gateway,
        }
    }

    /// Renews the Lease. If none is held, or another gateway took it over, takes a free one.
    async fn renew(&self) -> Result<(), LeaseError> {
        let held = self.lease.borrow().clone();
        if let Some(name) = held {
            match self.apply(&name, &self.uid, None).await {
                Err(error) if is_conflict(&error) => {}
                renewed => return Ok(renewed?),
            }
        }
        let name = self.take().await?;
        tracing::info!(lease = name, "Lease acquired");
        self.lease.send_replace(Some(name));
        Ok(())
    }

    /// Takes the Lease that is this gateway's already, else the first that does not exist, else one that was released
    /// or abandoned.
    async fn take(&self) -> Result<String, LeaseError> {
        let names = || (0..self.slots).map(|slot| format!("{}-gateway-{slot}", self.release));
        // A container that restarted must not hold two of them: the operator waits for both.
        for name in names() {
            let lease = self.api.get_opt(&name).await?;
            let holder = lease.and_then(|lease| lease.spec?.holder_identity);
            if holder.as_deref() == Some(&self.uid) {
                match self.apply(&name, &self.uid, None).await {
                    Err(error) if is_conflict(&error) => {}
                    taken => return Ok(taken.map(|()| name)?),
                }
            }
        }
        for name in names() {
            match self.apply(&name, &self.uid, None).await {
                Err(error) if is_conflict(&error) => {}
                taken => return Ok(taken.map(|()| name)?),
            }
        }
        for name in names() {
            let Some(lease) = self.api.get_opt(&name).await?.filter(is_free) else { continue };
            match self.apply(&name, &self.uid, lease.resource_version()).await {
                Err(error) if is_conflict(&error) => {}
                taken => return Ok(taken.map(|()| name)?),
            }
        }
        Err(LeaseError::NoneFree { slots: self.slots, release: self.release.clone() })
    }

    /// Releases the Lease, so that the operator stops waiting for this gateway at once. The object is deleted with the
    /// pod, so gateways need no right to delete Leases.
    pub(crate) async fn release(&self) {
        let held = self.lease.borrow().clone();
        let Some(name) = held else { return };
        if let Err(error) = self.apply(&name, "", None).await {
            tracing::warn!(%error, "cannot release the Lease");
        }
    }

    /// Applies the Lease `name` with `holder`; empty: released. With the resource version `taken_over`, takes it over
    /// from its holder unless it has changed since.
    async fn apply(&self, name: &str, holder: &str, taken_over: Option<String>) -> kube::Result<()> {
        let (key, value) = LEASE_LABEL;
        let shown =
            self.keyring.iter().map(|keyring| (SHOWN_ANNOTATION, keyring.current().identity().to_string()));
        let spending = annotation(&self.gateway, &self.uid).map(|spending| (SPENDING_ANNOTATION, spending));
        let annotations: BTreeMap<&str, String> = shown.chain(spending).collect();
        let mut lease = json!({
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "labels": {key: value, RELEASE_LABEL: self.release, "app.kubernetes.io/part-of": "remoe"},
                "annotations": annotations,
                // The Lease is garbage collected with the pod.
                "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": self.pod, "uid": self.uid}],
            },
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": LEASE_SECONDS,
                "renewTime": MicroTime(Timestamp::now()),
            },
        });
        let mut params = PatchParams::apply(&format!("remoe-gateway-{}", self.uid));
        if let Some(version) = taken_over {
            lease["metadata"]["resourceVersion"] = json!(version);
            params = params.force();
        }
        self.api.patch(name, &params, &Patch::Apply(&lease)).await.map(drop)
    }
}

/// Reason why no Lease is held.
#[derive(Debug, thiserror::Error)]
enum LeaseError {
    /// A call to the API server failed.
    #[error(transparent)]
    Api(#[from] kube::Error),
    /// All names are taken.
    #[error("all {slots} Leases {release}-gateway-N are held; delete those of pods that do not run")]
    NoneFree {
        /// Number of names.
        slots: u16,
        /// Release of the gateways.
        release: String,
    },
}

fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == CONFLICT)
}

/// Reports if another gateway may take over `lease`: its holder released it, or has not renewed it for [`ABANDONED`].
fn is_free(lease: &Lease) -> bool {
    let Some(spec) = &lease.spec else { return true };
    let is_released = spec.holder_identity.as_ref().is_none_or(String::is_empty);
    let renewed = spec.renew_time.as_ref().map(|time| time.0);
    is_released || renewed.is_none_or(|renewed| Timestamp::now().duration_since(renewed) > ABANDONED)
}

/// Renews the Lease periodically, and publishes whether it is held. Never returns.
pub(crate) async fn keep(holder: LeaseHolder, is_held: watch::Sender<bool>) {
    let mut valid_until = Instant::now();
    loop {
        let started = Instant::now();
        let deadline = match *is_held.borrow() {
            true => valid_until.min(started + CALL_TIMEOUT),
            false => started + CALL_TIMEOUT,
        };
        let next = match timeout_at(deadline, holder.renew()).await {
            Ok(Ok(())) => {
                valid_until = started + FENCE;
                is_held.send_replace(true);
                started + RENEW_INTERVAL
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot renew the Lease");
                Instant::now() + RETRY_INTERVAL
            }
            Err(_late) => {
                tracing::warn!("cannot renew the Lease: timeout");
                Instant::now() + RETRY_INTERVAL
            }
        };
        if *is_held.borrow() && valid_until <= next {
            sleep_until(valid_until).await;
            tracing::error!("lost the Lease: queueing new requests");
            is_held.send_replace(false);
        }
        sleep_until(next).await;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use clap::Parser;
    use http::{Method, Request, Response, StatusCode};
    use http_body_util::BodyExt;
    use kube::client::Body;
    use remoe_gateway_core::{GatewayMetrics, GatewayOptions};
    use serde_json::Value;
    use std::sync::Mutex;
    use tower::service_fn;

    /// Leases by name, each with the field manager that owns its holder.
    #[derive(Clone, Default)]
    struct Leases(Arc<Mutex<BTreeMap<String, (String, Value)>>>);

    impl Leases {
        /// Answers as the API server: an apply that changes a field of another manager conflicts, unless it is forced
        /// and names the present version.
        async fn answer(self, request: Request<Body>) -> Result<Response<Body>, std::convert::Infallible> {
            let (parts, body) = request.into_parts();
            let name = parts.uri.path().rsplit('/').next().unwrap().to_owned();
            let query = parts.uri.query().unwrap_or_default().to_owned();
            let body = body.collect().await.unwrap().to_bytes();
            let mut leases = self.0.lock().unwrap();
            let known = leases.get(&name).cloned();
            if parts.method == Method::GET {
                return Ok(known.map_or_else(|| status(404), |(_, lease)| object(&lease)));
            }
            let mut lease: Value = serde_json::from_slice(&body).unwrap();
            let manager = query.split('&').find_map(|pair| pair.strip_prefix("fieldManager=")).unwrap();
            let version = known.as_ref().map_or(0, |(_, lease)| version(lease));
            if let Some((owner, before)) = &known {
                let asked = lease["metadata"]["resourceVersion"].as_str();
                let is_same = owner == manager || before["spec"] == lease["spec"];
                let may = is_same || (query.contains("force=true") && asked == Some(&version.to_string()));
                if !may {
                    return Ok(status(409));
                }
            }
            lease["metadata"]["resourceVersion"] = json!((version + 1).to_string());
            leases.insert(name, (manager.to_owned(), lease.clone()));
            Ok(object(&lease))
        }

        fn holder(&self, name: &str) -> Option<String> {
            let leases = self.0.lock().unwrap();
            Some(leases.get(name)?.1["spec"]["holderIdentity"].as_str()?.to_owned())
        }

        fn set(&self, name: &str, field: &str, value: Value) {
            self.0.lock().unwrap().get_mut(name).unwrap().1["spec"][field] = value;
        }

        fn gateway(&self, uid: &str) -> LeaseHolder {
            let leases = self.clone();
            let client = Client::new(service_fn(move |request| leases.clone().answer(request)), "n");
            let arguments =
                ["gateway", "--namespace=n", "--pod=p", "--release=r", "--lease-slots=2", "--open", "--uid"];
            let settings = GatewaySettings::try_parse_from(arguments.into_iter().chain([uid])).unwrap();
            let metrics = GatewayMetrics::new().unwrap();
            let gateway = Gateway::new(GatewayOptions::default(), Vec::new(), metrics);
            LeaseHolder::new(client, &settings, None, gateway)
        }
    }

    fn version(lease: &Value) -> u64 {
        lease["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap()
    }

    fn object(lease: &Value) -> Response<Body> {
        Response::new(Body::from(lease.to_string().into_bytes()))
    }

    fn status(code: u16) -> Response<Body> {
        let reason = if code == 404 { "NotFound" } else { "Conflict" };
        let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
            "message": "", "reason": reason});
        let mut answer = object(&body);
        *answer.status_mut() = StatusCode::from_u16(code).unwrap();
        answer
    }

    #[tokio::test]
    async fn gateways_hold_leases_of_the_fixed_names() {
        let leases = Leases::default();
        let (one, two, three) = (leases.gateway("u1"), leases.gateway("u2"), leases.gateway("u3"));
        one.renew().await.unwrap();
        two.renew().await.unwrap();
        one.renew().await.unwrap();
        assert_eq!(leases.holder("r-gateway-0").unwrap(), "u1");
        assert_eq!(leases.holder("r-gateway-1").unwrap(), "u2");
        assert!(matches!(three.renew().await, Err(LeaseError::NoneFree { slots: 2, .. })));
        assert_eq!(leases.0.lock().unwrap().len(), 2, "no Lease of another name");
    }

    #[tokio::test]
    async fn restarted_container_finds_the_lease_of_its_pod() {
        let leases = Leases::default();
        leases.gateway("u1").renew().await.unwrap();
        leases.gateway("u1").renew().await.unwrap();
        assert_eq!(leases.holder("r-gateway-1"), None);
    }

    #[tokio::test]
    async fn released_or_abandoned_leases_are_taken_over() {
        let leases = Leases::default();
        let (one, two) = (leases.gateway("u1"), leases.gateway("u2"));
        one.renew().await.unwrap();
        two.renew().await.unwrap();
        two.release().await;
        leases.gateway("u3").renew().await.unwrap();
        assert_eq!(leases.holder("r-gateway-1").unwrap(), "u3");
        let renewed = |ago: i64| json!(MicroTime(Timestamp::now() - SignedDuration::from_secs(ago)));
        leases.set("r-gateway-0", "renewTime", renewed(290));
        let four = leases.gateway("u4");
        four.renew().await.unwrap_err();
        leases.set("r-gateway-0", "renewTime", renewed(310));
        four.renew().await.unwrap();
        assert_eq!(leases.holder("r-gateway-0").unwrap(), "u4");
        // The previous holder does not take it back.
        assert!(matches!(one.renew().await, Err(LeaseError::NoneFree { .. })));
        assert_eq!(leases.holder("r-gateway-0").unwrap(), "u4");
    }
}
