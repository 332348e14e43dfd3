//! Leader election by a Lease.
//!
//! Guarantees: a leader that cannot renew stops before another candidate may start, if both clocks run at the same
//! speed; they need not agree on the time. A Lease is replaced only by its resource version, so that of two
//! candidates one wins.

use super::term::Term;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Api, PostParams};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// Share of the Lease's duration after which an unrenewed term ends. The rest covers writes in flight at that time.
const TERM_SHARE: f64 = 2.0 / 3.0;
/// Attempts to take or renew the Lease per duration.
const ATTEMPTS_PER_DURATION: u32 = 8;
/// Timeout of one call as a share of the duration: after a lost call, there is time for others within the term.
const CALL_TIMEOUT_SHARE: f64 = 1.0 / 4.0;

/// Candidate for a Lease.
pub(super) struct Candidate {
    api: Api<Lease>,
    name: String,
    identity: String,
    duration: Duration,
    term: Term,
    /// Lease as last read or written, and the local time at which it was first seen in this form.
    observed: Option<(Lease, Instant)>,
}

impl Candidate {
    /// Creates the candidate `identity` for the Lease `name` of this `duration`.
    pub(super) fn new(api: Api<Lease>, name: &str, identity: &str, duration: Duration) -> Self {
        Self {
            api,
            name: name.to_owned(),
            identity: identity.to_owned(),
            duration,
            term: Term::default(),
            observed: None,
        }
    }

    /// Returns the term of this candidate, which every renewal extends.
    pub(super) fn term(&self) -> Term {
        self.term.clone()
    }

    /// Waits until this candidate holds the Lease.
    pub(super) async fn acquire(&mut self) {
        while !self.attempt().await {
            sleep(self.retry_interval()).await;
        }
    }

    /// Renews the Lease until it is lost, which ends the term.
    pub(super) async fn renew_until_lost(&mut self) {
        // A renewal that completes after the term does not count.
        while let Some(end) = self.term.end()
            && timeout_at(end, self.renew()).await == Ok(true)
        {}
        self.term.close();
    }

    /// Releases the Lease, so that other candidates need not wait for its expiry. Nothing may be written after this.
    pub(super) async fn release(&mut self) {
        self.term.close();
        let Some((mut lease, _)) = self.observed.take() else { return };
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = None;
        }
        self.replace(lease).await;
    }

    fn retry_interval(&self) -> Duration {
        self.duration / ATTEMPTS_PER_DURATION
    }

    fn holder(&self) -> Option<&str> {
        let (lease, _) = self.observed.as_ref()?;
        lease.spec.as_ref()?.holder_identity.as_deref().filter(|holder| !holder.is_empty())
    }

    /// Tries until the Lease is renewed. Returns false if another candidate holds it.
    async fn renew(&mut self) -> bool {
        loop {
            sleep(self.retry_interval()).await;
            if self.attempt().await {
                return true;
            }
            if self.holder().is_some_and(|holder| holder != self.identity) {
                return false;
            }
        }
    }

    /// Takes or renews the Lease. Returns whether this candidate holds it.
    async fn attempt(&mut self) -> bool {
        // The term counts from before the call; other candidates count from when they observe the change.
        let started_at = Instant::now();
        // One call suffices if no other candidate wrote the Lease.
        let renewed = self.holder() == Some(&self.identity) && self.try_acquire().await;
        let held = renewed || self.read_and_acquire().await;
        if held {
            self.term.extend(started_at + self.duration.mul_f64(TERM_SHARE));
        }
        held
    }

    async fn read_and_acquire(&mut self) -> bool {
        match timeout(self.duration.mul_f64(CALL_TIMEOUT_SHARE), self.api.get_opt(&self.name)).await {
            Ok(Ok(Some(lease))) => {
                self.observe(lease);
                self.try_acquire().await
            }
            Ok(Ok(None)) => self.create().await,
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot read the Lease");
                false
            }
            Err(_elapsed) => {
                tracing::warn!("cannot read the Lease: timeout");
                false
            }
        }
    }

    /// Stores the Lease that was read. Its age counts from its last observed change, by the local clock.
    fn observe(&mut self, lease: Lease) {
        let is_known = self.observed.as_ref().is_some_and(|(observed, _)| observed.spec == lease.spec);
        let since = match (&self.observed, is_known) {
            (Some((_, since)), true) => *since,
            _ => Instant::now(),
        };
        self.observed = Some((lease, since));
    }

    async fn try_acquire(&mut self) -> bool {
        let Some((lease, since)) = &self.observed else { return false };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = self.holder();
        let ours = holder == Some(&self.identity);
        let lease_duration = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let lease_duration = lease_duration.map_or(self.duration, Duration::from_secs);
        if holder.is_some() && !ours && since.elapsed() < lease_duration {
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
        self.record_write(timeout(self.duration.mul_f64(CALL_TIMEOUT_SHARE), call).await)
    }

    async fn replace(&mut self, lease: Lease) -> bool {
        let params = PostParams::default();
        let call = self.api.replace(&self.name, &params, &lease);
        self.record_write(timeout(self.duration.mul_f64(CALL_TIMEOUT_SHARE), call).await)
    }

    fn record_write(&mut self, result: Result<kube::Result<Lease>, tokio::time::error::Elapsed>) -> bool {
        match result {
            Ok(Ok(lease)) => {
                self.observed = Some((lease, Instant::now()));
                true
            }
            Ok(Err(error)) => {
                tracing::debug!(%error, "cannot write the Lease");
                false
            }
            Err(_elapsed) => {
                tracing::warn!("cannot write the Lease: timeout");
                false
            }
        }
    }
}

fn now() -> MicroTime {
    MicroTime(jiff::Timestamp::now())
}
