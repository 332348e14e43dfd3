//! Background tasks that poll main functions and send them routing generations.
//!
//! No reconcile waits for a pod. It sets which main functions to poll and which generation to send
//! ([`MainPollers::poll_only`]). The next reconcile reads the results ([`MainPollers::observations`]); a changed
//! result requests one. Each main function has its own task, which ends with its pod, with the deployment, or when no
//! reconcile has renewed it for a while.

use super::main_client::{self, DescriptionError, GenerationOutcome, RoutingOrder, WatchedFunctions};
use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use remoe_api::MoEDeployment;
use remoe_autoscale::replicas::RemoteWorkReport;
use remoe_proto::identity::Trust;
use remoe_proto::placement_digest;
use remoe_proto::v1::{LayerExperts, LayerPairs};
use remoe_rollout::groups::ReportedUsage;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};

/// Maximum polled main functions of one deployment: two revisions of the maximum number of replicas.
const MAX_POLLED_MAINS: usize = 128;
/// Maximum concurrent calls for one deployment. Calls for other deployments do not wait for them.
const MAX_CONCURRENT_CALLS: usize = 32;
/// Minimum interval between two calls of one main function.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// Initial interval after a change, when requests may wait for the main function. A new order is sent at once.
const EAGER_INTERVAL: Duration = Duration::from_millis(100);
/// Interval while a starting main function has not answered yet.
const STARTING_INTERVAL: Duration = Duration::from_millis(50);
/// Longest time for which `STARTING_INTERVAL` applies.
const STARTING_LIMIT: Duration = Duration::from_secs(60);
/// Maximum interval between two calls, while nothing changes.
const MAX_INTERVAL: Duration = Duration::from_secs(15);
/// Lifetime of an order after the reconcile that gave it. Later the address may belong to another pod.
const ORDER_LIFETIME: Duration = Duration::from_secs(60);
/// Lifetime of a poller after the last reconcile that requested it. Settled deployments are reconciled more often
/// than that.
const POLLER_LIFETIME: Duration = Duration::from_secs(900);
/// Capacity of the queue of reconcile requests. If it is full, the next periodic reconcile sees the change.
const MAX_PENDING_RECONCILES: usize = 1024;

/// Latest state that a main function reported.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MainObservation {
    /// Routing generation in force; absent if the main function did not answer.
    pub in_force: Option<u64>,
    /// Digest of the placement in force; empty if no generation is in force.
    pub placement: String,
    /// Last generation that was sent, and its outcome. Success is reported once.
    pub last_outcome: Option<(u64, GenerationOutcome)>,
    /// Compute time of its remote functions; absent if it did not answer.
    pub worked: Option<RemoteWorkReport>,
    /// Time at which each watched remote function was last found used.
    pub recently_used: BTreeMap<String, Timestamp>,
}

/// Main function that a reconcile wants to be polled.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PolledMain {
    /// UID of its pod.
    pub uid: String,
    /// IP address of its pod.
    pub ip: IpAddr,
    /// Generation to put in force; absent if it is only polled.
    pub order: Option<Arc<RoutingOrder>>,
    /// Set until the kubelet reports it ready.
    pub starting: bool,
    /// Remote functions whose usage to watch; absent if not needed.
    pub watched: Option<Arc<WatchedFunctions>>,
}

/// Pollers of all deployments.
pub(crate) struct MainPollers {
    deployments: Mutex<HashMap<ObjectRef<MoEDeployment>, DeploymentPollers>>,
    reconcile_requests: mpsc::Sender<ObjectRef<MoEDeployment>>,
}

/// Pollers of one deployment.
struct DeploymentPollers {
    call_permits: Arc<Semaphore>,
    mains: HashMap<String, MainPoller>,
    /// Tasks; dropping the set aborts them.
    tasks: JoinSet<()>,
}

struct MainPoller {
    ip: IpAddr,
    settings: watch::Sender<PollSettings>,
    observation: Arc<Mutex<MainObservation>>,
    task: AbortHandle,
}

