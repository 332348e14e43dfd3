//! Conversations with main functions: what they have in force, and what they are to have.
//!
//! No look waits for a pod. It says whom to speak with and what to tell ([`MainPollers::poll_only`]), and the
//! next one finds what was learned ([`MainPollers::observations`]), which also has the deployment looked at again.
//! Each main function is spoken with by a task of its own, which ends with its pod, with the deployment, or
//! when no look asked for it any more.

use super::main_client::{self, DescriptionError, GenerationOutcome, RoutingOrder, WatchedFunctions};
use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use remoe_api::MoEDeployment;
use remoe_autoscale::replicas::Worked;
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

/// Main functions of one deployment that are spoken with: two revisions of as many as there can be.
const MAX_POLLED_MAINS: usize = 128;
/// Calls of one deployment that are under way at the same time. Those of others do not wait for them.
const MAX_CONCURRENT_CALLS: usize = 32;
/// Between two calls of one main function at least, whatever it says and however often it is looked at ..
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
/// .. but for the first few after a change: requests may wait for it to serve. A new order is told at once.
const EAGER_PAUSE: Duration = Duration::from_millis(100);
/// One that starts and has not answered yet is asked this often, ..
const STARTING_PAUSE: Duration = Duration::from_millis(50);
/// .. but for no longer than that.
const STARTING_LIMIT: Duration = Duration::from_secs(60);
/// Between two calls of one that has nothing new to say.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// An order holds for this long after the look that gave it: its address may be another pod's by then.
const ORDER_LIFETIME: Duration = Duration::from_secs(60);
/// Conversations end this long after the reconcile that last asked for them. Settled deployments are reconciled more
/// often than that.
const POLLER_LIFETIME: Duration = Duration::from_secs(900);
/// Deployments that wait to be looked at. What finds no room is seen by the next look.
const MAX_PENDING_RECONCILES: usize = 1024;

/// Latest state that a main function reported.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MainObservation {
    /// The generation that it has in force; none: it did not answer.
    pub in_force: Option<u64>,
    /// Digest of the placement in force; empty if no generation is in force.
    pub placement: String,
    /// The generation that it was last told, and what came of it. That it is in force is reported once.
    pub last_outcome: Option<(u64, GenerationOutcome)>,
    /// Work that its remote functions did; absent if it did not answer.
    pub worked: Option<Worked>,
    /// When it was last found that remote functions were used, by their names, as far as that was asked.
    pub recently_used: BTreeMap<String, Timestamp>,
}

/// Main function that a reconcile wants to speak with.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PolledMain {
    /// The pod's identity for the API.
    pub uid: String,
    /// Where it is reached.
    pub ip: IpAddr,
    /// Order that it is to have in force; absent if it is only asked.
    pub order: Option<Arc<RoutingOrder>>,
    /// Set until its node has seen it ready.
    pub starting: bool,
    /// Remote functions whose last use is to be found out; absent if that is not needed.
    pub watched: Option<Arc<WatchedFunctions>>,
}

/// All conversations of this operator.
pub(crate) struct MainPollers {
    deployments: Mutex<HashMap<ObjectRef<MoEDeployment>, DeploymentPollers>>,
    reconcile_requests: mpsc::Sender<ObjectRef<MoEDeployment>>,
}

/// The conversations of one deployment.
struct DeploymentPollers {
    call_permits: Arc<Semaphore>,
    mains: HashMap<String, MainPoller>,
    /// Ends the tasks with it.
    tasks: JoinSet<()>,
}

struct MainPoller {
    ip: IpAddr,
    settings: watch::Sender<PollSettings>,
    observation: Arc<Mutex<MainObservation>>,
    task: AbortHandle,
}

/// Wishes of the latest reconcile.
#[derive(Clone)]
struct PollSettings {
    order: Option<Arc<RoutingOrder>>,
    /// Set while the main function starts.
    starting: bool,
    watched: Option<Arc<WatchedFunctions>>,
    /// Identity that it has to show.
    trust: Option<Trust>,
    requested_at: Instant,
}

impl PollSettings {
    /// The number of what is to be told.
    fn desired_generation(&self) -> Option<u64> {
        self.order.as_ref().map(|order| order.number)
    }
}

