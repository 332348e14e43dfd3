//! Conversations with main functions: what they have in force, and what they are to have.
//!
//! No look waits for a pod. It says whom to speak with and what to tell ([`Conversations::keep`]), and the
//! next one finds what was learned ([`Conversations::heard`]), which also has the deployment looked at again.
//! Each main function is spoken with by a task of its own, which ends with its pod, with the deployment, or
//! when no look asked for it any more.

use super::mains::{self, DescriptionError, GenerationOutcome, Order, WatchedFunctions};
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

/// Main functions of one deployment that are spoken with: two revisions of as many as there can be.
const MOST_MAINS: usize = 128;
/// Calls of one deployment that are under way at the same time. Those of others do not wait for them.
const CALLS: usize = 32;
/// Between two calls of one main function at least, whatever it says and however often it is looked at ..
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
/// .. but for the first few after a change: requests may wait for it to serve. A new order is told at once.
const EAGER_PAUSE: Duration = Duration::from_millis(100);
/// One that starts and has not answered yet is asked this often, ..
const STARTING_PAUSE: Duration = Duration::from_millis(50);
/// .. but for no longer than that.
const STARTING: Duration = Duration::from_secs(60);
/// Between two calls of one that has nothing new to say.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// An order holds for this long after the look that gave it: its address may be another pod's by then.
const ORDER_HOLDS: Duration = Duration::from_secs(60);
/// Conversations end this long after the reconcile that last asked for them. Settled deployments are reconciled more
/// often than that.
const UNASKED: Duration = Duration::from_secs(900);
/// Deployments that wait to be looked at. What finds no room is seen by the next look.
const WAITING: usize = 1024;

/// Latest state that a main function reported.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MainObservation {
    /// The generation that it has in force; none: it did not answer.
    pub in_force: Option<u64>,
    /// Digest of the placement in force; empty if no generation is in force.
    pub placement: String,
    /// The generation that it was last told, and what came of it. That it is in force is reported once.
    pub told: Option<(u64, GenerationOutcome)>,
    /// Work that its remote functions did; absent if it did not answer.
    pub worked: Option<RemoteWorkReport>,
    /// When it was last found that remote functions were used, by their names, as far as that was asked.
    pub used: BTreeMap<String, Timestamp>,
}

/// Main function that a reconcile wants to speak with.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Partner {
    /// The pod's identity for the API.
    pub uid: String,
    /// Where it is reached.
    pub ip: IpAddr,
    /// Order that it is to have in force; absent if it is only asked.
    pub order: Option<Arc<Order>>,
    /// Set until its node has seen it ready.
    pub starting: bool,
    /// Remote functions whose last use is to be found out; absent if that is not needed.
    pub watched: Option<Arc<WatchedFunctions>>,
}

/// All conversations of this operator.
pub(crate) struct Conversations {
    deployments: Mutex<HashMap<ObjectRef<MoEDeployment>, DeploymentConversations>>,
    news: mpsc::Sender<ObjectRef<MoEDeployment>>,
}

/// The conversations of one deployment.
struct DeploymentConversations {
    calls: Arc<Semaphore>,
    mains: HashMap<String, Conversation>,
    /// Ends the tasks with it.
    tasks: JoinSet<()>,
}

struct Conversation {
    ip: IpAddr,
    wish: watch::Sender<DesiredConversation>,
    heard: Arc<Mutex<MainObservation>>,
    task: AbortHandle,
}

/// Wishes of the latest reconcile.
#[derive(Clone)]
struct DesiredConversation {
    order: Option<Arc<Order>>,
    /// Set while the main function starts.
    starting: bool,
    watched: Option<Arc<WatchedFunctions>>,
    /// Identity that it has to show.
    trust: Option<Trust>,
    at: Instant,
}

impl DesiredConversation {
    /// The number of what is to be told.
    fn number(&self) -> Option<u64> {
        self.order.as_ref().map(|order| order.number)
    }
}

impl Conversations {
    /// No conversation yet; what is learned has the deployments that come out of the receiver looked at.
    pub(crate) fn new() -> (Self, mpsc::Receiver<ObjectRef<MoEDeployment>>) {
        let (news, looks) = mpsc::channel(WAITING);
        (Self { deployments: Mutex::default(), news }, looks)
    }

    /// Where deployments are named that are to be looked at.
    pub(crate) fn news(&self) -> mpsc::Sender<ObjectRef<MoEDeployment>> {
        self.news.clone()
    }

