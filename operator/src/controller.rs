//! Runs a reconcile after every change of a deployment or its objects, and retries failed ones.

use super::apply::publish;
use super::events::ClusterEvent;
use super::names::MANAGER;
use super::reconcile::{Context, ReconcileError, reconcile};
use futures_util::future::join_all;
use futures_util::{StreamExt, stream};
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::ListParams;
use kube::runtime::controller::{Action, Config, Controller, Error};
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use remoe_api::{MoEDemand, MoEDeployment, MoEPlan, MoERecord};
use remoe_rollout::backoff::Backoff;
use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Delay before the first retry; doubles with each further failure.
const FIRST_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(300);
/// Timeout of the probe that tells if deployments can be read.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum interval between two reconciles of one deployment; coalesces simultaneous changes.
const MIN_RECONCILE_INTERVAL: Duration = Duration::from_millis(30);
/// Interval per reconcile under sustained changes, so that other deployments get their share.
const SUSTAINED_RECONCILE_INTERVAL: Duration = Duration::from_millis(250);
/// Number of reconciles that may exceed the sustained rate after an idle time: a start takes a handful of steps, and
/// requests wait for it.
const RECONCILE_BURST: u32 = 5;
/// Capacity of the queue of reconcile requests of one namespace; senders wait when it is full.
const MAX_QUEUED_REQUESTS: usize = 256;
/// Pause after a write conflict: another writer was first, so the state that was read is out of date. Nothing is wrong.
const CONFLICT_RETRY_DELAY: Duration = Duration::from_millis(200);

struct ControllerShared {
    context: Context,
    /// Limits concurrent reconciles across all namespaces.
    permits: Semaphore,
    histories: Mutex<HashMap<ObjectRef<MoEDeployment>, ReconcileHistory>>,
    /// UIDs of deployments in terminating namespaces. The API accepts no new objects there.
    terminating: Mutex<HashMap<ObjectRef<MoEDeployment>, String>>,
}

/// Rate limiter and failure count of one deployment.
#[derive(Clone, Copy, Default)]
struct ReconcileHistory {
    /// Consecutive failures.
    failures: u32,
    /// End of the last reconcile.
    last_ended: Option<Instant>,
    /// Time until which past reconciles have used up the sustained rate (as in the generic cell rate algorithm).
    rate_used_until: Option<Instant>,
}

impl ReconcileHistory {
    /// Returns how long to wait before the next reconcile; absent if it may run now.
    fn remaining_delay(&self, now: Instant) -> Option<Duration> {
        let last_ended = self.last_ended? + MIN_RECONCILE_INTERVAL;
        let paced =
            self.rate_used_until.map_or(last_ended, |rate_used_until| last_ended.max(rate_used_until));
        paced.checked_duration_since(now).filter(|remaining_delay| !remaining_delay.is_zero())
    }

    /// Records that a reconcile ended at `now`.
    fn record_end(&mut self, now: Instant) {
        let burst_start = now.checked_sub(SUSTAINED_RECONCILE_INTERVAL * RECONCILE_BURST).unwrap_or(now);
        self.last_ended = Some(now);
        self.rate_used_until = Some(
            self.rate_used_until.map_or(burst_start, |rate_used_until| rate_used_until.max(burst_start))
                + SUSTAINED_RECONCILE_INTERVAL,
        );
    }
}