impl MainPollers {
    /// No conversation yet; what is learned has the deployments that come out of the receiver looked at.
    pub(crate) fn new() -> (Self, mpsc::Receiver<ObjectRef<MoEDeployment>>) {
        let (reconcile_requests, looks) = mpsc::channel(MAX_PENDING_RECONCILES);
        (Self { deployments: Mutex::default(), reconcile_requests }, looks)
    }

    /// Where deployments are named that are to be looked at.
    pub(crate) fn reconcile_requests(&self) -> mpsc::Sender<ObjectRef<MoEDeployment>> {
        self.reconcile_requests.clone()
    }

    /// Returns the latest state that each main function of `owner` reported, by the uid of its pod.
    pub(crate) fn observations(&self, owner: &MoEDeployment) -> HashMap<String, MainObservation> {
        let deployments = lock(&self.deployments);
        let mains = deployments.get(&ObjectRef::from_obj(owner)).map(|pollers| &pollers.mains);
        let observation = mains.into_iter().flatten().map(|(uid, conversation)| {
            let mut observation = lock(&conversation.observation);
            let reported = observation.clone();
            observation
                .last_outcome
                .take_if(|(_, outcome)| matches!(outcome, GenerationOutcome::InForce { .. }));
            (uid.clone(), reported)
        });
        observation.collect()
    }

    /// Speaks with exactly `polled_mains` of `owner` from now on, once they have shown the identity that `trust` demands.
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
        let mut before = std::mem::take(&mut pollers.mains);
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
            let continued =
                before.remove(&uid).filter(|pollers| pollers.ip == ip && !pollers.task.is_finished());
            let conversation = match continued {
                Some(conversation) => {
                    conversation.settings.send_replace(settings);
                    conversation
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
            pollers.mains.insert(uid, conversation);
        }
        before.into_values().for_each(|conversation| conversation.task.abort());
        while pollers.tasks.try_join_next().is_some() {}
    }

    /// Ends all conversations of `deployment`.
    pub(crate) fn end(&self, deployment: &ObjectRef<MoEDeployment>) {
        lock(&self.deployments).remove(deployment);
    }
}

/// Polls the main function at `ip`, and tells it the order that it is to have in force, until no reconcile asks for
/// that any more.
async fn poll(
    ip: IpAddr,
    mut settings_updates: watch::Receiver<PollSettings>,
    observation: Arc<Mutex<MainObservation>>,
    call_permits: Arc<Semaphore>,
    (reconcile_requests, deployment): (mpsc::Sender<ObjectRef<MoEDeployment>>, ObjectRef<MoEDeployment>),
) {
    let (mut pause, mut shortest_pause) = (SHORTEST_PAUSE, EAGER_PAUSE);
    let (begun, mut has_answered) = (Instant::now(), false);
    let mut last_outcome = ReportedUsage::default();
    loop {
        let settings = settings_updates.borrow_and_update().clone();
        let (ordered, starting, watched) =
            (settings.desired_generation(), settings.starting, settings.watched.clone());
        if settings.requested_at.elapsed() > POLLER_LIFETIME {
            return;
        }
        let Ok(permit) = call_permits.acquire().await else { return };
        let (mut reported, pairs) = poll_once(ip, settings).await;
        drop(permit);
        let mut is_woken = false;
        if let (Some(watched), Some(pairs)) = (&watched, pairs) {
            reported.recently_used = recently_used(&mut last_outcome, watched, &pairs);
            is_woken = reported.recently_used.keys().any(|function| watched.asleep.contains(function));
        }
        has_answered |= reported.in_force.is_some();
        if starting && !has_answered && begun.elapsed() < STARTING_LIMIT {
            sleep(STARTING_PAUSE).await;
            continue;
        }
        if record(&mut lock(&observation), reported) || is_woken {
            (pause, shortest_pause) = (SHORTEST_PAUSE, EAGER_PAUSE);
            // Where there is no room, the next look sees it.
            let _no_room = reconcile_requests.try_send(deployment.clone());
        } else {
            // When something was last used is known as well as it is asked.
            let longest = if watched.is_some() { SHORTEST_PAUSE } else { LONGEST_PAUSE };
            pause = (2 * pause).min(longest);
        }
        let other_order = timeout(
            shortest_pause,
            settings_updates.wait_for(|settings| settings.desired_generation() != ordered),
        )
        .await;
        match other_order.map(|pollers| pollers.is_ok()) {
            Ok(true) => {
                shortest_pause = EAGER_PAUSE;
                continue;
            }
            Ok(false) => return,
            Err(_elapsed) => {}
        }
        tokio::select! {
            changed = settings_updates.changed() => if changed.is_err() { return },
            () = sleep(pause.saturating_sub(shortest_pause)) => {}
        }
        shortest_pause = (2 * shortest_pause).min(SHORTEST_PAUSE);
    }
}

