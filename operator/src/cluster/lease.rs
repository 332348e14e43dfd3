//! Leader election by a Lease: of several operators one works.
//!
//! Guarantees: a leader that cannot renew stops before anybody else may start, as long as the clocks of
//! both run at the same speed; they need not agree on the time. What a Lease says is taken over only by
//! its resource version, so that of two candidates one wins.

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Api, PostParams};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// A leader gives up after this share of the Lease's duration without a renewal.
const GIVE_UP: f64 = 2.0 / 3.0;
/// And tries to renew this many times in the duration.
const TRIES: u32 = 8;

/// The Lease, as one candidate sees it.
pub(super) struct Candidate {
    api: Api<Lease>,
    name: String,
    identity: String,
    duration: Duration,
    /// What was last read, and when it was first seen in this form.
    seen: Option<(Lease, Instant)>,
}

impl Candidate {
    /// A candidate called `identity` for the Lease `name`, which lasts for `duration`.
    pub(super) fn new(api: Api<Lease>, name: &str, identity: &str, duration: Duration) -> Self {
        Self { api, name: name.to_owned(), identity: identity.to_owned(), duration, seen: None }
    }

    fn between_tries(&self) -> Duration {
        self.duration / TRIES
    }

    /// Waits until this candidate holds the Lease.
    pub(super) async fn lead(&mut self) {
        while !self.attempt().await {
            sleep(self.between_tries()).await;
        }
    }

    /// Renews the Lease for as long as that works; returns when it was lost.
    pub(super) async fn keep(&mut self) {
        let mut renewed = Instant::now();
        loop {
            sleep(self.between_tries()).await;
            let begun = Instant::now();
            if self.attempt().await {
                // Counted from before the call: the others count from when they see it.
                renewed = begun;
            } else if renewed.elapsed() >= self.duration.mul_f64(GIVE_UP) || self.is_anothers() {
                return;
            }
        }
    }

    /// Gives the Lease back, so that nobody has to wait for its end.
    pub(super) async fn release(&mut self) {
        let Some((mut lease, _)) = self.seen.take() else { return };
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = None;
        }
        self.replace(lease).await;
    }

    fn is_anothers(&self) -> bool {
        let holder = self.seen.as_ref().and_then(|(lease, _)| lease.spec.as_ref()?.holder_identity.as_ref());
        holder.is_some_and(|holder| *holder != self.identity)
    }

    /// Takes or renews the Lease. Whether it is ours now.
    async fn attempt(&mut self) -> bool {
        let deadline = self.duration.mul_f64(GIVE_UP) / 2;
        match timeout(deadline, self.api.get_opt(&self.name)).await {
            Ok(Ok(Some(lease))) => {
                self.note(lease);
                self.take().await
            }
            Ok(Ok(None)) => self.create().await,
            Ok(Err(error)) => {
                tracing::warn!(%error, "the Lease cannot be read");
                false
            }
            Err(_elapsed) => false,
        }
    }

    /// Takes note of what was read. Time counts from when it changed, by our clock.
    fn note(&mut self, lease: Lease) {
        let is_known = self.seen.as_ref().is_some_and(|(seen, _)| seen.spec == lease.spec);
        let since = match (&self.seen, is_known) {
            (Some((_, since)), true) => *since,
            _ => Instant::now(),
        };
        self.seen = Some((lease, since));
    }

    async fn take(&mut self) -> bool {
        let Some((lease, since)) = &self.seen else { return false };
        let spec = lease.spec.clone().unwrap_or_default();
        let ours = spec.holder_identity.as_ref() == Some(&self.identity);
        let held = spec.holder_identity.as_ref().is_some_and(|holder| !holder.is_empty());
        let lasts = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let lasts = lasts.map_or(self.duration, Duration::from_secs);
        if held && !ours && since.elapsed() < lasts {
            return false;
        }
        let mut lease = lease.clone();
        let transitions = spec.lease_transitions.unwrap_or(0);
        lease.spec = Some(LeaseSpec {
            acquire_time: if ours { spec.acquire_time.clone() } else { Some(now()) },
            lease_transitions: Some(if ours { transitions } else { transitions.saturating_add(1) }),
            ..self.spec()
        });
        self.replace(lease).await
    }

    fn spec(&self) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(i32::try_from(self.duration.as_secs()).unwrap_or(i32::MAX)),
            acquire_time: Some(now()),
            renew_time: Some(now()),
            lease_transitions: Some(0),
            ..LeaseSpec::default()
        }
    }

    async fn create(&mut self) -> bool {
        let lease = Lease {
            metadata: ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
            spec: Some(self.spec()),
        };
        let params = PostParams::default();
        let call = self.api.create(&params, &lease);
        self.wrote(timeout(self.duration / 3, call).await)
    }

    async fn replace(&mut self, lease: Lease) -> bool {
        let params = PostParams::default();
        let call = self.api.replace(&self.name, &params, &lease);
        self.wrote(timeout(self.duration / 3, call).await)
    }

    fn wrote(&mut self, result: Result<kube::Result<Lease>, tokio::time::error::Elapsed>) -> bool {
        match result {
            Ok(Ok(lease)) => {
                self.seen = Some((lease, Instant::now()));
                true
            }
            Ok(Err(error)) => {
                tracing::debug!(%error, "the Lease was not written");
                false
            }
            Err(_elapsed) => false,
        }
    }
}

fn now() -> MicroTime {
    MicroTime(jiff::Timestamp::now())
}
