//! Output of the read stage: objects in the cluster, and answers of functions.

use super::legacy_records;
use super::main_pollers::MainObservation;
use super::pods::{ContainerRun, PodView};
use super::records::{Details, Records};
use super::routing::RoutingTable;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt;
use remoe_api::{GatewayDemand, MoEDemand, MoEDeployment, MoEPlan, MoERecord};
use std::collections::{BTreeSet, HashMap};

/// Snapshot of everything that belongs to a deployment. Built once by [`read`](super::read); immutable, and free of
/// decisions.
#[derive(Debug, Clone, Default)]
pub(crate) struct Observed {
    /// Pods of functions, inspectors and profilers.
    pub pods: Vec<Pod>,
    /// Services.
    pub services: Vec<Service>,
    /// Network policies.
    pub network_policies: Vec<NetworkPolicy>,
    /// Disruption budgets.
    pub budgets: Vec<PodDisruptionBudget>,
    /// Plans, newest last.
    pub plans: Vec<MoEPlan>,
    /// Record with the facts of the checkpoint.
    pub model: Option<MoERecord>,
    /// Record with the routing generations.
    pub routing: Option<MoERecord>,
    /// Objects and logs that were read by name.
    pub details: Details,
    /// Latest observation of each main function, by the UID of its pod.
    pub main_observations: HashMap<String, MainObservation>,
    /// Containers of remote functions that are starting and already answered their readiness probe.
    pub serving: BTreeSet<ContainerRun>,
    /// Demand object, which gateways and the operator write; absent without gateways.
    pub demand: Option<MoEDemand>,
    /// UIDs of live gateways. Read only if the deployment depends on their reports: it may scale to zero, follow
    /// load, or replan.
    pub gateways: BTreeSet<String>,
    /// Set if a live gateway has no certificate. Main functions that start then accept every peer, unless one
    /// requires certificates already.
    pub uncertified_gateways: bool,
    /// Time since which this operator observes gateways.
    pub since: Timestamp,
    /// Time of the read.
    pub now: Timestamp,
}

impl Observed {
    /// Returns the records from which model and hardware are resolved.
    pub(crate) fn records(&self) -> Records<'_> {
        Records {
            pods: &self.pods,
            plans: &self.plans,
            model: self.model.as_ref(),
            routing: self.routing.as_ref(),
            details: &self.details,
            now: self.now,
        }
    }

    /// Returns the demand entries of live gateways.
    pub(crate) fn gateways_alive(&self) -> impl Iterator<Item = &GatewayDemand> {
        let entries = self.demand.as_ref().map_or(&[][..], |demand| demand.gateways());
        entries.iter().filter(|entry| self.gateways.contains(&entry.uid))
    }

    /// Returns the parsed routing table.
    pub(crate) fn table(&self, owner: &MoEDeployment) -> RoutingTable {
        let stored = self.routing.as_ref().map(RoutingTable::from_record);
        stored.or_else(|| legacy_records::routing(owner, self.records())).unwrap_or_default()
    }

    /// Returns whether a routing table is stored.
    pub(super) fn has_routing(&self, owner: &MoEDeployment) -> bool {
        self.routing.is_some() || legacy_records::routing(owner, self.records()).is_some()
    }

    /// Returns the pods of functions of `owner`, with the observations of main functions.
    pub(crate) fn functions(&self, owner: &MoEDeployment) -> Vec<PodView> {
        let uid = owner.uid().unwrap_or_default();
        let newest = self.table(owner).newest();
        let views = self.pods.iter().filter_map(|pod| PodView::from_pod(pod, &uid, self.now));
        let functions = views.map(|mut view| {
            if let Some(observation) =
                self.main_observations.get(&view.uid).filter(|_| view.is_main && view.is_sound())
            {
                view.note_in_force(observation.in_force, newest);
                view.placement.clone_from(&observation.placement);
            }
            view.ready |= view.starting && !view.is_main && self.serving.contains(&view.run());
            view
        });
        functions.collect()
    }
}
