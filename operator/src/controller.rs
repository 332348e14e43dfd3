//! Runs the pipeline whenever something changes, and again after what failed.

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

/// After the first failure; doubled after each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// For the one read that says whether deployments can be read.
const READ_LIMIT: Duration = Duration::from_secs(10);
/// Between two looks at one deployment at least: what happens at once is looked at once.
const BETWEEN_LOOKS: Duration = Duration::from_millis(30);
/// Between them where one follows the other without end: others have room beside it.
const LASTING_PACE: Duration = Duration::from_millis(250);
/// Number of reconciles that may come sooner than that after an idle time: a start is a handful of steps, and requests
/// wait for it.
const SOONER: u32 = 5;
/// Deployments of one namespace that are named and not taken up yet; beyond that who names them waits.
const NEWS: usize = 256;
/// Pause after a write conflict: another writer was first, so the state that was read is out of date. Nothing is wrong.
const CONFLICT_PAUSE: Duration = Duration::from_millis(200);

struct ControllerShared {
    context: Context,
    /// For looks at deployments of all namespaces together.
    permits: Semaphore,
    looks: Mutex<HashMap<ObjectRef<MoEDeployment>, ReconcileHistory>>,
    /// UIDs of deployments whose namespace is terminating, which takes nothing new for good.
    terminating: Mutex<HashMap<ObjectRef<MoEDeployment>, String>>,
}

/// State that is kept between reconciles of one deployment.
#[derive(Clone, Copy, Default)]
struct ReconcileHistory {
    /// Failures in a row.
    failures: u32,
    /// When the last one ended.
    last: Option<Instant>,
    /// The time that looks have taken up at the lasting pace.
    taken_up: Option<Instant>,
}

impl ReconcileHistory {
    /// How long to wait with the next one; none: it may be now.
    fn rest(&self, now: Instant) -> Option<Duration> {
        let last = self.last? + BETWEEN_LOOKS;
        let paced = self.taken_up.map_or(last, |taken_up| last.max(taken_up));
        paced.checked_duration_since(now).filter(|rest| !rest.is_zero())
    }

    /// One has ended.
    fn ended(&mut self, now: Instant) {
        let saved = now.checked_sub(LASTING_PACE * SOONER).unwrap_or(now);
        self.last = Some(now);
        self.taken_up = Some(self.taken_up.map_or(saved, |taken_up| taken_up.max(saved)) + LASTING_PACE);
    }
}

/// Keeps the deployments of `namespaces`, or of all where none is named, as they are wanted, until `shutdown`; runs that are
/// under way then are finished. `ready` is told when deployments can be read everywhere. What `reconcile_requests` names
/// is looked at as well.
pub(super) async fn control(
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
        looks: Mutex::default(),
        terminating: Mutex::default(),
    });
    let mut scopes: Vec<Option<&str>> = namespaces.iter().map(String::as_str).map(Some).collect();
    scopes.sort_unstable();
    scopes.dedup();
    if scopes.is_empty() {
        scopes.push(None);
    }
    let deployments: Vec<Api<MoEDeployment>> = scopes.iter().map(|scope| scoped(&client, *scope)).collect();
    let waiting = tokio::spawn(async move {
        let one = ListParams::default().limit(1);
        for deployments in deployments {
            // Until the resource is known and may be read, every watch fails too, and says why.
            while !matches!(timeout(READ_LIMIT, deployments.list_metadata(&one)).await, Ok(Ok(_))) {
                sleep(FIRST_PAUSE).await;
            }
        }
        ready.send_replace(true);
    });
    let (told, heard): (Vec<_>, Vec<_>) = scopes.iter().map(|_| mpsc::channel(NEWS)).unzip();
    let told: Vec<_> = scopes.iter().map(|scope| scope.map(str::to_owned)).zip(told).collect();
    let telling = tokio::spawn(async move {
        while let Some(deployment) = reconcile_requests.recv().await {
            let of_scope = told.iter().find(|(scope, _)| scope.is_none() || *scope == deployment.namespace);
            if let Some((_, told)) = of_scope {
                let _ended = told.send(deployment).await;
            }
        }
    });
    let controls = scopes.iter().zip(heard).map(|(scope, reconcile_requests)| {
        control_scope(&client, shared.clone(), reconcile_requests, *scope, concurrency, shutdown.clone())
    });
    join_all(controls).await;
    waiting.abort();
    telling.abort();
}

