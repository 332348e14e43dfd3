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

/// Everything that belongs to a deployment. Built once, by [`read`](super::read), and never changed; it holds no decision.
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
    /// Facts of the checkpoint.
    pub model: Option<MoERecord>,
    /// Routing generations.
    pub routing: Option<MoERecord>,
    /// Objects and logs that were read by name.
    pub details: Details,
    /// Answers of main functions, by the UID of their pods.
    pub heard: HashMap<String, MainObservation>,
    /// Containers of remote functions that start and answer their probe.
    pub serving: BTreeSet<ContainerRun>,
    /// Demand as gateways and the operator write it, if there are gateways.
    pub demand: Option<MoEDemand>,
    /// The identities of the gateways that live, where functions may sleep, or plans or replicas follow what gateways say.
    pub gateways: BTreeSet<String>,
    /// Gateways live that could show main functions no certificate, and no main function wants one yet: those that start are to
    /// speak with everybody.
    pub uncertified_gateways: bool,
    /// Since when this operator has been looking.
    pub since: Timestamp,
    /// Time of the read.
    pub now: Timestamp,
}

impl Observed {
    /// Returns everything from which model and hardware are known.
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

    /// The entries of gateways that live.
    pub(crate) fn gateways_alive(&self) -> impl Iterator<Item = &GatewayDemand> {
        let entries = self.demand.as_ref().map_or(&[][..], |demand| demand.gateways());
        entries.iter().filter(|entry| self.gateways.contains(&entry.uid))
    }

    /// The routing generations, read.
    pub(crate) fn table(&self, owner: &MoEDeployment) -> RoutingTable {
        let kept = self.routing.as_ref().map(RoutingTable::from_record);
        kept.or_else(|| legacy_records::routing(owner, self.records())).unwrap_or_default()
    }

    /// Reports if main functions were told a generation that is kept.
    pub(super) fn has_routing(&self, owner: &MoEDeployment) -> bool {
        self.routing.is_some() || legacy_records::routing(owner, self.records()).is_some()
    }

    /// The pods of functions of `owner`, with what main functions said.
    pub(crate) fn functions(&self, owner: &MoEDeployment) -> Vec<PodView> {
        let uid = owner.uid().unwrap_or_default();
        let newest = self.table(owner).newest();
        let views = self.pods.iter().filter_map(|pod| PodView::of(pod, &uid, self.now));
        let heard = views.map(|mut view| {
            if let Some(heard) = self.heard.get(&view.uid).filter(|_| view.is_main && view.is_sound()) {
                view.note_in_force(heard.in_force, newest);
                view.placement.clone_from(&heard.placement);
            }
            view.ready |= view.starting && !view.is_main && self.serving.contains(&view.run());
            view
        });
        heard.collect()
    }
}
