//! Writes as values: the diff stage lists them, the apply stage executes them.

use super::events::ClusterEvent;
use super::names::Component;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use remoe_api::{MoEDemand, MoEPlan, MoERecord};

/// Prefix of the note of an event about started pods; their names follow.
pub(crate) const STARTED: &str = "Started ";

/// Write to the API.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Write {
    /// Applies a Service.
    Service(DesiredObject<Service>),
    /// Applies a network policy.
    Policy(DesiredObject<NetworkPolicy>),
    /// Applies a disruption budget.
    Budget(DesiredObject<PodDisruptionBudget>),
    /// Applies the record of the model's facts.
    Facts(DesiredObject<MoERecord>),
    /// Writes the routing record, if it is unchanged since it was read.
    Routing(DesiredObject<MoERecord>),
    /// Writes the operator's part of the demand object, if the object is unchanged since it was read.
    Demand(DesiredObject<MoEDemand>),
    /// Removes the entries of dead gateways from the demand object, if it is unchanged since it was read.
    ForgetGateways(Box<MoEDemand>),
    /// Creates a plan; plans are immutable.
    Plan(Box<MoEPlan>),
    /// Writes a hardware profile for all deployments that would measure the same.
    Profile(Box<MoERecord>),
    /// Adds the deployment to the owners of a profile.
    Share(Box<MoERecord>),
    /// Creates a pod.
    Create(Creation),
    /// Restores the labels of a pod.
    Relabel {
        /// Pod in the cluster.
        live: Box<Pod>,
        /// Desired pod.
        wanted: Box<Pod>,
    },
    /// Deletes a pod.
    Delete(super::write::Deletion),
    /// Deletes the disruption budget of this name and UID.
    DeleteBudget(String, String),
    /// Deletes the plan of this name and UID.
    DeletePlan(String, String),
}

/// Object and its desired state.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DesiredObject<K> {
    /// Desired state.
    pub wanted: Box<K>,
    /// Object as it was read; absent if its labels did not select it.
    pub live: Option<Box<K>>,
}

/// Pod to create.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Creation {
    /// Desired pod.
    pub pod: Box<Pod>,
    /// Component of the pod.
    pub component: Component,
    /// Event to publish once it is created.
    pub event: ClusterEvent,
}

/// Pod to delete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Deletion {
    /// Name of the pod.
    pub name: String,
    /// UID of the pod: another pod of the same name stays.
    pub uid: String,
    /// Grace period in seconds, if it differs from the pod's.
    pub grace_seconds: Option<u32>,
}
