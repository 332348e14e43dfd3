//! Device of the main functions that a command starts. Serving, profiles and plans of a command use the same device.

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
/// Default price of one GPU in dollars per hour: a rounded median of cloud prices.
const DOLLARS_PER_GPU_HOUR: f64 = 1.0;
/// Default memory of one GPU in MB, without a price list and `nvidia-smi`.
const GPU_MEMORY_MB: f64 = 24_000.0;

/// Device of a main function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MainDevice {
    /// Name in flags: `cpu`, `cuda` or `cuda:INDEX`.
    pub(crate) name: String,
    /// Model name of the GPU, if known.
    pub(crate) gpu: Option<String>,
}

impl MainDevice {
    /// Returns the device that flags name, else the best one of this machine for `backend`. May print a warning.
    pub(crate) fn resolve(asked: Option<&str>, backend: Option<Backend>) -> Self {
        let name = match (asked, backend) {
            (Some(device), _) => device,
            (None, Some(Backend::Native)) => CPU,
            (None, _) => best_device(),
        };
        let gpu = (name != CPU).then(Gpus::find).flatten();
        Self { name: name.to_owned(), gpu: gpu.and_then(|gpus| gpus.model().map(str::to_owned)) }
    }

    /// Returns the device on which `profile` was measured.
    pub(crate) fn of_profile(profile: &Profile) -> Self {
        let machine = &profile.machine;
        match profile.device {
            None => Self::cpu(),
            // GPU times that a user added to a profile of the CPU.
            Some(_) if machine.device == CPU => Self { name: CUDA.to_owned(), gpu: None },
            Some(_) => Self { name: machine.device.clone(), gpu: machine.gpu.clone() },
        }
    }

    /// Returns the device of the main function of `desired`.
    pub(crate) fn of_deployment(desired: &DesiredDeployment) -> Self {
        Self::resolve(desired.options.device.as_deref(), None)
    }

    /// Returns the device of the CPUs.
    pub(crate) fn cpu() -> Self {
        Self { name: CPU.to_owned(), gpu: None }
    }

    pub(crate) fn is_cpu(&self) -> bool {
        self.name == CPU
    }

    /// Returns an identifier for file names of profiles. Profiles of different devices have different ones.
    pub(crate) fn file_slug(&self) -> String {
        match (&self.gpu, self.name.strip_prefix("cuda:")) {
            _ if self.is_cpu() => CPU.to_owned(),
            (Some(model), _) => format!("{CUDA}-{}", slug(model)),
            // Without model names, GPUs of different indices may differ.
            (None, index) => format!("{CUDA}-{}", index.unwrap_or("0")),
        }
    }

    /// Returns the default prices, with a price of the GPU if the device is one.
    pub(crate) fn default_prices(&self) -> Prices {
        if self.is_cpu() {
            return Prices::default();
        }
        let memory = smallest_gpu_memory().map_or(GPU_MEMORY_MB, |bytes| bytes as f64 / 1e6);
        Prices { gpu_hour: Some(DOLLARS_PER_GPU_HOUR), gpu_memory_mb: Some(memory), ..Prices::default() }
    }
}

/// Returns the memory of the smallest GPU in bytes, from `nvidia-smi`. Queried once per process.
fn smallest_gpu_memory() -> Option<u64> {
    static FOUND: OnceLock<Option<u64>> = OnceLock::new();
    *FOUND.get_or_init(|| gpu::query_devices().ok()?.into_iter().map(|gpu| gpu.memory_bytes).min())
}

/// Converts `name` to lower-case letters and digits, with dashes between words.
fn slug(name: &str) -> String {
    let words = name.split(|letter: char| !letter.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-").to_lowercase()
}

/// Returns the best usable device of this machine. Warns once if a GPU exists but cannot be used.
fn best_device() -> &'static str {
    static BEST: OnceLock<&str> = OnceLock::new();
    BEST.get_or_init(|| match Gpus::find().map(|gpus| check_gpus_usable(&gpus)) {
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

/// Checks that the installed main function can use `gpus`.
///
/// # Errors
/// The reason, with a remedy.
fn check_gpus_usable(gpus: &Gpus) -> Result<(), String> {
    let folder = programs::folder().map_err(|error: CliError| error.message)?;
    let program = folder.join(programs::TORCH);
    if !program.is_file() {
        return Err(format!("{} is not there; build it", programs::TORCH));
    }
    let libtorch = LibTorch::find(&program).map_err(|error| format!("{}: {error}", programs::TORCH))?;
    check_libtorch(&libtorch, gpus)
}

/// Checks that a main function with `libtorch` can use `gpus`.
///
/// # Errors
/// The reason, with a remedy.
pub(crate) fn check_libtorch(libtorch: &LibTorch, gpus: &Gpus) -> Result<(), String> {
    if !libtorch.has_cuda {
        return Err("its LibTorch is for CPUs; rebuild with `make build CUDA=1`".to_owned());
    }
    match (libtorch.min_driver_branch(), gpus.driver_branch()) {
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
    fn file_slugs_of_different_devices_differ() {
        let slug = |name: &str, gpu: Option<&str>| {
            MainDevice { name: name.to_owned(), gpu: gpu.map(str::to_owned) }.file_slug()
        };
        assert_eq!(slug("cpu", None), "cpu");
        assert_eq!(slug("cuda", Some("NVIDIA H200")), "cuda-nvidia-h200");
        assert_eq!(slug("cuda:1", Some("NVIDIA H200")), "cuda-nvidia-h200");
        assert_eq!(slug("cuda:0", Some("Tesla T4/16 (x)")), "cuda-tesla-t4-16-x");
        assert_eq!((slug("cuda", None), slug("cuda:1", None)), ("cuda-0".to_owned(), "cuda-1".to_owned()));
    }

    #[test]
    fn default_prices_have_a_gpu_price_on_gpus_only() {
        assert_eq!(MainDevice::cpu().default_prices(), Prices::default());
        let cuda = MainDevice { name: CUDA.to_owned(), gpu: None };
        assert!(cuda.default_prices().pricing().is_ok_and(|pricing| pricing.has_gpu()));
    }
}
