//! Leader election by a Lease: of several operators one works.
//!
//! Guarantees: a leader that cannot renew stops before anybody else may start, as long as the clocks of
//! both run at the same speed; they need not agree on the time. What a Lease says is taken over only by
//! its resource version, so that of two candidates one wins.

use super::term::Term;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Api, PostParams};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// A leader's term ends after this share of the Lease's duration without a renewal. The rest is for
/// writes that are on their way when it ends.
const TERM: f64 = 2.0 / 3.0;
/// A candidate tries this many times in the duration, a leader to renew as well.
const TRIES: u32 = 8;
/// One call takes at most this share of the duration: a lost one leaves time for others in the term.
const CALL: f64 = 1.0 / 4.0;

/// The Lease, as one candidate sees it.
pub(super) struct Candidate {
    api: Api<Lease>,
    name: String,
    identity: String,
    duration: Duration,
    term: Term,
    /// Lease as last read or written, and when it was first seen in this form.
    seen: Option<(Lease, Instant)>,
}

impl Candidate {
    /// A candidate called `identity` for the Lease `name`, which lasts for `duration`.
    pub(super) fn new(api: Api<Lease>, name: &str, identity: &str, duration: Duration) -> Self {
        Self {
            api,
            name: name.to_owned(),
            identity: identity.to_owned(),
            duration,
            term: Term::default(),
            seen: None,
        }
    }

    /// The time for which this candidate leads; every renewal prolongs it.
    pub(super) fn term(&self) -> Term {
        self.term.clone()
    }

    /// Waits until this candidate holds the Lease.
    pub(super) async fn lead(&mut self) {
        while !self.attempt().await {
            sleep(self.between_tries()).await;
        }
    }

    /// Renews the Lease for as long as that works; returns when it was lost, and with it the term.
    pub(super) async fn keep(&mut self) {
        // A renewal that takes longer than the term is none, whatever the API says in the end.
        while let Some(end) = self.term.end()
            && timeout_at(end, self.renew()).await == Ok(true)
        {}
        self.term.close();
    }

    /// Gives the Lease back, so that no other candidate has to wait until it expires. Nothing may be written after
    /// this.
    pub(super) async fn release(&mut self) {
        self.term.close();
        let Some((mut lease, _)) = self.seen.take() else { return };
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = None;
        }
        self.replace(lease).await;
    }

    fn between_tries(&self) -> Duration {
        self.duration / TRIES
    }

    fn holder(&self) -> Option<&str> {
        let (lease, _) = self.seen.as_ref()?;
        lease.spec.as_ref()?.holder_identity.as_deref().filter(|holder| !holder.is_empty())
    }

    /// Tries until the Lease is renewed; false where another one has it.
    async fn renew(&mut self) -> bool {
        loop {
            sleep(self.between_tries()).await;
            if self.attempt().await {
                return true;
            }
            if self.holder().is_some_and(|holder| holder != self.identity) {
                return false;
            }
        }
    }

    /// Takes or renews the Lease. Whether it is ours now.
    async fn attempt(&mut self) -> bool {
        // Counted from before the call: the others count from when they see what it did.
        let begun = Instant::now();
        // One call is enough as long as no other candidate writes the Lease.
        let renewed = self.holder() == Some(&self.identity) && self.take().await;
        let held = renewed || self.read_and_take().await;
        if held {
            self.term.prolong(begun + self.duration.mul_f64(TERM));
        }
        held
    }

    async fn read_and_take(&mut self) -> bool {
        match timeout(self.duration.mul_f64(CALL), self.api.get_opt(&self.name)).await {
            Ok(Ok(Some(lease))) => {
                self.note(lease);
                self.take().await
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
        let holder = self.holder();
        let ours = holder == Some(&self.identity);
        let lasts = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let lasts = lasts.map_or(self.duration, Duration::from_secs);
        if holder.is_some() && !ours && since.elapsed() < lasts {
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
        self.wrote(timeout(self.duration.mul_f64(CALL), call).await)
    }

    async fn replace(&mut self, lease: Lease) -> bool {
        let params = PostParams::default();
        let call = self.api.replace(&self.name, &params, &lease);
        self.wrote(timeout(self.duration.mul_f64(CALL), call).await)
    }

    fn wrote(&mut self, result: Result<kube::Result<Lease>, tokio::time::error::Elapsed>) -> bool {
        match result {
            Ok(Ok(lease)) => {
                self.seen = Some((lease, Instant::now()));
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
