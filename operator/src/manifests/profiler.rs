//! Pod of the profiler, which measures the hardware.

use super::OperatorEnvironment;
use super::disk::DiskLimits;
use super::functions::{BuildError, affinity_to_main};
use super::one_shot::OneShotPod;
use super::pod::{ModelAccess, Program, resources};
use crate::facts::ModelFacts;
use crate::names::{Component, PodName, profile_record};
use crate::quantity::{MB, megabytes, millicores_for_memory, vcpus};
use k8s_openapi::api::core::v1::{EnvVar, Pod, PodSpec, Toleration};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt;
use remoe_api::{CpuRange, Device, GpuSpec, MemoryRange, MoEDeployment, MoEPlanSpec};

/// Deadline of a profiler.
const DEADLINE_SECONDS: i64 = 600;
/// Range of measured millicores. More hardly help one expert, and a large pod would find no node beside the functions
/// that serve already.
const MEASURED_MILLICORES: std::ops::RangeInclusive<u32> = 1_000..=8_000;
/// Memory in addition to the weights: the programs, and the experts of a remote function beside those of the main
/// one.
const ADDITIONAL_MEMORY_MB: u64 = 2_500;

/// Returns the vCPUs to measure for main functions with up to `memory`, and up to `cpu` if that is separate.
pub(crate) fn measured_vcpus(memory: &MemoryRange, cpu: Option<&CpuRange>) -> Quantity {
    let most = cpu.map_or(millicores_for_memory(memory.max), |cpu| cpu.max);
    vcpus(most.clamp(*MEASURED_MILLICORES.start(), *MEASURED_MILLICORES.end()))
}

/// Returns the pod that measures `subject`, on nodes for the main functions of `plan`, with the vCPUs of their
/// maximum.
///
/// It has no GPU, since the running main function may occupy the only one. So a profile of a GPU deployment has
/// measured figures of CPUs, functions and network, and assumed ones of the GPU.
///
/// # Errors
/// The plan's source is invalid or not allowed.
pub(crate) fn profiler(
    owner: &MoEDeployment,
    subject: &str,
    incarnation: u32,
    plan: &MoEPlanSpec,
    facts: &ModelFacts,
    environment: &OperatorEnvironment,
) -> Result<Pod, BuildError> {
    let access = ModelAccess::new(&plan.model, &environment.sources)?;
    let mut arguments = vec!["profile".to_owned()];
    arguments.extend(plan.model.precision_of_all());
    arguments.extend(["--device".to_owned(), plan.device.name().to_owned()]);
    if plan.device == Device::Cuda {
        arguments.push("--assume-device".to_owned());
    }
    arguments.extend(access.arguments.iter().cloned());
    let (experts, dense) = (plan.model.experts_dtype.map(Into::into), plan.model.dense_dtype.map(Into::into));
    let inspection = facts.inspection.clone().kept_as(experts, dense, plan.device.name());
    let weights = inspection.resident_total_bytes(plan.model.dtype.name());
    let memory = u32::try_from(weights.div_ceil(MB).saturating_add(ADDITIONAL_MEMORY_MB)).unwrap_or(u32::MAX);
    let main = &owner.spec.main;
    let program = Program {
        name: "profiler",
        image: environment.main_image(plan.device),
        pull_policy: &environment.pull_policy,
        command: "remoe-agent",
        arguments,
        resources: resources(measured_vcpus(&main.memory_mb, main.cpu.as_ref()), megabytes(memory)),
    };
    let place = profile_record(subject);
    let one_shot = OneShotPod {
        owner,
        component: Component::Profiler,
        subject,
        deadline_seconds: DEADLINE_SECONDS,
        disk: DiskLimits::of_plan(owner, plan),
        extras: &environment.pods,
    };
    let mut pod = one_shot.pod(PodName { place, incarnation }, program, &access);
    if let (Some(gpu), Some(spec)) = (&main.gpu, &mut pod.spec) {
        schedule_on_gpu_nodes(spec, owner, gpu);
    }
    Ok(pod)
}

/// Lets a pod without a GPU run on GPU nodes, and hides their GPUs from it.
fn schedule_on_gpu_nodes(spec: &mut PodSpec, owner: &MoEDeployment, gpu: &GpuSpec) {
    if let Some(container) = spec.containers.first_mut() {
        // By default, NVIDIA's runtime gives all GPUs to containers of some images.
        container.env.get_or_insert_default().push(EnvVar {
            name: "NVIDIA_VISIBLE_DEVICES".to_owned(),
            value: Some("void".to_owned()),
            value_from: None,
        });
    }
    // By convention, nodes with an extended resource have this taint. An admission plugin adds the toleration only to
    // pods that request the resource.
    spec.tolerations.get_or_insert_default().push(Toleration {
        key: Some(gpu.resource.clone()),
        operator: Some("Exists".to_owned()),
        ..Toleration::default()
    });
    spec.affinity.get_or_insert_with(|| affinity_to_main(&owner.name_any()));
}
