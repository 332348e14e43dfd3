//! Cost of the pods of functions while they exist. Gateways are told of it, and record it. Pure.
//!
//! A pod is paid for from when it has a node until it is gone, at the price of what it reserves there.

use super::names::{COMPONENT, Component, FUNCTION, label, tier};
use super::ownership::is_owned_by;
use super::pods::{address, condition, container, expert_address};
use super::quantity::amount;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use remoe_api::{Billing, FunctionPod, MOST_FUNCTIONS, MoEDeployment, PricingSpec};

/// Bytes of the GB that memory is priced by.
const GB: f64 = 1e9;

/// Nano-dollars an hour that a pod costs at most, a thousand dollars: the lives of many such pods can still be added up.
const MOST_RATE: f64 = 1e12;

/// Bytes that a pod reserves at most: what the API can take, of many pods together too.
const MOST_BYTES: f64 = (1_u64 << 50) as f64;

/// The pods of `owner`'s functions that are paid for. Those that end have been replaced where functions are to run.
pub(crate) fn billed_pods(owner: &MoEDeployment, pods: &[Pod], functions_run: bool) -> Vec<FunctionPod> {
    let uid = owner.metadata.uid.as_deref().unwrap_or_default();
    let ours = pods.iter().filter(|pod| is_owned_by(*pod, uid));
    let mut billed_pods: Vec<FunctionPod> =
        ours.filter_map(|pod| function(owner, pod, functions_run)).collect();
    billed_pods.sort_by(|one, other| one.pod.cmp(&other.pod));
    billed_pods.truncate(MOST_FUNCTIONS);
    billed_pods
}

/// Returns the cost of `billed_pods`, in nano-dollars per hour.
pub(crate) fn per_hour(billed_pods: &[FunctionPod]) -> u64 {
    billed_pods.iter().fold(0, |sum, function| sum.saturating_add(function.rate))
}

fn function(owner: &MoEDeployment, pod: &Pod, functions_run: bool) -> Option<FunctionPod> {
    let component = label(&pod.metadata, COMPONENT);
    let is_main = component == Component::Main.name();
    if !is_main && component != Component::RemoteExpert.name() {
        return None;
    }
    let status = pod.status.as_ref()?;
    let ready = condition(status, "Ready").filter(|ready| ready.status == "True");
    let pricing = &owner.spec.pricing;
    Some(FunctionPod {
        uid: pod.uid()?,
        pod: pod.name_any(),
        tier: tier(label(&pod.metadata, FUNCTION)),
        address: address(status).filter(|_| !is_main).map(expert_address),
        restarts: container(status).map_or(0, |one| u32::try_from(one.restart_count).unwrap_or(0)),
        rate: rate(owner, pricing, pod),
        // The conversion takes NaN for 0.
        memory: reserved(pod, "memory").round().clamp(0.0, MOST_BYTES) as u64,
        per_work: !is_main && pricing.billing == Billing::Invocation,
        started: MicroTime(status.start_time.as_ref()?.0),
        serving: ready.and_then(|ready| Some(MicroTime(ready.last_transition_time.as_ref()?.0))),
        replaced: asked_to_end(pod).filter(|_| functions_run).map(MicroTime),
    })
}

/// When a pod was asked to end: what stands in it is when it must have ended.
fn asked_to_end(pod: &Pod) -> Option<Timestamp> {
    let ends = pod.metadata.deletion_timestamp.as_ref()?.0;
    let grace = SignedDuration::from_secs(pod.metadata.deletion_grace_period_seconds.unwrap_or(0));
    ends.checked_sub(grace).ok()
}

/// Returns the amount of `resource` that the containers of the pod reserve together.
fn reserved(pod: &Pod, resource: &str) -> f64 {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let requests = containers.filter_map(|container| container.resources.as_ref()?.requests.as_ref());
    requests.filter_map(|requests| requests.get(resource)).filter_map(amount).sum()
}

/// Nano-dollars an hour of what the pod reserves; what has no price costs nothing.
fn rate(owner: &MoEDeployment, pricing: &PricingSpec, pod: &Pod) -> u64 {
    let price = |text: &str| text.parse::<f64>().unwrap_or(0.0);
    let gpu = owner.spec.main.gpu.as_ref();
    let gpus = gpu.map_or(0.0, |gpu| reserved(pod, &gpu.resource));
    let dollars = reserved(pod, "cpu") * price(&pricing.cpu_core_hour)
        + reserved(pod, "memory") / GB * price(&pricing.memory_gb_hour)
        + gpus * pricing.gpu_hour.as_deref().map_or(0.0, price);
    // The conversion takes NaN for 0.
    (dollars * 1e9).round().clamp(0.0, MOST_RATE) as u64
}
