//! Constraints on a plan from flags of a deployment: `--remote-memory`, `--threads`, and the cores of this machine.

use crate::exit::CliError;
use crate::flags::DeploymentArgs;
use crate::machine;
use remoe_planner::{CpuProfile, Problem, SizeRange};

const GB: f64 = 1e9;

/// Limits `problem` to this machine's cores, `--remote-memory` and `--threads`.
pub(crate) fn apply(args: &DeploymentArgs, problem: &mut Problem) -> Result<(), CliError> {
    problem.shared_cores = Some(f64::from(machine::cores().max(1)));
    if let Some(bytes) = args.remote_memory {
        let bytes = bytes as f64;
        problem.specs.remote =
            SizeRange { min_bytes: bytes, max_bytes: bytes, step_bytes: problem.specs.remote.step_bytes };
    }
    if let Some(threads) = args.threads {
        problem.specs.main = sizes_for_threads(problem.specs.main, threads, problem.pricing.vcpu_bytes())?;
        // More vCPUs than threads do not reduce the time.
        for layer in &mut problem.layers {
            let optional = [
                &mut layer.remote_expert_seconds,
                &mut layer.cpu_nonexpert_seconds,
                &mut layer.cpu_context_seconds,
            ];
            let profiles = optional.into_iter().flatten().chain([&mut layer.expert_seconds]);
            profiles.for_each(|profile| limit_vcpus(profile, threads as f64));
        }
    }
    Ok(())
}

/// Restricts memory sizes to those with at least one vCPU per thread. Each `vcpu_bytes` of memory come with one vCPU.
/// A single thread may have less than one vCPU.
fn sizes_for_threads(sizes: SizeRange, threads: usize, vcpu_bytes: f64) -> Result<SizeRange, CliError> {
    let min_needed_bytes = if threads > 1 { threads as f64 * vcpu_bytes } else { 0.0 };
    let steps = ((min_needed_bytes - sizes.min_bytes) / sizes.step_bytes).ceil().max(0.0);
    let min_bytes = sizes.min_bytes + steps * sizes.step_bytes;
    if min_bytes > sizes.max_bytes {
        let message = format!(
            "invalid --threads: {threads} threads need {threads} vCPUs, which take {} GB of memory in a plan; the main \
             function has at most {:.1} GB; lower --threads, raise --main-memory-mb, or set --remote-ratio",
            min_needed_bytes / GB,
            sizes.largest() / GB
        );
        return Err(CliError::arguments("--threads", message));
    }
    Ok(SizeRange { min_bytes, ..sizes })
}

/// Removes the measurements with more than `max_vcpus`.
fn limit_vcpus(profile: &mut CpuProfile, max_vcpus: f64) {
    let count = profile.vcpus.partition_point(|vcpus| *vcpus <= max_vcpus).max(1);
    profile.vcpus.truncate(count);
    profile.seconds.iter_mut().for_each(|row| row.truncate(count));
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn threads_require_memory_for_their_vcpus() {
        let sizes = SizeRange { min_bytes: 1e8, max_bytes: 4e9, step_bytes: 1e8 };
        assert_eq!(sizes_for_threads(sizes, 1, GB), Ok(sizes));
        assert!((sizes_for_threads(sizes, 2, GB).unwrap().min_bytes - 2e9).abs() < 1.0);
        assert!((sizes_for_threads(sizes, 2, 1.769e9).unwrap().min_bytes - 3.6e9).abs() < 1.0);
        let error = sizes_for_threads(sizes, 5, GB).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("--threads"));
        assert!(error.message.contains("4.0 GB"), "{}", error.message);
    }

    #[test]
    fn measurements_above_the_thread_count_are_removed() {
        let seconds = vec![vec![4.0, 2.0, 1.0]; 2];
        let measured = CpuProfile { vcpus: vec![0.5, 1.0, 2.0], tokens: vec![1.0, 8.0], seconds };
        let mut profile = measured.clone();
        limit_vcpus(&mut profile, 1.0);
        assert_eq!((profile.vcpus, profile.seconds), (vec![0.5, 1.0], vec![vec![4.0, 2.0]; 2]));
        let mut profile = measured.clone();
        limit_vcpus(&mut profile, 2.0);
        assert_eq!(profile, measured);
    }
}
