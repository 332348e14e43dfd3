//! Catalogue of served deployments: follows the operator's `MoEDemand`s.

use crate::demand_writer::DemandWriter;
use crate::deployment::{ServedDeployment, short_names};
use crate::history_folder::HistoryFolder;
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

/// Largest size of the bodies of requests that wait for one model, in bytes.
const WAITING_BYTES: usize = 64 << 20;
/// Timeout of a watch in seconds. A connection that broke unnoticed is replaced after this time.
const WATCH_SECONDS: u32 = 60;

/// Served deployments, by `NAMESPACE/NAME`.
pub(crate) struct Catalogue {
    client: Client,
    settings: GatewaySettings,
    metrics: GatewayMetrics,
    cost_accounting: Arc<CostAccounting>,
    gateway: Arc<Gateway>,
    prefix_index: PrefixIndex,
    lease: watch::Receiver<bool>,
    /// Credentials for main functions that authenticate gateways.
    keyring: Option<Arc<Keyring>>,
    /// Resources for predictions, shared by all deployments.
    prediction_resources: SharedResources,
    /// Folder of model summaries and training history; `None`: they are kept in memory.
    history_folder: Option<HistoryFolder>,
    /// Deployments by key, each with the uid of its `MoEDemand`.
    served: BTreeMap<String, (String, ServedDeployment)>,
    /// Task that writes signs of life to the ledger. It starts once all pods are known, because functions that are
    /// not recorded by then count as ended.
    overhead: JoinSet<()>,
}

impl Catalogue {
    /// Makes an empty catalogue.
    pub(crate) fn new(
        client: Client,
        settings: &GatewaySettings,
        (metrics, cost_accounting): (GatewayMetrics, Arc<CostAccounting>),
        gateway: Arc<Gateway>,
        lease: watch::Receiver<bool>,
        keyring: Option<Arc<Keyring>>,
        (prediction_resources, history_folder): (SharedResources, Option<HistoryFolder>),
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
            prediction_resources,
            history_folder,
            served: BTreeMap::new(),
            overhead: JoinSet::new(),
        }
    }

    /// Follows the `MoEDemand`s of all watched namespaces. Returns only if all watches end.
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
        // Keys of each scope's list that is being read.
        let mut listed: BTreeMap<Option<String>, BTreeSet<String>> = BTreeMap::new();
        // Scopes without a complete list. Until all are complete, models are not published.
        let mut incomplete_scopes = scopes;
        while let Some((scope, event)) = events.next().await {
            match event {
                Ok(Event::Init) => drop(listed.remove(&scope)),
                Ok(Event::InitApply(demand)) => {
                    listed.entry(scope).or_default().insert(key(&demand));
                    self.apply(demand);
                }
                Ok(Event::InitDone) => {
                    let present = listed.remove(&scope).unwrap_or_default();
                    let deleted = self
                        .served
                        .keys()
                        .filter(|key| is_in(key, scope.as_deref()) && !present.contains(*key));
                    deleted.cloned().collect::<Vec<_>>().iter().for_each(|key| self.remove(key));
                    incomplete_scopes.remove(&scope);
                    if !incomplete_scopes.is_empty() {
                        continue;
                    }
                    self.publish();
                    self.delete_removed_history();
                    if self.overhead.is_empty() {
                        let GatewaySettings { cpu_core_hour, memory_gb_hour, .. } = self.settings;
                        let overhead =
                            Overhead::new(self.cost_accounting.clone(), cpu_core_hour, memory_gb_hour);
                        self.overhead.spawn(overhead.keep());
                    }
                }
                Ok(Event::Apply(demand)) => {
                    if self.apply(demand) && incomplete_scopes.is_empty() {
                        self.publish();
                    }
                }
                Ok(Event::Delete(demand)) => {
                    self.remove(&key(&demand));
                    if incomplete_scopes.is_empty() {
                        self.publish();
                        self.delete_removed_history();
                    }
                }
                Err(error) => tracing::warn!(%error, "cannot watch MoEDemands"),
            }
        }
    }

    /// Applies the `MoEDemand` of a deployment. Returns whether the deployment is new.
    fn apply(&mut self, demand: MoEDemand) -> bool {
        let key = key(&demand);
        if demand.metadata.deletion_timestamp.is_some() {
            return false;
        }
        let uid = demand.uid().unwrap_or_default();
        if let Some((known, served)) = self.served.get_mut(&key) {
            if *known == uid {
                served.update(demand.spec);
                return false;
            }
            // Another deployment of the same name.
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
        let folder = self.history_folder.as_ref().map(|folder| folder.of_deployment(&uid));
        let learner = UsageFollower::new(&key, folder, self.prediction_resources.clone());
        let model = Model::new(options, &self.metrics, &self.prefix_index);
        let (lease, keyring) = (self.lease.clone(), self.keyring.clone());
        let served = ServedDeployment::new(
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

    /// Deletes the model summaries and training history of removed deployments.
    fn delete_removed_history(&self) {
        let Some(history_folder) = &self.history_folder else { return };
        let uids: Vec<String> = self.served.values().map(|(uid, _)| uid.clone()).collect();
        if let Err(error) = history_folder.keep_only(&uids) {
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

    /// Removes this gateway's entries from the status of all `MoEDemand`s.
    pub(crate) async fn withdraw(&mut self) {
        join_all(std::mem::take(&mut self.served).into_values().map(|(_, served)| served.withdraw())).await;
    }
}

/// Reports if the deployment `key` is in the namespace `scope`. `None` means all namespaces.
fn is_in(key: &str, scope: Option<&str>) -> bool {
    scope.is_none() || key.split_once('/').map(|(namespace, _)| namespace) == scope
}

/// Returns the key `NAMESPACE/NAME` of a deployment.
fn key(demand: &MoEDemand) -> String {
    format!("{}/{}", demand.namespace().unwrap_or_default(), demand.name_any())
}
