//! Cost of the pods of functions while they exist, which gateways record. Pure.
//!
//! A pod costs from its scheduling until it is gone, at the price of the resources that it reserves.

use super::names::{COMPONENT, Component, FUNCTION, label, tier};
use super::ownership::is_owned_by;
use super::pods::{address, condition, container, expert_address};
use super::quantity::parse_amount;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use remoe_api::{Billing, FunctionPod, MOST_FUNCTIONS, MoEDeployment, PricingSpec};

/// Bytes of 1 GB, the unit of memory prices.
const BYTES_PER_GB: f64 = 1e9;

/// Maximum cost of a pod: a thousand dollars an hour, in nano-dollars, so that sums do not overflow.
const MAX_RATE_NANODOLLARS: f64 = 1e12;

/// Maximum reserved bytes of a pod, so that sums do not overflow.
const MAX_RESERVED_BYTES: f64 = (1_u64 << 50) as f64;

/// Returns the billed pods of `owner`'s functions. If `functions_run` is set, terminating pods count as replaced.
pub(crate) fn billed_pods(owner: &MoEDeployment, pods: &[Pod], functions_run: bool) -> Vec<FunctionPod> {
    let uid = owner.metadata.uid.as_deref().unwrap_or_default();
    let ours = pods.iter().filter(|pod| is_owned_by(*pod, uid));
    let mut billed_pods: Vec<FunctionPod> =
        ours.filter_map(|pod| billed_pod(owner, pod, functions_run)).collect();
    billed_pods.sort_by(|other_pod, other| other_pod.pod.cmp(&other.pod));
    billed_pods.truncate(MOST_FUNCTIONS);
    billed_pods
}

/// Returns the cost of `billed_pods`, in nano-dollars per hour.
pub(crate) fn cost_per_hour(billed_pods: &[FunctionPod]) -> u64 {
    billed_pods.iter().fold(0, |sum, billed_pod| sum.saturating_add(billed_pod.rate))
}

fn billed_pod(owner: &MoEDeployment, pod: &Pod, functions_run: bool) -> Option<FunctionPod> {
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
        restarts: container(status)
            .map_or(0, |other_pod| u32::try_from(other_pod.restart_count).unwrap_or(0)),
        rate: rate(owner, pricing, pod),
        // `as` converts NaN to 0.
        memory: requested(pod, "memory").round().clamp(0.0, MAX_RESERVED_BYTES) as u64,
        per_work: !is_main && pricing.billing == Billing::Invocation,
        started: MicroTime(status.start_time.as_ref()?.0),
        serving: ready.and_then(|ready| Some(MicroTime(ready.last_transition_time.as_ref()?.0))),
        replaced: deletion_requested_at(pod).filter(|_| functions_run).map(MicroTime),
    })
}

/// Returns when the deletion of a pod was requested: its deletion time stamp minus the grace period.
fn deletion_requested_at(pod: &Pod) -> Option<Timestamp> {
    let ends = pod.metadata.deletion_timestamp.as_ref()?.0;
    let grace = SignedDuration::from_secs(pod.metadata.deletion_grace_period_seconds.unwrap_or(0));
    ends.checked_sub(grace).ok()
}

/// Returns the amount of `resource` that the pod's containers request in total.
fn requested(pod: &Pod, resource: &str) -> f64 {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let requests = containers.filter_map(|container| container.resources.as_ref()?.requests.as_ref());
    requests.filter_map(|requests| requests.get(resource)).filter_map(parse_amount).sum()
}

/// Returns the nano-dollars per hour of the pod's requests; resources without a price are free.
fn rate(owner: &MoEDeployment, pricing: &PricingSpec, pod: &Pod) -> u64 {
    let price = |text: &str| text.parse::<f64>().unwrap_or(0.0);
    let gpu = owner.spec.main.gpu.as_ref();
    let gpus = gpu.map_or(0.0, |gpu| requested(pod, &gpu.resource));
    let dollars = requested(pod, "cpu") * price(&pricing.cpu_core_hour)
        + requested(pod, "memory") / BYTES_PER_GB * price(&pricing.memory_gb_hour)
        + gpus * pricing.gpu_hour.as_deref().map_or(0.0, price);
    // `as` converts NaN to 0.
    (dollars * 1e9).round().clamp(0.0, MAX_RATE_NANODOLLARS) as u64
}
