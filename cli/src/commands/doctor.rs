//! `remoe doctor`: checks if this machine can serve models, and advises on missing parts.

use crate::device;
use crate::exit::CliError;
use crate::flags::{Backend, CPU};
use crate::gpu::{self, Gpus};
use crate::libtorch::LibTorch;
use crate::output::{json, table};
use crate::{machine, programs, running_commands};
use anstyle::AnsiColor;
use clap::Args;
use remoe_hub::{ModelArgs, cache_folder};
use remoe_kernels::{InstructionPath, NumericsClass, wrong_paths};
use remoe_rollout::Cgroups;
use rustix::fs::{Access, access, statvfs};
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

#[derive(Debug, Args)]
#[command(mut_arg("model_positional", |model| model.help(
    "Model to check for fit, optional, here or as --model: a Hugging Face folder, hf://ORGANISATION/NAME[@REVISION], \
     s3://BUCKET/PREFIX or https://HOST/PATH"
)))]
pub(crate) struct DoctorArgs {
    /// Model to check for fit
    #[command(flatten)]
    pub(crate) source: Option<ModelArgs>,
}

/// Free memory below which the check warns, in bytes.
const LOW_MEMORY_BYTES: u64 = 1 << 30;
/// Free disk space below which the check warns, in bytes.
const LOW_DISK_BYTES: u64 = 10_000_000_000;
/// Limit of open files below which the check warns. The gateway needs one per connection.
const LOW_FILE_LIMIT: u64 = 1024;
/// Timeout of a connection to a cluster.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

const HUGE_PAGES_FILE: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum CheckStatus {
    Ok,
    /// Serving works, but worse than possible.
    Warn,
    /// Serving does not work.
    Fail,
}

/// Result of one check.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    status: CheckStatus,
    found: String,
    /// Remedy. `None` if the check succeeded.
    advice: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, status: CheckStatus::Ok, found: found.into(), advice: None }
    }

    fn warn(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { name, status: CheckStatus::Warn, found: found.into(), advice: Some(advice.into()) }
    }

    fn fail(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { status: CheckStatus::Fail, ..Self::warn(name, found, advice) }
    }
}

/// Runs all checks, and prints them. The exit code is 1 if one fails.
pub(crate) fn run(args: &DoctorArgs, as_json: bool) -> Result<ExitCode, CliError> {
    #[derive(Serialize)]
    struct Report {
        ok: bool,
        checks: Vec<Check>,
    }
    let gpus = Gpus::find();
    let mut checks = vec![
        check_processor(),
        check_functions(),
        check_memory(),
        check_huge_pages(),
        check_control_groups(),
        check_open_files(),
        check_disk(args.source.as_ref().and_then(|source| source.model_cache.as_deref())),
        check_runtime_folder(),
        check_gpu(gpus.as_ref()),
        check_libtorch(gpus.as_ref()),
        check_cluster(),
    ];
    if let Some(source) = &args.source {
        checks.push(check_model(source)?);
    }
    let ok = checks.iter().all(|check| check.status != CheckStatus::Fail);
    let report = Report { ok, checks };
    match as_json {
        true => json::print(&report)?,
        false => print_checks(&report.checks)?,
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print_checks(checks: &[Check]) -> Result<(), CliError> {
    let mut out = anstream::stdout().lock();
    let widest = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    for check in checks {
        let (word, colour) = match check.status {
            CheckStatus::Ok => ("ok  ", AnsiColor::Green),
            CheckStatus::Warn => ("warn", AnsiColor::Yellow),
            CheckStatus::Fail => ("fail", AnsiColor::Red),
        };
        let style = colour.on_default().bold();
        writeln!(out, "{style}{word}{style:#}  {:widest$}  {}", check.name, check.found)?;
        if let Some(advice) = &check.advice {
            writeln!(out, "      {:widest$}  -> {advice}", "")?;
        }
    }
    Ok(())
}

fn check_processor() -> Check {
    let paths = InstructionPath::available();
    let names: Vec<String> = paths.iter().map(ToString::to_string).collect();
    let classes = NumericsClass::ALL.map(NumericsClass::name).join(", ");
    let found = format!(
        "{}, {} cores; instruction paths {}; numerics {classes}",
        machine::cpu(),
        machine::cores(),
        names.join(", ")
    );
    let wrong: Vec<String> =
        wrong_paths(&NumericsClass::ALL).iter().map(|(path, class)| format!("{path} in {class}")).collect();
    if !wrong.is_empty() {
        let advice =
            "Remoe does not use these paths; hide the instructions in the virtual machine to be sure";
        return Check::warn("processor", format!("{found}; wrong results on {}", wrong.join(", ")), advice);
    }
    match paths.as_slice() {
        [InstructionPath::Portable] => {
            let advice = "use a CPU with AVX2 and FMA, or AVX-512: experts run many times faster";
            Check::warn("processor", found, advice)
        }
        _ => Check::ok("processor", found),
    }
}

fn check_functions() -> Check {
    match programs::find(Some(Backend::Native), CPU) {
        Ok(programs) => {
            Check::ok("functions", format!("{}, {}", programs.main.display(), programs.remote.display()))
        }
        Err(error) => Check::fail(
            "functions",
            error.message,
            "run `make build`: it builds all programs into one folder",
        ),
    }
}

fn check_memory() -> Check {
    let (total, free) = (machine::memory_bytes(), machine::free_memory_bytes());
    let found = format!("{} of {} available", table::bytes(free), table::bytes(total));
    match free {
        free if free < LOW_MEMORY_BYTES => {
            Check::warn("memory", found, "stop other processes, or serve a smaller model")
        }
        _ => Check::ok("memory", found),
    }
}

fn check_huge_pages() -> Check {
    let text = std::fs::read_to_string(HUGE_PAGES_FILE).unwrap_or_default();
    let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(chosen, _)| chosen);
    match chosen {
        Some(chosen @ ("always" | "madvise")) => Check::ok("huge pages", format!("transparent, by {chosen}")),
        _ => Check::warn(
            "huge pages",
            chosen.map_or_else(
                || "not supported by the kernel".to_owned(),
                |chosen| format!("transparent: {chosen}"),
            ),
            format!("enable huge pages to load experts faster: echo madvise | sudo tee {HUGE_PAGES_FILE}"),
        ),
    }
}

fn check_control_groups() -> Check {
    match Cgroups::find() {
        Ok(cgroups) => Check::ok("control groups", format!("{}, limits enforced", cgroups.version())),
        Err(error) => Check::warn(
            "control groups",
            error.to_string(),
            "memory and CPU limits of functions are not enforced; run `remoe` as root, or under \
             `systemd-run --user --scope -p Delegate=yes`",
        ),
    }
}

fn check_open_files() -> Check {
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit < LOW_FILE_LIMIT => Check::warn(
            "open files",
            format!("at most {limit}"),
            format!("raise the limit for all gateway connections: ulimit -n {LOW_FILE_LIMIT}"),
        ),
        limit => {
            Check::ok("open files", limit.map_or("no limit".to_owned(), |limit| format!("at most {limit}")))
        }
    }
}