/// Settings from the latest reconcile.
#[derive(Clone)]
struct PollSettings {
    order: Option<Arc<RoutingOrder>>,
    /// Set while the main function starts.
    starting: bool,
    watched: Option<Arc<WatchedFunctions>>,
    /// Credentials, and the identity that the main function must have.
    trust: Option<Trust>,
    requested_at: Instant,
}

impl PollSettings {
    /// Returns the number of the generation to send.
    fn desired_generation(&self) -> Option<u64> {
        self.order.as_ref().map(|order| order.number)
    }
}

impl MainPollers {
    /// Creates an empty set of pollers, and the receiver of deployments to reconcile.
    pub(crate) fn new() -> (Self, mpsc::Receiver<ObjectRef<MoEDeployment>>) {
        let (reconcile_requests, receiver) = mpsc::channel(MAX_PENDING_RECONCILES);
        (Self { deployments: Mutex::default(), reconcile_requests }, receiver)
    }

    /// Returns a sender of reconcile requests.
    pub(crate) fn reconcile_requests(&self) -> mpsc::Sender<ObjectRef<MoEDeployment>> {
        self.reconcile_requests.clone()
    }

    /// Returns the latest observation of each main function of `owner`, by the UID of its pod.
    pub(crate) fn observations(&self, owner: &MoEDeployment) -> HashMap<String, MainObservation> {
        let deployments = lock(&self.deployments);
        let mains = deployments.get(&ObjectRef::from_obj(owner)).map(|pollers| &pollers.mains);
        let observations = mains.into_iter().flatten().map(|(uid, poller)| {
            let mut observation = lock(&poller.observation);
            let reported = observation.clone();
            observation
                .last_outcome
                .take_if(|(_, outcome)| matches!(outcome, GenerationOutcome::InForce { .. }));
            (uid.clone(), reported)
        });
        observations.collect()
    }

    /// Polls exactly `polled_mains` of `owner` from now on, with the credentials in `trust`.
    pub(crate) fn poll_only(
        &self,
        owner: &MoEDeployment,
        polled_mains: Vec<PolledMain>,
        trust: Option<&Trust>,
    ) {
        let key = ObjectRef::from_obj(owner);
        let mut deployments = lock(&self.deployments);
        if polled_mains.is_empty() {
            deployments.remove(&key);
            return;
        }
        let pollers = deployments.entry(key.clone()).or_insert_with(|| DeploymentPollers {
            call_permits: Arc::new(Semaphore::new(MAX_CONCURRENT_CALLS)),
            mains: HashMap::new(),
            tasks: JoinSet::new(),
        });
        let mut previous = std::mem::take(&mut pollers.mains);
        for PolledMain { uid, ip, order, starting, watched } in
            polled_mains.into_iter().take(MAX_POLLED_MAINS)
        {
            let settings = PollSettings {
                order,
                starting,
                watched,
                trust: trust.cloned(),
                requested_at: Instant::now(),
            };
            let existing =
                previous.remove(&uid).filter(|poller| poller.ip == ip && !poller.task.is_finished());
            let poller = match existing {
                Some(poller) => {
                    poller.settings.send_replace(settings);
                    poller
                }
                None => {
                    let (settings, settings_updates) = watch::channel(settings);
                    let observation = Arc::new(Mutex::new(MainObservation::default()));
                    let reconcile_requests = (self.reconcile_requests.clone(), key.clone());
                    let polling = poll(
                        ip,
                        settings_updates,
                        observation.clone(),
                        pollers.call_permits.clone(),
                        reconcile_requests,
                    );
                    MainPoller { ip, settings, observation, task: pollers.tasks.spawn(polling) }
                }
            };
            pollers.mains.insert(uid, poller);
        }
        previous.into_values().for_each(|poller| poller.task.abort());
        while pollers.tasks.try_join_next().is_some() {}
    }

    /// Ends all pollers of `deployment`.
    pub(crate) fn end(&self, deployment: &ObjectRef<MoEDeployment>) {
        lock(&self.deployments).remove(deployment);
    }
}