/// Reconciles the deployments of `namespaces`, or of all namespaces if the list is empty, until `shutdown`. Running
/// reconciles are finished first. Sends `true` to `ready` once deployments can be read in all of them. Deployments
/// from `reconcile_requests` are reconciled as well.
pub(super) async fn run_controllers(
    context: Context,
    mut reconcile_requests: mpsc::Receiver<ObjectRef<MoEDeployment>>,
    namespaces: &[String],
    concurrency: u16,
    ready: watch::Sender<bool>,
    shutdown: CancellationToken,
) {
    let client = context.client.clone();
    let permits = Semaphore::new(concurrency.into());
    let shared = Arc::new(ControllerShared {
        context,
        permits,
        histories: Mutex::default(),
        terminating: Mutex::default(),
    });
    let mut scopes: Vec<Option<&str>> = namespaces.iter().map(String::as_str).map(Some).collect();
    scopes.sort_unstable();
    scopes.dedup();
    if scopes.is_empty() {
        scopes.push(None);
    }
    let deployments: Vec<Api<MoEDeployment>> = scopes.iter().map(|scope| scoped(&client, *scope)).collect();
    let readiness_probe = tokio::spawn(async move {
        let one = ListParams::default().limit(1);
        for deployments in deployments {
            // Until the CRD exists and the role may read it, every watch fails too, and logs the reason.
            while !matches!(timeout(READ_TIMEOUT, deployments.list_metadata(&one)).await, Ok(Ok(_))) {
                sleep(FIRST_RETRY_DELAY).await;
            }
        }
        ready.send_replace(true);
    });
    let (request_senders, request_receivers): (Vec<_>, Vec<_>) =
        scopes.iter().map(|_| mpsc::channel(MAX_QUEUED_REQUESTS)).unzip();
    let request_senders: Vec<_> =
        scopes.iter().map(|scope| scope.map(str::to_owned)).zip(request_senders).collect();
    let forwarding = tokio::spawn(async move {
        while let Some(deployment) = reconcile_requests.recv().await {
            let sender =
                request_senders.iter().find(|(scope, _)| scope.is_none() || *scope == deployment.namespace);
            if let Some((_, request_senders)) = sender {
                let _ended = request_senders.send(deployment).await;
            }
        }
    });
    let controllers = scopes.iter().zip(request_receivers).map(|(scope, reconcile_requests)| {
        run_controller(&client, shared.clone(), reconcile_requests, *scope, concurrency, shutdown.clone())
    });
    join_all(controllers).await;
    readiness_probe.abort();
    forwarding.abort();
}

/// Reconciles the deployments of one namespace, or of all.
async fn run_controller(
    client: &Client,
    shared: Arc<ControllerShared>,
    reconcile_requests: mpsc::Receiver<ObjectRef<MoEDeployment>>,
    namespace: Option<&str>,
    concurrency: u16,
    shutdown: CancellationToken,
) {
    let has_gateways = shared.context.gateways.is_some();
    let ours = watcher::Config::default().labels(&format!("app.kubernetes.io/managed-by={MANAGER}"));
    let controller = Controller::new(scoped::<MoEDeployment>(client, namespace), watcher::Config::default())
        .with_config(Config::default().concurrency(concurrency))
        .owns(scoped::<Pod>(client, namespace), ours.clone())
        .owns(scoped::<Service>(client, namespace), ours.clone())
        .owns(scoped::<MoERecord>(client, namespace), ours.clone())
        .owns(scoped::<NetworkPolicy>(client, namespace), ours.clone())
        .owns(scoped::<PodDisruptionBudget>(client, namespace), ours.clone())
        .owns(scoped::<MoEPlan>(client, namespace), ours.clone())
        .reconcile_on(stream::unfold(reconcile_requests, async |mut reconcile_requests| {
            Some((reconcile_requests.recv().await?, reconcile_requests))
        }))
        .graceful_shutdown_on(shutdown.cancelled_owned());
    let controller = match has_gateways {
        true => controller.owns(scoped::<MoEDemand>(client, namespace), ours),
        false => controller,
    };
    let runs = controller.run(run, retry_after_failure, shared.clone());
    runs.for_each(|run| async {
        match run {
            // `run` logs failed reconciles; the remaining errors are those of watches.
            Err(error @ (Error::QueueError(_) | Error::RunnerError(_))) => {
                tracing::warn!(%error, "watch failed");
            }
            Err(Error::ObjectNotFound(gone)) => {
                let namespace = gone.namespace.unwrap_or_default();
                shared.forget(&ObjectRef::new(&gone.name).within(&namespace));
            }
            Ok(_) | Err(_) => {}
        }
    })
    .await;
}

fn scoped<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