fn check_disk(given: Option<&Path>) -> Check {
    let name = "disk";
    let cache = match cache_folder(given) {
        Ok(cache) => cache,
        Err(error) => return Check::warn(name, error.to_string(), "set REMOE_MODEL_CACHE to a folder"),
    };
    // The cache folder is created by the first fetch: checks the nearest existing parent.
    let existing = cache.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("/"));
    let free = match statvfs(existing) {
        Ok(stats) => stats.f_bavail.saturating_mul(stats.f_frsize),
        Err(error) => {
            return Check::warn(
                name,
                format!("{}: {error}", existing.display()),
                "set REMOE_MODEL_CACHE to another folder",
            );
        }
    };
    if let Err(error) = access(existing, Access::WRITE_OK) {
        let found = format!("cannot write to {}: {error}", existing.display());
        return Check::warn(name, found, "set REMOE_MODEL_CACHE to another folder");
    }
    let found = format!("{} free for fetched models in {}", table::bytes(free), cache.display());
    match free {
        free if free < LOW_DISK_BYTES => {
            Check::warn(name, found, "free disk space, or set REMOE_MODEL_CACHE to a folder on a larger disk")
        }
        _ => Check::ok(name, found),
    }
}

fn check_runtime_folder() -> Check {
    match running_commands::list() {
        Ok(running) => Check::ok("runtime folder", format!("usable; running deployments: {}", running.len())),
        Err(error) => Check::warn("runtime folder", error.message, "fix it for `remoe ps` and `remoe stop`"),
    }
}

fn check_gpu(gpus: Option<&Gpus>) -> Check {
    let name = "GPU";
    let Some(gpus) = gpus else { return Check::ok(name, "none; models run on the CPU") };
    let driver = gpus.driver.as_ref().map_or_else(
        || "NVIDIA driver of unknown version".to_owned(),
        |version| format!("NVIDIA driver {version}"),
    );
    match gpu::query_devices() {
        Ok(found) if !found.is_empty() => {
            let devices = found.iter().map(|gpu| {
                format!(
                    "{}, compute capability {}, {}",
                    gpu.name,
                    gpu.capability,
                    table::bytes(gpu.memory_bytes)
                )
            });
            Check::ok(name, format!("{}; {driver}", devices.collect::<Vec<_>>().join("; ")))
        }
        found => {
            let problem = found.err().unwrap_or_else(|| "nvidia-smi lists no GPU".to_owned());
            let model = gpus.model().map_or_else(String::new, |model| format!("{model}; "));
            Check::warn(
                name,
                format!("{model}{driver}; compute capability unknown: {problem}"),
                "check the driver with nvidia-smi",
            )
        }
    }
}

