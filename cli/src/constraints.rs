//! Constraints that flags put on a plan: sizes that were asked for are what it may choose from.

use crate::exit::CliError;
use crate::flags::DeploymentArgs;
use crate::machine;
use remoe_planner::{CpuProfile, Problem, SizeRange};

const GB: f64 = 1e9;

/// Holds `problem` to this machine, `--remote-memory` and `--threads`.
pub(crate) fn apply(args: &DeploymentArgs, problem: &mut Problem) -> Result<(), CliError> {
    problem.shared_cores = Some(f64::from(machine::cores().max(1)));
    if let Some(bytes) = args.remote_memory {
        let bytes = bytes as f64;
        problem.specs.remote =
            SizeRange { min_bytes: bytes, max_bytes: bytes, step_bytes: problem.specs.remote.step_bytes };
    }
    if let Some(threads) = args.threads {
        problem.specs.main = with_threads(problem.specs.main, threads, problem.pricing.vcpu_bytes())?;
        // More vCPUs than threads save no time.
        for layer in &mut problem.layers {
            let optional = [
                &mut layer.remote_expert_seconds,
                &mut layer.cpu_nonexpert_seconds,
                &mut layer.cpu_context_seconds,
            ];
            let profiles = optional.into_iter().flatten().chain([&mut layer.expert_seconds]);
            profiles.for_each(|profile| cut(profile, threads as f64));
        }
    }
    Ok(())
}

/// The sizes whose vCPUs, one with each `vcpu_bytes`, keep `threads` threads at work. One thread works with any share
/// of a vCPU.
fn with_threads(sizes: SizeRange, threads: usize, vcpu_bytes: f64) -> Result<SizeRange, CliError> {
    let least = if threads > 1 { threads as f64 * vcpu_bytes } else { 0.0 };
    let steps = ((least - sizes.min_bytes) / sizes.step_bytes).ceil().max(0.0);
    let min_bytes = sizes.min_bytes + steps * sizes.step_bytes;
    if min_bytes > sizes.max_bytes {
        let message = format!(
            "invalid --threads: {threads} threads need {threads} vCPUs, which take {} GB of memory in a plan; the main \
             function has at most {:.1} GB; lower --threads, raise --main-memory-mb, or set --remote-ratio",
            least / GB,
            sizes.largest() / GB
        );
        return Err(CliError::arguments("--threads", message));
    }
    Ok(SizeRange { min_bytes, ..sizes })
}

/// Leaves out what was measured with more than `most` vCPUs.
fn cut(profile: &mut CpuProfile, most: f64) {
    let count = profile.vcpus.partition_point(|vcpus| *vcpus <= most).max(1);
    profile.vcpus.truncate(count);
    profile.seconds.iter_mut().for_each(|row| row.truncate(count));
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn threads_come_with_memory() {
        let sizes = SizeRange { min_bytes: 1e8, max_bytes: 4e9, step_bytes: 1e8 };
        assert_eq!(with_threads(sizes, 1, GB), Ok(sizes));
        assert!((with_threads(sizes, 2, GB).unwrap().min_bytes - 2e9).abs() < 1.0);
        assert!((with_threads(sizes, 2, 1.769e9).unwrap().min_bytes - 3.6e9).abs() < 1.0);
        let error = with_threads(sizes, 5, GB).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("--threads"));
        assert!(error.message.contains("4.0 GB"), "{}", error.message);
    }

    #[test]
    fn nothing_is_expected_of_more_vcpus_than_threads() {
        let seconds = vec![vec![4.0, 2.0, 1.0]; 2];
        let measured = CpuProfile { vcpus: vec![0.5, 1.0, 2.0], tokens: vec![1.0, 8.0], seconds };
        let mut profile = measured.clone();
        cut(&mut profile, 1.0);
        assert_eq!((profile.vcpus, profile.seconds), (vec![0.5, 1.0], vec![vec![4.0, 2.0]; 2]));
        let mut profile = measured.clone();
        cut(&mut profile, 2.0);
        assert_eq!(profile, measured);
    }
}