async fn run(
    deployment: Arc<MoEDeployment>,
    shared: Arc<ControllerShared>,
) -> Result<Action, ReconcileError> {
    let key = ObjectRef::from_obj(deployment.as_ref());
    if deployment.metadata.deletion_timestamp.is_some() {
        // The cluster garbage-collects its objects.
        shared.forget(&key);
        return Ok(Action::await_change());
    }
    if shared.is_terminating(&key, &deployment) {
        return Ok(Action::await_change());
    }
    if let Some(remaining_delay) =
        shared.histories().get(&key).and_then(|histories| histories.remaining_delay(Instant::now()))
    {
        return Ok(Action::requeue(remaining_delay));
    }
    // The semaphore is never closed.
    let _permit = shared.permits.acquire().await;
    let metrics = &shared.context.metrics;
    metrics.reconciliations.inc();
    let started = Instant::now();
    let result = reconcile(&deployment, &shared.context).await;
    metrics.duration.observe(started.elapsed().as_secs_f64());
    shared.histories().entry(key.clone()).or_default().record_end(Instant::now());
    let (namespace, name) = (deployment.namespace().unwrap_or_default(), deployment.name_any());
    match result {
        Ok(again) => {
            shared.histories().entry(key).or_default().failures = 0;
            tracing::debug!(namespace, name, ?again, "reconciled");
            Ok(Action::requeue(again))
        }
        Err(error) if error.namespace_is_terminating() => {
            // The cluster deletes everything in the namespace, including this deployment.
            tracing::info!(namespace, name, "skipped: namespace is terminating");
            shared.forget(&key);
            shared.terminating().insert(key, deployment.uid().unwrap_or_default());
            Ok(Action::await_change())
        }
        Err(error) => {
            metrics.errors.with_label_values(&[error.kind()]).inc();
            if let Some(action) = error.unreported_action() {
                // The status cannot report this failure: it is written only after all other writes succeeded.
                let event =
                    ClusterEvent { action, ..ClusterEvent::warning("ReconcileFailed", error.to_string()) };
                publish(&shared.context.recorder, &deployment, &[event]).await;
            }
            tracing::warn!(namespace, name, %error, "reconcile failed");
            Err(error)
        }
    }
}

fn retry_after_failure(
    deployment: Arc<MoEDeployment>,
    error: &ReconcileError,
    shared: Arc<ControllerShared>,
) -> Action {
    if error.kind() == "conflict" {
        return Action::requeue(CONFLICT_RETRY_DELAY);
    }
    let mut all = shared.histories();
    let histories = all.entry(ObjectRef::from_obj(deployment.as_ref())).or_default();
    histories.failures = histories.failures.saturating_add(1);
    Action::requeue(retry_delay(histories.failures))
}

/// Returns the retry delay: exponential backoff, minus a random fifth at most, so that deployments that failed
/// together do not retry together.
fn retry_delay(failures: u32) -> Duration {
    let retry_delay = Backoff { first: FIRST_RETRY_DELAY, longest: MAX_RETRY_DELAY }.after(failures);
    let share = RandomState::new().hash_one(failures) % 200;
    retry_delay.mul_f64(1.0 - share as f64 / 1000.0)
}

impl ControllerShared {
    /// Returns whether the namespace of `deployment` is terminating.
    fn is_terminating(&self, key: &ObjectRef<MoEDeployment>, deployment: &MoEDeployment) -> bool {
        self.terminating().get(key).is_some_and(|uid| deployment.uid().as_ref() == Some(uid))
    }

    fn terminating(&self) -> MutexGuard<'_, HashMap<ObjectRef<MoEDeployment>, String>> {
        // Every change is one map operation: a panic elsewhere cannot leave it inconsistent.
        self.terminating.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops all state of a deployment that is deleted or being deleted.
    fn forget(&self, key: &ObjectRef<MoEDeployment>) {
        self.histories().remove(key);
        self.context.main_pollers.end(key);
        self.context.starting.cancel(key);
        self.context.memory.forget(key);
        self.context.pool.forget(key);
        self.terminating().remove(key);
    }

    fn histories(&self) -> std::sync::MutexGuard<'_, HashMap<ObjectRef<MoEDeployment>, ReconcileHistory>> {
        // Every change is one map operation: a panic elsewhere cannot leave it inconsistent.
        self.histories.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_reconciles_run_at_once_and_many_are_rate_limited() {
        let begin = Instant::now();
        let (mut histories, mut now) = (ReconcileHistory::default(), begin);
        let mut at = Vec::new();
        for _ in 0..40 {
            now += histories.remaining_delay(now).unwrap_or_default();
            at.push(now);
            histories.record_end(now);
        }
        assert!(at[RECONCILE_BURST as usize - 1] - begin < SUSTAINED_RECONCILE_INTERVAL, "{at:?}");
        assert!(at.windows(2).all(|pair| pair[1] - pair[0] >= MIN_RECONCILE_INTERVAL));
        assert!(
            now - begin >= SUSTAINED_RECONCILE_INTERVAL * (40 - 1 - RECONCILE_BURST),
            "{:?}",
            now - begin
        );
        // After an idle time the burst is available again, and no more than that.
        now += SUSTAINED_RECONCILE_INTERVAL * 100;
        assert_eq!(histories.remaining_delay(now), None);
        histories.record_end(now);
        assert_eq!(histories.remaining_delay(now), Some(MIN_RECONCILE_INTERVAL));
    }
}