/// The remote functions of `watched` that were used since a main function was last asked, which has counted `pairs` by now.
fn recently_used(
    last_outcome: &mut ReportedUsage,
    watched: &WatchedFunctions,
    pairs: &[LayerPairs],
) -> BTreeMap<String, Timestamp> {
    let now = Timestamp::now();
    // Kept as long as the conversation: no more than the experts that are asked for.
    let requested: BTreeSet<_> = watched.hosted.values().flatten().flat_map(experts_of).collect();
    let pairs: Vec<_> = pairs.iter().map(|reported| restricted_to(&requested, reported)).collect();
    // What it had counted before anybody asked may be of any time.
    let uses = last_outcome.note("", &pairs, false);
    let recently_used = watched.hosted.iter().filter(|(_, hosted)| uses.of(hosted) > 0);
    recently_used.map(|(function, _)| (function.clone(), now)).collect()
}

/// The experts of `set`, each with its layer.
fn experts_of(set: &LayerExperts) -> impl Iterator<Item = (u32, u32)> {
    set.experts.iter().map(|expert| (set.layer, *expert))
}

/// Returns the part of `reported` that is about the experts `requested`.
fn restricted_to(requested: &BTreeSet<(u32, u32)>, reported: &LayerPairs) -> LayerPairs {
    let both = reported.experts.iter().copied().zip(reported.pairs.iter().copied());
    let (experts, pairs) = both.filter(|(expert, _)| requested.contains(&(reported.layer, *expert))).unzip();
    LayerPairs { layer: reported.layer, experts, pairs }
}

/// One question, and one order where the answer calls for it. With what was heard, how often remote experts were used, where
/// that was asked and answered.
async fn poll_once(ip: IpAddr, settings: PollSettings) -> (MainObservation, Option<Vec<LayerPairs>>) {
    let trust = settings.trust.as_ref();
    let recently_used = BTreeMap::new();
    let described = match main_client::describe(ip, trust, settings.watched.is_some()).await {
        Ok(described) => Some(described),
        Err(DescriptionError::Silent) => None,
        Err(DescriptionError::Invalid(problem)) => {
            let last_outcome = settings.order.map(|order| (order.number, GenerationOutcome::Failed(problem)));
            return (MainObservation { last_outcome, ..MainObservation::default() }, None);
        }
    };
    let (in_force, placement, worked, pairs) = described.map_or((None, String::new(), None, None), |is| {
        (Some(is.in_force), is.placement, Some(is.worked), Some(is.pairs))
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

/// Takes note of what was `reported`. Returns whether it is new.
fn record(observation: &mut MainObservation, reported: MainObservation) -> bool {
    let other = (observation.in_force, &observation.placement) != (reported.in_force, &reported.placement);
    let is_new =
        other || (reported.last_outcome.is_some() && observation.last_outcome != reported.last_outcome);
    (observation.in_force, observation.placement) = (reported.in_force, reported.placement);
    observation.last_outcome = reported.last_outcome.or(observation.last_outcome.take());
    // Read by the next look, whatever makes it.
    observation.worked = reported.worked;
    observation.recently_used.extend(reported.recently_used);
    is_new
}

/// Every change of what is locked is whole: a panic elsewhere cannot have left it half-done.
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
        let (mut last_outcome, mut expected) = (ReportedUsage::default(), ReportedUsage::default());
        expected.note("", &[reported(1, vec![2], 5)], false);
        // Other experts with every answer, as a hostile main function would have it.
        for number in 0..100 {
            let pairs = [reported(1, vec![2, 3 + number], 5), reported(9 + number, vec![2], 1)];
            assert_eq!(recently_used(&mut last_outcome, &watched, &pairs), BTreeMap::new());
        }
        assert_eq!(last_outcome, expected);
        assert_eq!(recently_used(&mut last_outcome, &watched, &[reported(1, vec![2, 3], 6)]).len(), 1);
    }
}