    /// Returns the latest state that each main function of `owner` reported, by the uid of its pod.
    pub(crate) fn heard(&self, owner: &MoEDeployment) -> HashMap<String, MainObservation> {
        let deployments = lock(&self.deployments);
        let mains = deployments.get(&ObjectRef::from_obj(owner)).map(|known| &known.mains);
        let heard = mains.into_iter().flatten().map(|(uid, conversation)| {
            let mut heard = lock(&conversation.heard);
            let said = heard.clone();
            heard.told.take_if(|(_, outcome)| matches!(outcome, GenerationOutcome::InForce { .. }));
            (uid.clone(), said)
        });
        heard.collect()
    }

    /// Speaks with exactly `partners` of `owner` from now on, once they have shown the identity that `trust` demands.
    pub(crate) fn keep(&self, owner: &MoEDeployment, partners: Vec<Partner>, trust: Option<&Trust>) {
        let key = ObjectRef::from_obj(owner);
        let mut deployments = lock(&self.deployments);
        if partners.is_empty() {
            deployments.remove(&key);
            return;
        }
        let known = deployments.entry(key.clone()).or_insert_with(|| DeploymentConversations {
            calls: Arc::new(Semaphore::new(CALLS)),
            mains: HashMap::new(),
            tasks: JoinSet::new(),
        });
        let mut before = std::mem::take(&mut known.mains);
        for Partner { uid, ip, order, starting, watched } in partners.into_iter().take(MOST_MAINS) {
            let wish =
                DesiredConversation { order, starting, watched, trust: trust.cloned(), at: Instant::now() };
            let goes_on = before.remove(&uid).filter(|known| known.ip == ip && !known.task.is_finished());
            let conversation = match goes_on {
                Some(conversation) => {
                    conversation.wish.send_replace(wish);
                    conversation
                }
                None => {
                    let (wish, wishes) = watch::channel(wish);
                    let heard = Arc::new(Mutex::new(MainObservation::default()));
                    let news = (self.news.clone(), key.clone());
                    let speaking = converse(ip, wishes, heard.clone(), known.calls.clone(), news);
                    Conversation { ip, wish, heard, task: known.tasks.spawn(speaking) }
                }
            };
            known.mains.insert(uid, conversation);
        }
        before.into_values().for_each(|conversation| conversation.task.abort());
        while known.tasks.try_join_next().is_some() {}
    }

    /// Ends all conversations of `deployment`.
    pub(crate) fn end(&self, deployment: &ObjectRef<MoEDeployment>) {
        lock(&self.deployments).remove(deployment);
    }
}

/// Polls the main function at `ip`, and tells it the order that it is to have in force, until no reconcile asks for
/// that any more.
async fn converse(
    ip: IpAddr,
    mut wishes: watch::Receiver<DesiredConversation>,
    heard: Arc<Mutex<MainObservation>>,
    calls: Arc<Semaphore>,
    (news, deployment): (mpsc::Sender<ObjectRef<MoEDeployment>>, ObjectRef<MoEDeployment>),
) {
    let (mut pause, mut least) = (SHORTEST_PAUSE, EAGER_PAUSE);
    let (begun, mut has_answered) = (Instant::now(), false);
    let mut told = ReportedUsage::default();
    loop {
        let wish = wishes.borrow_and_update().clone();
        let (ordered, starting, watched) = (wish.number(), wish.starting, wish.watched.clone());
        if wish.at.elapsed() > UNASKED {
            return;
        }
        let Ok(call) = calls.acquire().await else { return };
        let (mut said, pairs) = exchange(ip, wish).await;
        drop(call);
        let mut is_woken = false;
        if let (Some(watched), Some(pairs)) = (&watched, pairs) {
            said.used = used(&mut told, watched, &pairs);
            is_woken = said.used.keys().any(|function| watched.asleep.contains(function));
        }
        has_answered |= said.in_force.is_some();
        if starting && !has_answered && begun.elapsed() < STARTING {
            sleep(STARTING_PAUSE).await;
            continue;
        }
        if learn(&mut lock(&heard), said) || is_woken {
            (pause, least) = (SHORTEST_PAUSE, EAGER_PAUSE);
            // Where there is no room, the next look sees it.
            let _no_room = news.try_send(deployment.clone());
        } else {
            // When something was last used is known as well as it is asked.
            let longest = if watched.is_some() { SHORTEST_PAUSE } else { LONGEST_PAUSE };
            pause = (2 * pause).min(longest);
        }
        let other_order = timeout(least, wishes.wait_for(|wish| wish.number() != ordered)).await;
        match other_order.map(|known| known.is_ok()) {
            Ok(true) => {
                least = EAGER_PAUSE;
                continue;
            }
            Ok(false) => return,
            Err(_elapsed) => {}
        }
        tokio::select! {
            wished = wishes.changed() => if wished.is_err() { return },
            () = sleep(pause.saturating_sub(least)) => {}
        }
        least = (2 * least).min(SHORTEST_PAUSE);
    }
}

