//! The deployments that there are, as the operator's `MoEDemand`s say.

use crate::demand_writer::DemandWriter;
use crate::experience::Experience;
use crate::served::{Served, short_names};
use crate::settings::GatewaySettings;
use crate::usage_learner::{SharedResources, UsageFollower};
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::select_all;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt};
use remoe_api::MoEDemand;
use remoe_gateway_core::{
    CostAccounting, Gateway, GatewayMetrics, Model, ModelOptions, Overhead, PrefixIndex,
};
use remoe_proto::identity::Keyring;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Bytes of the bodies that wait for one model.
const WAITING_BYTES: usize = 64 << 20;
/// A watch that was dropped without a word is restarted after this many seconds.
const WATCH_SECONDS: u32 = 60;

/// Deployments that are served.
pub(crate) struct Catalogue {
    client: Client,
    settings: GatewaySettings,
    metrics: GatewayMetrics,
    cost_accounting: Arc<CostAccounting>,
    gateway: Arc<Gateway>,
    prefix_index: PrefixIndex,
    lease: watch::Receiver<bool>,
    /// Credentials shown to main functions that check the caller's identity.
    keyring: Option<Arc<Keyring>>,
    /// Resources for predictions.
    means: SharedResources,
    /// Where what is known of models and past requests is kept; none: until this process ends.
    experience: Option<Experience>,
    /// With the identity of the object that it is served by.
    served: BTreeMap<String, (String, Served)>,
    /// Gives the ledger signs of life once all pods are known: those that are not named by then have ended.
    overhead: JoinSet<()>,
}

impl Catalogue {
    /// Nothing yet.
    pub(crate) fn new(
        client: Client,
        settings: &GatewaySettings,
        (metrics, cost_accounting): (GatewayMetrics, Arc<CostAccounting>),
        gateway: Arc<Gateway>,
        lease: watch::Receiver<bool>,
        keyring: Option<Arc<Keyring>>,
        (means, experience): (SharedResources, Option<Experience>),
    ) -> Self {
        Self {
            client,
            settings: settings.clone(),
            metrics,
            cost_accounting,
            gateway,
            prefix_index: PrefixIndex::default(),
            lease,
            keyring,
            means,
            experience,
            served: BTreeMap::new(),
            overhead: JoinSet::new(),
        }
    }

    /// Serves what there is, for ever.
    pub(crate) async fn follow(&mut self) {
        let mut scopes: BTreeSet<Option<String>> =
            self.settings.watch_namespaces.iter().cloned().map(Some).collect();
        if scopes.is_empty() {
            scopes.insert(None);
        }
        let mut events = select_all(scopes.iter().map(|scope| {
            let api: Api<MoEDemand> = match scope {
                Some(namespace) => Api::namespaced(self.client.clone(), namespace),
                None => Api::all(self.client.clone()),
            };
            let config = watcher::Config::default().timeout(WATCH_SECONDS);
            let scope = scope.clone();
            watcher::watcher(api, config).default_backoff().map(move |event| (scope.clone(), event)).boxed()
        }));
        // Those that a list had, while it is read.
        let mut listed: BTreeMap<Option<String>, BTreeSet<String>> = BTreeMap::new();
        // Where no list has been read to its end: what is not known from there is not gone.
        let mut unread = scopes;
        while let Some((scope, event)) = events.next().await {
            match event {
                Ok(Event::Init) => drop(listed.remove(&scope)),
                Ok(Event::InitApply(demand)) => {
                    listed.entry(scope).or_default().insert(key(&demand));
                    self.apply(demand);
                }
                Ok(Event::InitDone) => {
                    let there = listed.remove(&scope).unwrap_or_default();
                    let gone = self
                        .served
                        .keys()
                        .filter(|key| is_in(key, scope.as_deref()) && !there.contains(*key));
                    gone.cloned().collect::<Vec<_>>().iter().for_each(|key| self.remove(key));
                    unread.remove(&scope);
                    if !unread.is_empty() {
                        continue;
                    }
                    self.publish();
                    self.forget_others();
                    if self.overhead.is_empty() {
                        let GatewaySettings { cpu_core_hour, memory_gb_hour, .. } = self.settings;
                        let overhead =
                            Overhead::new(self.cost_accounting.clone(), cpu_core_hour, memory_gb_hour);
                        self.overhead.spawn(overhead.keep());
                    }
                }
                Ok(Event::Apply(demand)) => {
                    if self.apply(demand) && unread.is_empty() {
                        self.publish();
                    }
                }
                Ok(Event::Delete(demand)) => {
                    self.remove(&key(&demand));
                    if unread.is_empty() {
                        self.publish();
                        self.forget_others();
                    }
                }
                Err(error) => tracing::warn!(%error, "cannot watch MoEDemands"),
            }
        }
    }

    /// Takes note of a deployment, and reports if it is new.
    fn apply(&mut self, demand: MoEDemand) -> bool {
        let key = key(&demand);
        if demand.metadata.deletion_timestamp.is_some() {
            return false;
        }
        let uid = demand.uid().unwrap_or_default();
        if let Some((known, served)) = self.served.get_mut(&key) {
            if *known == uid {
                served.tell(demand.spec);
                return false;
            }
            // Another deployment by the same name.
            self.remove(&key);
        }
        let settings = &self.settings;
        let options = ModelOptions {
            short_names: short_names(&key, &demand.spec),
            context_length: usize::try_from(demand.spec.context_length).unwrap_or(usize::MAX),
            name: key.clone(),
            max_requests: settings.max_requests,
            waiting_bytes: WAITING_BYTES,
            wake_limit: Duration::from_secs(settings.wake_seconds),
        };
        let (namespace, name) = (demand.namespace().unwrap_or_default(), demand.name_any());
        let demand_writer =
            DemandWriter::new(self.client.clone(), &namespace, &name, &settings.pod, &settings.uid);
        let folder = self.experience.as_ref().map(|experience| experience.of(&uid));
        let learner = UsageFollower::new(&key, folder, self.means.clone());
        let model = Model::new(options, &self.metrics, &self.prefix_index);
        let (lease, keyring) = (self.lease.clone(), self.keyring.clone());
        let served = Served::new(
            model,
            demand.spec,
            self.cost_accounting.clone(),
            (demand_writer, learner),
            lease,
            keyring,
        );
        self.served.insert(key, (uid, served));
        true
    }

    /// Deletes what is known of deployments that are gone.
    fn forget_others(&self) {
        let Some(experience) = &self.experience else { return };
        let uids: Vec<String> = self.served.values().map(|(uid, _)| uid.clone()).collect();
        if let Err(error) = experience.keep_only(&uids) {
            tracing::warn!(%error, "cannot delete the training history of removed deployments");
        }
    }

    fn remove(&mut self, key: &str) {
        if let Some((_, served)) = self.served.remove(key) {
            served.end();
        }
    }

    fn publish(&self) {
        self.gateway.replace_models(self.served.values().map(|(_, served)| served.model.clone()).collect());
    }

    /// Takes back what was said about all of them.
    pub(crate) async fn forget(&mut self) {
        join_all(std::mem::take(&mut self.served).into_values().map(|(_, served)| served.forget())).await;
    }
}

/// Reports if the deployment with `key` is in the namespace `scope`; without a scope all are.
fn is_in(key: &str, scope: Option<&str>) -> bool {
    scope.is_none() || key.split_once('/').map(|(namespace, _)| namespace) == scope
}

fn key(demand: &MoEDemand) -> String {
    format!("{}/{}", demand.namespace().unwrap_or_default(), demand.name_any())
}
