//! Device of the main functions that a command starts, decided once: what runs there is also measured and planned for.

use crate::exit::CliError;
use crate::flags::{Backend, CPU};
use crate::gpu::{self, Gpus};
use crate::libtorch::LibTorch;
use crate::output::progress::print_warning;
use crate::programs;
use remoe_hardware::{Prices, Profile};
use remoe_local::DesiredDeployment;
use std::sync::OnceLock;

/// Name of the first GPU.
const CUDA: &str = "cuda";
/// Price of one GPU in dollars per hour without a price list: a round figure in the middle of what clouds ask.
const GPU_HOUR: f64 = 1.0;
/// Memory of one GPU in MB without a price list and without `nvidia-smi`.
const GPU_MEMORY_MB: f64 = 24_000.0;

/// Device of a main function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MainDevice {
    /// As flags name it: `cpu`, `cuda` or `cuda:INDEX`.
    pub(crate) name: String,
    /// Model name of its GPU, where that is known.
    pub(crate) gpu: Option<String>,
}

impl MainDevice {
    /// Returns the device that flags name, else the best one of this machine for `backend`.
    pub(crate) fn resolve(asked: Option<&str>, backend: Option<Backend>) -> Self {
        let name = match (asked, backend) {
            (Some(device), _) => device,
            (None, Some(Backend::Native)) => CPU,
            (None, _) => best(),
        };
        let gpu = (name != CPU).then(Gpus::find).flatten();
        Self { name: name.to_owned(), gpu: gpu.and_then(|gpus| gpus.model().map(str::to_owned)) }
    }

    /// Returns the device that `profile` has figures of.
    pub(crate) fn of(profile: &Profile) -> Self {
        let machine = &profile.machine;
        match profile.device {
            None => Self::cpu(),
            // Figures that were stated by hand.
            Some(_) if machine.device == CPU => Self { name: CUDA.to_owned(), gpu: None },
            Some(_) => Self { name: machine.device.clone(), gpu: machine.gpu.clone() },
        }
    }

    /// Returns the device that the main function of `wanted` runs on.
    pub(crate) fn of_main(wanted: &DesiredDeployment) -> Self {
        Self::resolve(wanted.options.device.as_deref(), None)
    }

    /// The CPUs.
    pub(crate) fn cpu() -> Self {
        Self { name: CPU.to_owned(), gpu: None }
    }

    pub(crate) fn is_cpu(&self) -> bool {
        self.name == CPU
    }

    /// Returns a word for file names that is another one for figures of another device.
    pub(crate) fn word(&self) -> String {
        match (&self.gpu, self.name.strip_prefix("cuda:")) {
            _ if self.is_cpu() => CPU.to_owned(),
            (Some(model), _) => format!("{CUDA}-{}", word(model)),
            // Several GPUs need not be alike.
            (None, index) => format!("{CUDA}-{}", index.unwrap_or("0")),
        }
    }

    /// Returns the default prices, with one for the GPU where this is one.
    pub(crate) fn prices(&self) -> Prices {
        if self.is_cpu() {
            return Prices::default();
        }
        let memory = described_memory().map_or(GPU_MEMORY_MB, |bytes| bytes as f64 / 1e6);
        Prices { gpu_hour: Some(GPU_HOUR), gpu_memory_mb: Some(memory), ..Prices::default() }
    }
}

/// Memory of the smallest GPU in bytes; none if it cannot be found out.
fn described_memory() -> Option<u64> {
    static FOUND: OnceLock<Option<u64>> = OnceLock::new();
    *FOUND.get_or_init(|| gpu::describe().ok()?.into_iter().map(|gpu| gpu.memory_bytes).min())
}

/// Letters and digits of `name` in lower case, with dashes between words.
fn word(name: &str) -> String {
    let words = name.split(|letter: char| !letter.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-").to_lowercase()
}

/// Returns the best device of this machine. Warns the first time if that is the CPU although there is a GPU.
fn best() -> &'static str {
    static BEST: OnceLock<&str> = OnceLock::new();
    BEST.get_or_init(|| match Gpus::find().map(|gpus| usable(&gpus)) {
        None => CPU,
        Some(Ok(())) => CUDA,
        Some(Err(why)) => {
            print_warning(&format!(
                "serving on the CPU although there is a GPU:\n  {why};\n  `remoe doctor` says more, --device cpu ends this \
                 warning"
            ));
            CPU
        }
    })
}

/// Checks that main functions can use `gpus`.
///
/// # Errors
/// The reason, with a remedy.
fn usable(gpus: &Gpus) -> Result<(), String> {
    let folder = programs::folder().map_err(|error: CliError| error.message)?;
    let program = folder.join(programs::TORCH);
    if !program.is_file() {
        return Err(format!("{} is not there; build it", programs::TORCH));
    }
    let libtorch = LibTorch::of(&program).map_err(|error| format!("{}: {error}", programs::TORCH))?;
    check(&libtorch, gpus)
}

/// Checks that a main function with `libtorch` can use `gpus`.
///
/// # Errors
/// The reason, with a remedy.
pub(crate) fn check(libtorch: &LibTorch, gpus: &Gpus) -> Result<(), String> {
    if !libtorch.has_cuda {
        return Err("its LibTorch is for CPUs; rebuild with `make build CUDA=1`".to_owned());
    }
    match (libtorch.least_driver(), gpus.driver_branch()) {
        (Some(least), Some(branch)) if branch < least => Err(format!(
            "CUDA {} needs NVIDIA driver {least} or later, found {}; update the driver",
            libtorch.cuda_major.unwrap_or_default(),
            gpus.driver.as_deref().unwrap_or_default()
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_of_different_devices_have_different_names() {
        let word = |name: &str, gpu: Option<&str>| {
            MainDevice { name: name.to_owned(), gpu: gpu.map(str::to_owned) }.word()
        };
        assert_eq!(word("cpu", None), "cpu");
        assert_eq!(word("cuda", Some("NVIDIA H200")), "cuda-nvidia-h200");
        assert_eq!(word("cuda:1", Some("NVIDIA H200")), "cuda-nvidia-h200");
        assert_eq!(word("cuda:0", Some("Tesla T4/16 (x)")), "cuda-tesla-t4-16-x");
        assert_eq!((word("cuda", None), word("cuda:1", None)), ("cuda-0".to_owned(), "cuda-1".to_owned()));
    }

    #[test]
    fn prices_have_a_gpu_only_on_one() {
        assert_eq!(MainDevice::cpu().prices(), Prices::default());
        let cuda = MainDevice { name: CUDA.to_owned(), gpu: None };
        assert!(cuda.prices().pricing().is_ok_and(|pricing| pricing.has_gpu()));
    }
}