/// Keeps the deployments of one namespace, or of all.
async fn control_scope(
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
    let runs = controller.run(run, failed, shared.clone());
    runs.for_each(|run| async {
        match run {
            // Failures of runs are logged where they happen; what is left are those of watches.
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
        // What belongs to it is collected by the cluster.
        shared.forget(&key);
        return Ok(Action::await_change());
    }
    if shared.is_terminating(&key, &deployment) {
        return Ok(Action::await_change());
    }
    if let Some(rest) = shared.looks().get(&key).and_then(|looks| looks.rest(Instant::now())) {
        return Ok(Action::requeue(rest));
    }
    // The semaphore is never closed.
    let _permit = shared.permits.acquire().await;
    let metrics = &shared.context.metrics;
    metrics.reconciliations.inc();
    let started = Instant::now();
    let result = reconcile(&deployment, &shared.context).await;
    metrics.duration.observe(started.elapsed().as_secs_f64());
    shared.looks().entry(key.clone()).or_default().ended(Instant::now());
    let (namespace, name) = (deployment.namespace().unwrap_or_default(), deployment.name_any());
    match result {
        Ok(again) => {
            shared.looks().entry(key).or_default().failures = 0;
            tracing::debug!(namespace, name, ?again, "reconciled");
            Ok(Action::requeue(again))
        }
        Err(error) if error.namespace_ends() => {
            // The cluster deletes everything in it, the deployment included.
            tracing::info!(namespace, name, "skipped: namespace is terminating");
            shared.forget(&key);
            shared.terminating().insert(key, deployment.uid().unwrap_or_default());
            Ok(Action::await_change())
        }
        Err(error) => {
            metrics.errors.with_label_values(&[error.kind()]).inc();
            if let Some(action) = error.unreported_action() {
                // The status cannot tell: it is stated when everything else was done.
                let event =
                    ClusterEvent { action, ..ClusterEvent::warning("ReconcileFailed", error.to_string()) };
                publish(&shared.context.recorder, &deployment, &[event]).await;
            }
            tracing::warn!(namespace, name, %error, "reconcile failed");
            Err(error)
        }
    }
}

fn failed(deployment: Arc<MoEDeployment>, error: &ReconcileError, shared: Arc<ControllerShared>) -> Action {
    if error.kind() == "conflict" {
        return Action::requeue(CONFLICT_PAUSE);
    }
    let mut all = shared.looks();
    let looks = all.entry(ObjectRef::from_obj(deployment.as_ref())).or_default();
    looks.failures = looks.failures.saturating_add(1);
    Action::requeue(pause(looks.failures))
}

/// Doubles from failure to failure, and differs by up to a fifth, so that many deployments that failed
/// together do not come back together.
fn pause(failures: u32) -> Duration {
    let pause = Backoff { first: FIRST_PAUSE, longest: LONGEST_PAUSE }.after(failures);
    let share = RandomState::new().hash_one(failures) % 200;
    pause.mul_f64(1.0 - share as f64 / 1000.0)
}

impl ControllerShared {
    /// Returns whether the namespace of `deployment` is terminating.
    fn is_terminating(&self, key: &ObjectRef<MoEDeployment>, deployment: &MoEDeployment) -> bool {
        self.terminating().get(key).is_some_and(|uid| deployment.uid().as_ref() == Some(uid))
    }

    fn terminating(&self) -> MutexGuard<'_, HashMap<ObjectRef<MoEDeployment>, String>> {
        // Every change is one insertion or removal: a panic elsewhere cannot have left it half-done.
        self.terminating.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets a deployment that is gone, or going.
    fn forget(&self, key: &ObjectRef<MoEDeployment>) {
        self.looks().remove(key);
        self.context.main_pollers.end(key);
        self.context.starting.end(key);
        self.context.memory.forget(key);
        self.context.pool.forget(key);
        self.terminating().remove(key);
    }

    fn looks(&self) -> std::sync::MutexGuard<'_, HashMap<ObjectRef<MoEDeployment>, ReconcileHistory>> {
        // Every change is whole: a panic elsewhere cannot have left it half-done.
        self.looks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_reconciles_run_at_once_and_many_are_rate_limited() {
        let begin = Instant::now();
        let (mut looks, mut now) = (ReconcileHistory::default(), begin);
        let mut at = Vec::new();
        for _ in 0..40 {
            now += looks.rest(now).unwrap_or_default();
            at.push(now);
            looks.ended(now);
        }
        assert!(at[SOONER as usize - 1] - begin < LASTING_PACE, "{at:?}");
        assert!(at.windows(2).all(|pair| pair[1] - pair[0] >= BETWEEN_LOOKS));
        assert!(now - begin >= LASTING_PACE * (40 - 1 - SOONER), "{:?}", now - begin);
        // After a time without any it may be quick again, and no quicker than at first.
        now += LASTING_PACE * 100;
        assert_eq!(looks.rest(now), None);
        looks.ended(now);
        assert_eq!(looks.rest(now), Some(BETWEEN_LOOKS));
    }
}