/// Polls the main function at `ip` and sends it the ordered generation, until no reconcile has requested that for
/// `POLLER_LIFETIME`.
async fn poll(
    ip: IpAddr,
    mut settings_updates: watch::Receiver<PollSettings>,
    observation: Arc<Mutex<MainObservation>>,
    call_permits: Arc<Semaphore>,
    (reconcile_requests, deployment): (mpsc::Sender<ObjectRef<MoEDeployment>>, ObjectRef<MoEDeployment>),
) {
    let (mut pause, mut shortest_pause) = (MIN_INTERVAL, EAGER_INTERVAL);
    let (started_at, mut has_answered) = (Instant::now(), false);
    let mut usage_history = ReportedUsage::default();
    loop {
        let settings = settings_updates.borrow_and_update().clone();
        let (sent_generation, starting, watched) =
            (settings.desired_generation(), settings.starting, settings.watched.clone());
        if settings.requested_at.elapsed() > POLLER_LIFETIME {
            return;
        }
        let Ok(permit) = call_permits.acquire().await else { return };
        let (mut reported, pairs) = poll_once(ip, settings).await;
        drop(permit);
        let mut used_while_asleep = false;
        if let (Some(watched), Some(pairs)) = (&watched, pairs) {
            reported.recently_used = recently_used(&mut usage_history, watched, &pairs);
            used_while_asleep =
                reported.recently_used.keys().any(|function| watched.asleep.contains(function));
        }
        has_answered |= reported.in_force.is_some();
        if starting && !has_answered && started_at.elapsed() < STARTING_LIMIT {
            sleep(STARTING_INTERVAL).await;
            continue;
        }
        if record(&mut lock(&observation), reported) || used_while_asleep {
            (pause, shortest_pause) = (MIN_INTERVAL, EAGER_INTERVAL);
            // If the channel is full, the next periodic reconcile sees it.
            let _no_room = reconcile_requests.try_send(deployment.clone());
        } else {
            // The time of last use is only as precise as the polling interval.
            let longest = if watched.is_some() { MIN_INTERVAL } else { MAX_INTERVAL };
            pause = (2 * pause).min(longest);
        }
        let order_changed = timeout(
            shortest_pause,
            settings_updates.wait_for(|settings| settings.desired_generation() != sent_generation),
        )
        .await;
        match order_changed.map(|updates| updates.is_ok()) {
            Ok(true) => {
                shortest_pause = EAGER_INTERVAL;
                continue;
            }
            Ok(false) => return,
            Err(_elapsed) => {}
        }
        tokio::select! {
            changed = settings_updates.changed() => if changed.is_err() { return },
            () = sleep(pause.saturating_sub(shortest_pause)) => {}
        }
        shortest_pause = (2 * shortest_pause).min(MIN_INTERVAL);
    }
}

/// Returns the functions of `watched` that were used since the last poll, by the usage counts `pairs`.
fn recently_used(
    usage_history: &mut ReportedUsage,
    watched: &WatchedFunctions,
    pairs: &[LayerPairs],
) -> BTreeMap<String, Timestamp> {
    let now = Timestamp::now();
    // The history holds only experts that are watched, so that a hostile main function cannot grow it.
    let requested: BTreeSet<_> = watched.hosted.values().flatten().flat_map(experts_of).collect();
    let pairs: Vec<_> = pairs.iter().map(|reported| restricted_to(&requested, reported)).collect();
    // Usage counted before the first poll has no known time.
    let uses = usage_history.note("", &pairs, false);
    let recently_used = watched.hosted.iter().filter(|(_, hosted)| uses.of(hosted) > 0);
    recently_used.map(|(function, _)| (function.clone(), now)).collect()
}

/// Returns the experts of `set` as pairs of layer and expert.
fn experts_of(set: &LayerExperts) -> impl Iterator<Item = (u32, u32)> {
    set.experts.iter().map(|expert| (set.layer, *expert))
}

