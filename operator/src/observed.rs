//! What there is: read from the API in one go, and heard from main functions.

use super::api::{GatewayDemand, MoEDemand, MoEDeployment, MoEPlan, MoERecord, Replan};
use super::build::knows_gateways;
use super::calls::{CallError, Calls};
use super::conversations::Heard;
use super::earlier;
use super::fleet::Others;
use super::gateways::Gateways;
use super::known::{Lacking, lacking};
use super::names;
use super::planner::WakePlan;
use super::pods::PodView;
use super::rest::Rest;
use super::routing::RoutingTable;
use super::starting::Run;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::{Resource, ResourceExt};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use tokio::try_join;

/// Everything that belongs to a deployment, and when it was looked at.
#[derive(Debug, Clone, Default)]
pub(crate) struct Observed {
    /// Pods of functions and helpers.
    pub pods: Vec<Pod>,
    /// Services.
    pub services: Vec<Service>,
    /// Network policies.
    pub network_policies: Vec<NetworkPolicy>,
    /// Disruption budgets.
    pub budgets: Vec<PodDisruptionBudget>,
    /// Plans, the newest last.
    pub plans: Vec<MoEPlan>,
    /// The facts of the checkpoint.
    pub model: Option<MoERecord>,
    /// The routing generations.
    pub routing: Option<MoERecord>,
    /// Records of figures of the hardware that were asked for, by name; none: there is none.
    pub profiles: BTreeMap<String, Option<MoERecord>>,
    /// ConfigMaps that were asked for, by name; none: there is none. They are of those who supply figures, or of an earlier
    /// release.
    pub maps: BTreeMap<String, Option<ConfigMap>>,
    /// Logs of helpers that are done, by the name of their pods, or why one cannot be read.
    pub logs: BTreeMap<String, Result<String, String>>,
    /// What main functions said, by the uid of their pods.
    pub heard: HashMap<String, Heard>,
    /// The uids of pods that start and said themselves that they serve.
    pub serving: BTreeSet<Run>,
    /// Functions of all other deployments.
    pub others: Others,
    /// What gateways and the operator tell each other, where there are gateways.
    pub demand: Option<MoEDemand>,
    /// The identities of the gateways that live, where functions may sleep, or plans or replicas follow what gateways say.
    pub gateways: BTreeSet<String>,
    /// Gateways live that could show main functions no certificate, and no main function wants one yet: those that start are to
    /// speak with everybody.
    pub strange_gateways: bool,
    /// Main functions that start now would not find a certificate.
    pub uncertified: bool,
    /// Others are being made anew as nobody asked: it is not the deployment's turn yet.
    pub waits: bool,
    /// Until when this operator looks for no plan that follows requests.
    pub rest: Rest,
    /// The plan for the latest wake, if this operator makes or has made it.
    pub wake_plan: Option<WakePlan>,
    /// Since when this operator has been looking.
    pub since: Timestamp,
    /// When.
    pub now: Timestamp,
}

impl Observed {
    /// The entries of gateways that live.
    pub(crate) fn gateways_alive(&self) -> impl Iterator<Item = &GatewayDemand> {
        let entries = self.demand.as_ref().map_or(&[][..], |demand| demand.gateways());
        entries.iter().filter(|entry| self.gateways.contains(&entry.uid))
    }

    /// The routing generations, read.
    pub(crate) fn table(&self, owner: &MoEDeployment) -> RoutingTable {
        let kept = self.routing.as_ref().map(RoutingTable::from_record);
        kept.or_else(|| earlier::routing(owner, self)).unwrap_or_default()
    }

    /// Whether main functions were told anything that is kept.
    pub(super) fn has_routing(&self, owner: &MoEDeployment) -> bool {
        self.routing.is_some() || earlier::routing(owner, self).is_some()
    }

    /// The pods of functions of `owner`, with what main functions said.
    pub(crate) fn functions(&self, owner: &MoEDeployment) -> Vec<PodView> {
        let uid = owner.uid().unwrap_or_default();
        let newest = self.table(owner).newest();
        let views = self.pods.iter().filter_map(|pod| PodView::of(pod, &uid, self.now));
        let heard = views.map(|mut view| {
            if let Some(heard) = self.heard.get(&view.uid).filter(|_| view.is_main && view.is_sound()) {
                view.follows(heard.in_force, newest);
                view.placement.clone_from(&heard.placement);
            }
            view.ready |= view.starting && !view.is_main && self.serving.contains(&view.run());
            view
        });
        heard.collect()
    }
}

