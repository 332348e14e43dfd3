//! NVIDIA GPUs of this machine, as their driver shows them.

use std::ffi::OsStr;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Folder that stands for `/` where files of the driver are read; for tests.
const ROOT_VARIABLE: &str = "REMOE_HOST_ROOT";
/// Device file that the driver leaves for programs to open.
const CONTROL: &str = "dev/nvidiactl";
const VERSION: &str = "proc/driver/nvidia/version";
const GPUS: &str = "proc/driver/nvidia/gpus";
/// Indices or UUIDs of the GPUs that CUDA shows to programs.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
const TOOL: &str = "nvidia-smi";
/// A driver that hangs never answers.
const TOOL_LIMIT: Duration = Duration::from_secs(10);
const MIB: u64 = 1 << 20;

/// GPUs that programs of this machine can use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Gpus {
    /// Version of the driver, such as 580.65.06; none if it does not say.
    pub(crate) driver: Option<String>,
    /// Model name of each GPU, by bus address.
    models: Vec<String>,
}

/// Facts of one GPU, from `nvidia-smi`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Described {
    pub(crate) name: String,
    /// Compute capability, such as 9.0.
    pub(crate) capability: String,
    pub(crate) memory_bytes: u64,
}

impl Gpus {
    /// Finds the GPUs; none without a driver, or if CUDA is told to show none.
    pub(crate) fn find() -> Option<Self> {
        let hidden = std::env::var(VISIBLE).is_ok_and(|visible| matches!(visible.trim(), "" | "-1"));
        if hidden || !host(CONTROL).exists() {
            return None;
        }
        let version = std::fs::read_to_string(host(VERSION)).unwrap_or_default();
        let mut folders: Vec<PathBuf> =
            std::fs::read_dir(host(GPUS)).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
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

    /// Returns the model name of all GPUs; none if they differ or are not named.
    pub(crate) fn model(&self) -> Option<&str> {
        let (first, others) = self.models.split_first()?;
        others.iter().all(|other| other == first).then_some(first)
    }

    /// Returns the branch of the driver, such as 580.
    pub(crate) fn driver_branch(&self) -> Option<u32> {
        self.driver.as_deref()?.split('.').next()?.parse().ok()
    }
}

/// Asks `nvidia-smi` for the GPUs, in its order.
///
/// # Errors
/// The tool is missing, fails, does not answer in time, or answers in another form.
pub(crate) fn describe() -> Result<Vec<Described>, String> {
    let query = ["--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"];
    let text = output_within(TOOL.as_ref(), &query, TOOL_LIMIT)?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| described(line).ok_or_else(|| format!("unexpected output of {TOOL}: {line:?}")))
        .collect()
}

/// Path of a file of the driver.
fn host(path: &str) -> PathBuf {
    let root = std::env::var_os(ROOT_VARIABLE).map_or_else(|| PathBuf::from("/"), PathBuf::from);
    root.join(path)
}

/// Returns the version in the first line of the driver's version file: the first word that is one.
fn driver_version(text: &str) -> Option<&str> {
    let is_version = |word: &&str| {
        word.contains('.')
            && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    text.lines().next()?.split_whitespace().find(is_version)
}

fn described(line: &str) -> Option<Described> {
    // Names may hold commas, the two figures behind them do not.
    let (rest, memory) = line.rsplit_once(',')?;
    let (name, capability) = rest.rsplit_once(',')?;
    let memory_bytes = memory.trim().parse::<u64>().ok()?.checked_mul(MIB)?;
    Some(Described { name: name.trim().to_owned(), capability: capability.trim().to_owned(), memory_bytes })
}

/// Runs a program that prints little, and returns what it printed.
fn output_within(program: &OsStr, arguments: &[&str], limit: Duration) -> Result<String, String> {
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
            None if started.elapsed() > limit => {
                let _ended = child.kill();
                let _status = child.wait();
                return Err(format!("no answer of {name} within {} s", limit.as_secs()));
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
    fn driver_version_is_found_in_both_forms_of_the_file() {
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
    fn gpus_share_a_model_name_only_if_equal() {
        let gpus = |models: &[&str]| Gpus {
            driver: None,
            models: models.iter().map(|it| (*it).to_owned()).collect(),
        };
        assert_eq!(gpus(&["A", "A"]).model(), Some("A"));
        assert_eq!(gpus(&["A", "B"]).model(), None);
        assert_eq!(gpus(&[]).model(), None);
    }

    #[test]
    fn line_of_the_tool_is_read_from_its_end() {
        let line = described("NVIDIA A, B, 9.0, 143771").unwrap();
        assert_eq!((line.name.as_str(), line.capability.as_str()), ("NVIDIA A, B", "9.0"));
        assert_eq!(line.memory_bytes, 143_771 << 20);
        for wrong in ["", "NVIDIA", "NVIDIA, 9.0, much", "NVIDIA, 9.0, 99999999999999999999"] {
            assert_eq!(described(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn tool_that_hangs_is_given_up() {
        let limit = Duration::from_millis(50);
        assert!(output_within("sleep".as_ref(), &["600"], limit).unwrap_err().contains("no answer of sleep"));
        assert!(output_within("false".as_ref(), &[], TOOL_LIMIT).unwrap_err().contains("failed"));
        assert_eq!(output_within("echo".as_ref(), &["a"], TOOL_LIMIT).unwrap(), "a\n");
    }
}