/// Returns the part of `reported` about the experts in `requested`.
fn restricted_to(requested: &BTreeSet<(u32, u32)>, reported: &LayerPairs) -> LayerPairs {
    let counts = reported.experts.iter().copied().zip(reported.pairs.iter().copied());
    let (experts, pairs) =
        counts.filter(|(expert, _)| requested.contains(&(reported.layer, *expert))).unzip();
    LayerPairs { layer: reported.layer, experts, pairs }
}

/// Describes the main function, and sends the ordered generation if it is behind. Returns the observation, with usage
/// counts if they were requested and answered.
async fn poll_once(ip: IpAddr, settings: PollSettings) -> (MainObservation, Option<Vec<LayerPairs>>) {
    let trust = settings.trust.as_ref();
    let recently_used = BTreeMap::new();
    let description = match main_client::describe(ip, trust, settings.watched.is_some()).await {
        Ok(description) => Some(description),
        Err(DescriptionError::Silent) => None,
        Err(DescriptionError::Invalid(problem)) => {
            let last_outcome = settings.order.map(|order| (order.number, GenerationOutcome::Failed(problem)));
            return (MainObservation { last_outcome, ..MainObservation::default() }, None);
        }
    };
    let (in_force, placement, worked, pairs) =
        description.map_or((None, String::new(), None, None), |description| {
            (
                Some(description.in_force),
                description.placement,
                Some(description.worked),
                Some(description.pairs),
            )
        });
    let is_behind = |order: &Arc<RoutingOrder>| in_force.is_some_and(|number| number < order.number);
    let Some(order) =
        settings.order.filter(|order| settings.requested_at.elapsed() < ORDER_LIFETIME && is_behind(order))
    else {
        return (MainObservation { in_force, placement, last_outcome: None, worked, recently_used }, pairs);
    };
    let outcome = main_client::set_routing(ip, &order, trust).await;
    let (in_force, placement) = match (&outcome, &order.routing) {
        (GenerationOutcome::InForce { .. }, Ok(routing)) => (Some(order.number), placement_digest(routing)),
        _ => (in_force, placement),
    };
    (
        MainObservation {
            in_force,
            placement,
            last_outcome: Some((order.number, outcome)),
            worked,
            recently_used,
        },
        pairs,
    )
}

/// Stores `reported` in `observation`. Returns whether it is new.
fn record(observation: &mut MainObservation, reported: MainObservation) -> bool {
    let differs = (observation.in_force, &observation.placement) != (reported.in_force, &reported.placement);
    let is_new =
        differs || (reported.last_outcome.is_some() && observation.last_outcome != reported.last_outcome);
    (observation.in_force, observation.placement) = (reported.in_force, reported.placement);
    observation.last_outcome = reported.last_outcome.or(observation.last_outcome.take());
    // These two alone do not trigger a reconcile.
    observation.worked = reported.worked;
    observation.recently_used.extend(reported.recently_used);
    is_new
}

/// Every critical section keeps the value consistent up to any panic.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uses_of_experts_not_asked_for_are_not_kept() {
        let hosted = vec![LayerExperts { layer: 1, experts: vec![2] }];
        let watched =
            WatchedFunctions { hosted: [("g0".to_owned(), hosted)].into(), ..WatchedFunctions::default() };
        let reported = |layer, experts: Vec<u32>, pairs| LayerPairs {
            layer,
            pairs: vec![pairs; experts.len()],
            experts,
        };
        let (mut usage_history, mut expected) = (ReportedUsage::default(), ReportedUsage::default());
        expected.note("", &[reported(1, vec![2], 5)], false);
        // Each answer names other experts, as from a hostile main function.
        for number in 0..100 {
            let pairs = [reported(1, vec![2, 3 + number], 5), reported(9 + number, vec![2], 1)];
            assert_eq!(recently_used(&mut usage_history, &watched, &pairs), BTreeMap::new());
        }
        assert_eq!(usage_history, expected);
        assert_eq!(recently_used(&mut usage_history, &watched, &[reported(1, vec![2, 3], 6)]).len(), 1);
    }
}