/// The remote functions of `watched` that were used since a main function was last asked, which has counted `pairs` by now.
fn used(
    told: &mut ReportedUsage,
    watched: &WatchedFunctions,
    pairs: &[LayerPairs],
) -> BTreeMap<String, Timestamp> {
    let now = Timestamp::now();
    // Kept as long as the conversation: no more than the experts that are asked for.
    let asked: BTreeSet<_> = watched.hosted.values().flatten().flat_map(of_each).collect();
    let pairs: Vec<_> = pairs.iter().map(|said| only(&asked, said)).collect();
    // What it had counted before anybody asked may be of any time.
    let uses = told.note("", &pairs, false);
    let used = watched.hosted.iter().filter(|(_, hosted)| uses.of(hosted) > 0);
    used.map(|(function, _)| (function.clone(), now)).collect()
}

/// The experts of `set`, each with its layer.
fn of_each(set: &LayerExperts) -> impl Iterator<Item = (u32, u32)> {
    set.experts.iter().map(|expert| (set.layer, *expert))
}

/// Returns the part of `said` that is about the experts `asked`.
fn only(asked: &BTreeSet<(u32, u32)>, said: &LayerPairs) -> LayerPairs {
    let both = said.experts.iter().copied().zip(said.pairs.iter().copied());
    let (experts, pairs) = both.filter(|(expert, _)| asked.contains(&(said.layer, *expert))).unzip();
    LayerPairs { layer: said.layer, experts, pairs }
}

/// One question, and one order where the answer calls for it. With what was heard, how often remote experts were used, where
/// that was asked and answered.
async fn exchange(ip: IpAddr, wish: DesiredConversation) -> (MainObservation, Option<Vec<LayerPairs>>) {
    let trust = wish.trust.as_ref();
    let used = BTreeMap::new();
    let described = match mains::describe(ip, trust, wish.watched.is_some()).await {
        Ok(described) => Some(described),
        Err(DescriptionError::Silent) => None,
        Err(DescriptionError::Invalid(problem)) => {
            let told = wish.order.map(|order| (order.number, GenerationOutcome::Failed(problem)));
            return (MainObservation { told, ..MainObservation::default() }, None);
        }
    };
    let (in_force, placement, worked, pairs) = described.map_or((None, String::new(), None, None), |is| {
        (Some(is.in_force), is.placement, Some(is.worked), Some(is.pairs))
    });
    let is_behind = |order: &Arc<Order>| in_force.is_some_and(|number| number < order.number);
    let Some(order) = wish.order.filter(|order| wish.at.elapsed() < ORDER_HOLDS && is_behind(order)) else {
        return (MainObservation { in_force, placement, told: None, worked, used }, pairs);
    };
    let outcome = mains::tell(ip, &order, trust).await;
    let (in_force, placement) = match (&outcome, &order.routing) {
        (GenerationOutcome::InForce { .. }, Ok(routing)) => (Some(order.number), placement_digest(routing)),
        _ => (in_force, placement),
    };
    (MainObservation { in_force, placement, told: Some((order.number, outcome)), worked, used }, pairs)
}

/// Takes note of what was `said`. Returns whether it is new.
fn learn(heard: &mut MainObservation, said: MainObservation) -> bool {
    let other = (heard.in_force, &heard.placement) != (said.in_force, &said.placement);
    let is_new = other || (said.told.is_some() && heard.told != said.told);
    (heard.in_force, heard.placement) = (said.in_force, said.placement);
    heard.told = said.told.or(heard.told.take());
    // Read by the next look, whatever makes it.
    heard.worked = said.worked;
    heard.used.extend(said.used);
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
        let said = |layer, experts: Vec<u32>, pairs| LayerPairs {
            layer,
            pairs: vec![pairs; experts.len()],
            experts,
        };
        let (mut told, mut expected) = (ReportedUsage::default(), ReportedUsage::default());
        expected.note("", &[said(1, vec![2], 5)], false);
        // Other experts with every answer, as a hostile main function would have it.
        for number in 0..100 {
            let pairs = [said(1, vec![2, 3 + number], 5), said(9 + number, vec![2], 1)];
            assert_eq!(used(&mut told, &watched, &pairs), BTreeMap::new());
        }
        assert_eq!(told, expected);
        assert_eq!(used(&mut told, &watched, &[said(1, vec![2, 3], 6)]).len(), 1);
    }
}
