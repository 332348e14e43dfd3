//! Writes as values: the diff stage lists them, the apply stage makes them.

use super::events::ClusterEvent;
use super::names::Component;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use remoe_api::{MoEDemand, MoEPlan, MoERecord};

/// Begins the note of an event about pods that were started; their names follow.
pub(crate) const STARTED: &str = "Started ";

/// One write.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Write {
    /// Makes a Service what it is to be.
    Service(DesiredObject<Service>),
    /// Makes a policy what it is to be.
    Policy(DesiredObject<NetworkPolicy>),
    /// Makes a disruption budget what it is to be.
    Budget(DesiredObject<PodDisruptionBudget>),
    /// Makes the copy of the model's facts what it is to be.
    Facts(DesiredObject<MoERecord>),
    /// Makes the record of the routing what it is to be, unless it changed since it was read.
    Routing(DesiredObject<MoERecord>),
    /// Tells gateways whether functions run, and where, unless that or an entry was written since it was read.
    Demand(DesiredObject<MoEDemand>),
    /// Removes the entries of dead gateways, unless an entry was written since it was read.
    ForgetGateways(Box<MoEDemand>),
    /// Stores a plan; plans never change.
    Plan(Box<MoEPlan>),
    /// Stores a profile for all deployments that would measure the same.
    Profile(Box<MoERecord>),
    /// Has a profile stay for this deployment as well.
    Share(Box<MoERecord>),
    /// Makes a pod.
    Create(Creation),
    /// Restores the labels of a pod.
    Relabel {
        /// Pod in the cluster.
        live: Box<Pod>,
        /// Pod as it was made.
        wanted: Box<Pod>,
    },
    /// Deletes a pod.
    Delete(super::write::Deletion),
    /// Deletes a disruption budget of this name and uid.
    DeleteBudget(String, String),
    /// Deletes a plan of this name and uid.
    DeletePlan(String, String),
}

/// An object that is to be what its manifest says.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DesiredObject<K> {
    /// Manifest.
    pub wanted: Box<K>,
    /// Object as it was read; none: it was not found by its labels.
    pub live: Option<Box<K>>,
}

/// A pod that is to be made.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Creation {
    /// The pod.
    pub pod: Box<Pod>,
    /// Component of the pod.
    pub component: Component,
    /// Event, once it is made.
    pub event: ClusterEvent,
}

/// A pod to be deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Deletion {
    /// Name of the pod.
    pub name: String,
    /// UID of the pod: another pod of the same name stays.
    pub uid: String,
    /// Grace period in seconds, if it is not that of the pod.
    pub grace_seconds: Option<u32>,
}