fn check_libtorch(gpus: Option<&Gpus>) -> Check {
    let name = "LibTorch";
    let Ok(programs) = programs::find(Some(Backend::Torch), CPU) else {
        let found = format!("{} is not built", programs::TORCH);
        return match gpus {
            Some(_) => Check::warn(name, found, "run `make build CUDA=1`; without it the GPU is not used"),
            None => Check::ok(name, format!("{found}; needed for GPUs only")),
        };
    };
    let libtorch = match LibTorch::find(&programs.main) {
        Ok(libtorch) => libtorch,
        Err(why) => {
            let advice = "add the LibTorch of the build to the path of the dynamic linker, or rebuild";
            return Check::warn(name, format!("{}: {why}", programs::TORCH), advice);
        }
    };
    let version = libtorch.version.as_ref().map_or_else(String::new, |version| format!(" {version}"));
    let kind = match libtorch.cuda_major.filter(|_| libtorch.has_cuda) {
        Some(major) => format!("for GPUs with CUDA {major}"),
        None if libtorch.has_cuda => "for GPUs".to_owned(),
        None => "for CPUs".to_owned(),
    };
    let found = format!("LibTorch{version} {kind}, in {}", libtorch.folder.display());
    match gpus.map(|gpus| device::check_libtorch(&libtorch, gpus)) {
        None | Some(Ok(())) => Check::ok(name, found),
        Some(Err(why)) => Check::warn(name, found, format!("the GPU is not used: {why}")),
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct KubeConfig {
    current_context: Option<String>,
    #[serde(default)]
    contexts: Vec<NamedContext>,
    #[serde(default)]
    clusters: Vec<NamedCluster>,
}

#[derive(Deserialize)]
struct NamedContext {
    name: String,
    context: KubeContext,
}

#[derive(Deserialize)]
struct KubeContext {
    cluster: String,
}

#[derive(Deserialize)]
struct NamedCluster {
    name: String,
    cluster: KubeCluster,
}

#[derive(Deserialize)]
struct KubeCluster {
    server: String,
}

impl KubeConfig {
    /// Returns the URL of the current context's API server.
    fn server(&self) -> Option<&str> {
        let context_name = self.current_context.as_deref()?;
        let context = self.contexts.iter().find(|context| context.name == context_name)?;
        let cluster = self.clusters.iter().find(|cluster| cluster.name == context.context.cluster)?;
        Some(&cluster.cluster.server)
    }
}

fn check_cluster() -> Check {
    let name = "cluster";
    let files = std::env::var_os("KUBECONFIG").filter(|value| !value.is_empty());
    let files: Vec<PathBuf> = match &files {
        Some(files) => std::env::split_paths(files).collect(),
        None => std::env::home_dir().map(|home| home.join(".kube/config")).into_iter().collect(),
    };
    let Some((file, text)) =
        files.into_iter().find_map(|file| Some((file.clone(), std::fs::read_to_string(file).ok()?)))
    else {
        return Check::ok(name, "not configured; needed for MoEDeployments only");
    };
    let server =
        serde_yaml::from_str::<KubeConfig>(&text).ok().and_then(|config| config.server().map(str::to_owned));
    let Some(server) = server else {
        let found = format!("missing server of the current context in {}", file.display());
        return Check::warn(name, found, "choose a context: kubectl config use-context NAME");
    };
    match check_reachable(&server) {
        Ok(()) => Check::ok(name, format!("{server} reachable ({})", file.display())),
        Err(problem) => {
            let found = format!("cannot reach {server}: {problem}");
            Check::warn(name, found, format!("check the network and {}", file.display()))
        }
    }
}

/// Tries to connect to the host of a URL.
fn check_reachable(server: &str) -> Result<(), String> {
    let uri: axum::http::Uri = server.parse().map_err(|_| "invalid URL".to_owned())?;
    let host = uri.host().ok_or("missing host")?.trim_matches(['[', ']']);
    let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("http") { 80 } else { 443 });
    let mut addresses = (host, port).to_socket_addrs().map_err(|error| error.to_string())?;
    let address = addresses.next().ok_or("host name does not resolve")?;
    TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).map(drop).map_err(|error| error.to_string())
}

fn check_model(source: &ModelArgs) -> Result<Check, CliError> {
    let inspection = source.open()?.checkpoint.inspect()?;
    let needed = inspection.decoded().total_bytes;
    let (total, free) = (machine::memory_bytes(), machine::free_memory_bytes());
    let found = format!(
        "{}: {} of weights, {} of memory available",
        source.model.name(),
        table::bytes(needed),
        table::bytes(free)
    );
    Ok(match needed {
        needed if needed > total => Check::fail(
            "model",
            found,
            "the model does not fit this machine; `remoe plan MODEL --nodes FILE` finds nodes for it",
        ),
        needed if needed > free => Check::warn("model", found, "stop other processes"),
        _ => Check::ok("model", found),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn server_is_from_the_current_context() {
        let text = "current-context: b\ncontexts:\n- {name: a, context: {cluster: one}}\n- {name: b, context: {cluster: two, user: me}}\n\
                    clusters:\n- {name: one, cluster: {server: https://one}}\n- {name: two, cluster: {server: 'https://two:6443'}}\n";
        let config: KubeConfig = serde_yaml::from_str(text).unwrap();
        assert_eq!(config.server(), Some("https://two:6443"));
        assert!(check_reachable("no url at all").is_err());
    }
}
