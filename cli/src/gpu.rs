//! NVIDIA GPUs of this machine, from the driver's files and `nvidia-smi`.

use std::ffi::OsStr;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Environment variable with the folder that replaces `/` for the driver's files, for tests.
const ROOT_VARIABLE: &str = "REMOE_HOST_ROOT";
/// Device file that exists if the driver is loaded.
const CONTROL_DEVICE: &str = "dev/nvidiactl";
const VERSION_FILE: &str = "proc/driver/nvidia/version";
const GPUS_FOLDER: &str = "proc/driver/nvidia/gpus";
/// Environment variable with the indices or UUIDs of the GPUs that CUDA programs may use.
const VISIBLE_DEVICES_VARIABLE: &str = "CUDA_VISIBLE_DEVICES";
const NVIDIA_SMI: &str = "nvidia-smi";
/// Timeout of the tool, which never returns if the driver hangs.
const TOOL_TIMEOUT: Duration = Duration::from_secs(10);
const MIB: u64 = 1 << 20;

/// GPUs that programs of this machine can use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Gpus {
    /// Version of the driver, such as 580.65.06, if known.
    pub(crate) driver: Option<String>,
    /// Model names of the GPUs, sorted by bus address.
    models: Vec<String>,
}

/// Properties of one GPU, from `nvidia-smi`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuProperties {
    pub(crate) name: String,
    /// Compute capability, such as 9.0.
    pub(crate) capability: String,
    pub(crate) memory_bytes: u64,
}

impl Gpus {
    /// Finds the GPUs. Returns `None` without a driver, or if `CUDA_VISIBLE_DEVICES` hides all.
    pub(crate) fn find() -> Option<Self> {
        let is_hidden =
            std::env::var(VISIBLE_DEVICES_VARIABLE).is_ok_and(|visible| matches!(visible.trim(), "" | "-1"));
        if is_hidden || !host_path(CONTROL_DEVICE).exists() {
            return None;
        }
        let version = std::fs::read_to_string(host_path(VERSION_FILE)).unwrap_or_default();
        let mut folders: Vec<PathBuf> = std::fs::read_dir(host_path(GPUS_FOLDER))
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .collect();
        folders.sort();
        let model = |folder: PathBuf| {
            let text = std::fs::read_to_string(folder.join("information")).ok()?;
            let model = text.lines().find_map(|line| line.strip_prefix("Model:"))?.trim();
            (!model.is_empty()).then(|| model.to_owned())
        };
        Some(Self {
            driver: driver_version(&version).map(str::to_owned),
            models: folders.into_iter().filter_map(model).collect(),
        })
    }

    /// Returns the model name if all GPUs have the same one.
    pub(crate) fn model(&self) -> Option<&str> {
        let (first, others) = self.models.split_first()?;
        others.iter().all(|other| other == first).then_some(first)
    }

    /// Returns the branch of the driver, such as 580.
    pub(crate) fn driver_branch(&self) -> Option<u32> {
        self.driver.as_deref()?.split('.').next()?.parse().ok()
    }
}

/// Queries the properties of the GPUs with `nvidia-smi`, in its order.
///
/// # Errors
/// The tool is missing, fails, times out, or prints an unexpected format.
pub(crate) fn query_devices() -> Result<Vec<GpuProperties>, String> {
    let query = ["--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"];
    let text = run_with_timeout(NVIDIA_SMI.as_ref(), &query, TOOL_TIMEOUT)?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| {
            parse_properties(line).ok_or_else(|| format!("unexpected output of {NVIDIA_SMI}: {line:?}"))
        })
        .collect()
}

/// Returns the path of a driver's file.
fn host_path(path: &str) -> PathBuf {
    let root = std::env::var_os(ROOT_VARIABLE).map_or_else(|| PathBuf::from("/"), PathBuf::from);
    root.join(path)
}

/// Finds the first word that is a version number in the first line of the driver's version file.
fn driver_version(text: &str) -> Option<&str> {
    let is_version = |word: &&str| {
        word.contains('.')
            && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    text.lines().next()?.split_whitespace().find(is_version)
}

fn parse_properties(line: &str) -> Option<GpuProperties> {
    // Parsed from the end, because names may contain commas.
    let (rest, memory) = line.rsplit_once(',')?;
    let (name, capability) = rest.rsplit_once(',')?;
    let memory_bytes = memory.trim().parse::<u64>().ok()?.checked_mul(MIB)?;
    Some(GpuProperties {
        name: name.trim().to_owned(),
        capability: capability.trim().to_owned(),
        memory_bytes,
    })
}

/// Runs a program, and returns its output, which must fit into the pipe's buffer.
fn run_with_timeout(program: &OsStr, arguments: &[&str], timeout: Duration) -> Result<String, String> {
    let name = program.to_string_lossy();
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("cannot run {name}: {error}"))?;
    let started = Instant::now();
    let status = loop {
        match child.try_wait().map_err(|error| format!("cannot wait for {name}: {error}"))? {
            Some(status) => break status,
            None if started.elapsed() > timeout => {
                let _ended = child.kill();
                let _status = child.wait();
                return Err(format!("no answer of {name} within {} s", timeout.as_secs()));
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    if !status.success() {
        return Err(format!("{name} failed: {status}"));
    }
    let mut text = String::new();
    let read = child.stdout.take().map_or(Ok(0), |mut stdout| stdout.read_to_string(&mut text));
    read.map(|_bytes| text).map_err(|error| format!("cannot read the output of {name}: {error}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn driver_version_parses_for_both_kernel_modules() {
        for (line, version) in [
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024",
                "535.183.01",
            ),
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
                "580.65.06",
            ),
        ] {
            assert_eq!(driver_version(line), Some(version));
        }
        assert_eq!(driver_version(""), None);
        assert_eq!(driver_version("NVRM version: unknown\nGCC version: 12.2.0"), None);
        let gpus = |driver: &str| Gpus { driver: Some(driver.to_owned()), models: Vec::new() };
        assert_eq!((gpus("580.65.06").driver_branch(), gpus("x").driver_branch()), (Some(580), None));
    }

    #[test]
    fn model_name_is_known_only_if_all_gpus_share_it() {
        let gpus = |models: &[&str]| Gpus {
            driver: None,
            models: models.iter().map(|model| (*model).to_owned()).collect(),
        };
        assert_eq!(gpus(&["A", "A"]).model(), Some("A"));
        assert_eq!(gpus(&["A", "B"]).model(), None);
        assert_eq!(gpus(&[]).model(), None);
    }

    #[test]
    fn gpu_name_with_comma_parses() {
        let line = parse_properties("NVIDIA A, B, 9.0, 143771").unwrap();
        assert_eq!((line.name.as_str(), line.capability.as_str()), ("NVIDIA A, B", "9.0"));
        assert_eq!(line.memory_bytes, 143_771 << 20);
        for wrong in ["", "NVIDIA", "NVIDIA, 9.0, much", "NVIDIA, 9.0, 99999999999999999999"] {
            assert_eq!(parse_properties(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn hanging_tool_times_out() {
        let limit = Duration::from_millis(50);
        assert!(
            run_with_timeout("sleep".as_ref(), &["600"], limit).unwrap_err().contains("no answer of sleep")
        );
        assert!(run_with_timeout("false".as_ref(), &[], TOOL_TIMEOUT).unwrap_err().contains("failed"));
        assert_eq!(run_with_timeout("echo".as_ref(), &["a"], TOOL_TIMEOUT).unwrap(), "a\n");
    }
}