/// Reads everything that belongs to `deployment`; `heard` is what its main functions said, `serving` are those of its pods
/// that start and said that they serve, and `others` what is known of the functions of other deployments. Where there are `gateways`, they are asked for too.
///
/// # Errors
/// A call that came to nothing, or a value that cannot be written as JSON.
pub(super) async fn observe(
    calls: &Calls,
    deployment: &MoEDeployment,
    (heard, serving): (HashMap<String, Heard>, BTreeSet<Run>),
    others: Others,
    gateways: Option<&Gateways>,
) -> Result<Observed, ObserveError> {
    let name = deployment.name_any();
    let labels = BTreeMap::from([(names::DEPLOYMENT.to_owned(), name.clone())]);
    let selector = names::selector_text(&labels);
    let demand = async {
        match gateways {
            Some(_) => calls.get::<MoEDemand>(&name).await,
            None => Ok(None),
        }
    };
    let follows = deployment.spec.prediction.replan == Replan::Auto;
    let is_told = deployment.spec.idle_window().is_some() || follows || deployment.spec.follows_load();
    let live = async {
        match gateways.filter(|_| is_told) {
            Some(gateways) => gateways.live().await.map(Some),
            None => Ok(None),
        }
    };
    let (pods, services, network_policies, budgets, plans, records, demand, live) = try_join!(
        calls.list(&selector),
        calls.list(&selector),
        calls.list(&selector),
        calls.list(&selector),
        calls.plans(&selector),
        calls.list::<MoERecord>(&selector),
        demand,
        live,
    )?;
    // Whoever asked for certificates goes on to, so that nothing is read for it. Gateways of a version before are gone soon.
    let uid = deployment.uid().unwrap_or_default();
    let asks = pods.iter().any(|pod| is_owned_by(pod, &uid) && knows_gateways(pod));
    let certified = gateways.filter(|gateways| gateways.have_certificates() && !asks);
    let live = match (certified, live) {
        (Some(gateways), None) => Some(gateways.live().await?),
        (_, live) => live,
    };
    let strange_gateways = certified.is_some() && live.as_ref().is_some_and(|live| live.strange);
    let live = live.filter(|_| is_told).unwrap_or_default();
    // What belongs to an earlier deployment of the same name is on its way out.
    let record = |name: String| {
        records.iter().find(|record| record.name_any() == name && is_owned_by(*record, &uid)).cloned()
    };
    let mut observed = Observed {
        pods,
        services,
        network_policies,
        budgets,
        plans: plans.into_iter().filter(|plan| is_owned_by(plan, &uid)).collect(),
        model: record(names::model_record(&name)),
        routing: record(names::routing_record(&name)),
        profiles: BTreeMap::new(),
        maps: BTreeMap::new(),
        logs: BTreeMap::new(),
        heard,
        serving,
        others,
        demand,
        gateways: live.uids,
        strange_gateways,
        uncertified: false,
        waits: false,
        rest: Rest::default(),
        wake_plan: None,
        since: gateways.map_or(Timestamp::UNIX_EPOCH, |gateways| gateways.since),
        now: Timestamp::now(),
    };
    // What else is needed follows from what was read.
    while let Some(lacking) = lacking(deployment, &observed)? {
        match lacking {
            Lacking::Log(pod) => {
                let log = calls.log(&pod).await.map_err(|error| error.to_string());
                observed.logs.insert(pod, log);
            }
            Lacking::Profile(name) => {
                let record = calls.get(&name).await?;
                observed.profiles.insert(name, record);
            }
            Lacking::Map(name) => {
                let map = calls.get(&name).await?;
                observed.maps.insert(name, map);
            }
        }
    }
    Ok(observed)
}

/// Why a deployment could not be looked at.
#[derive(Debug, thiserror::Error)]
pub(super) enum ObserveError {
    /// A call of the API.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A value that cannot be written as JSON.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
}

/// Whether the object goes with the owner that has `uid`.
pub(super) fn is_owned_by<K: Resource>(object: &K, uid: &str) -> bool {
    object.owner_references().iter().any(|owner| owner.controller == Some(true) && owner.uid == uid)
}
