//! `remoe doctor`: what this machine has for serving models, and what to do about what is missing.

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

/// Free memory and disk below which little can be served, in bytes.
const LITTLE_MEMORY: u64 = 1 << 30;
const LITTLE_DISK: u64 = 10_000_000_000;
/// Open files that the gateway's connections take, and some.
const FILES: u64 = 1024;
/// Timeout for connecting to a cluster.
const CONNECT: Duration = Duration::from_secs(2);

const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// It serves, but worse than it could.
    Warn,
    /// It does not serve.
    Fail,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    status: Verdict,
    found: String,
    /// Advice on what to do.
    advice: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, status: Verdict::Ok, found: found.into(), advice: None }
    }

    fn warn(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { name, status: Verdict::Warn, found: found.into(), advice: Some(advice.into()) }
    }

    fn fail(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { status: Verdict::Fail, ..Self::warn(name, found, advice) }
    }
}

/// Looks at everything; 1 where something fails.
pub(crate) fn run(args: &DoctorArgs, as_json: bool) -> Result<ExitCode, CliError> {
    #[derive(Serialize)]
    struct Report {
        ok: bool,
        checks: Vec<Check>,
    }
    let gpus = Gpus::find();
    let mut checks = vec![
        processor(),
        functions(),
        memory(),
        huge_pages(),
        control_groups(),
        open_files(),
        disk(args.source.as_ref().and_then(|source| source.model_cache.as_deref())),
        runtime_folder(),
        gpu(gpus.as_ref()),
        libtorch(gpus.as_ref()),
        cluster(),
    ];
    if let Some(source) = &args.source {
        checks.push(model(source)?);
    }
    let ok = checks.iter().all(|check| check.status != Verdict::Fail);
    let report = Report { ok, checks };
    match as_json {
        true => json::print(&report)?,
        false => show(&report.checks)?,
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn show(checks: &[Check]) -> Result<(), CliError> {
    let mut out = anstream::stdout().lock();
    let widest = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    for check in checks {
        let (word, colour) = match check.status {
            Verdict::Ok => ("ok  ", AnsiColor::Green),
            Verdict::Warn => ("warn", AnsiColor::Yellow),
            Verdict::Fail => ("fail", AnsiColor::Red),
        };
        let style = colour.on_default().bold();
        writeln!(out, "{style}{word}{style:#}  {:widest$}  {}", check.name, check.found)?;
        if let Some(advice) = &check.advice {
            writeln!(out, "      {:widest$}  -> {advice}", "")?;
        }
    }
    Ok(())
}

fn processor() -> Check {
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

fn functions() -> Check {
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

fn memory() -> Check {
    let (whole, free) = (machine::memory_bytes(), machine::free_memory_bytes());
    let found = format!("{} of {} available", table::bytes(free), table::bytes(whole));
    match free {
        free if free < LITTLE_MEMORY => {
            Check::warn("memory", found, "stop other processes, or serve a smaller model")
        }
        _ => Check::ok("memory", found),
    }
}

fn huge_pages() -> Check {
    let text = std::fs::read_to_string(HUGE_PAGES).unwrap_or_default();
    let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(chosen, _)| chosen);
    match chosen {
        Some(chosen @ ("always" | "madvise")) => Check::ok("huge pages", format!("transparent, by {chosen}")),
        _ => Check::warn(
            "huge pages",
            chosen.map_or_else(
                || "not supported by the kernel".to_owned(),
                |chosen| format!("transparent: {chosen}"),
            ),
            format!("enable huge pages to load experts faster: echo madvise | sudo tee {HUGE_PAGES}"),
        ),
    }
}

fn control_groups() -> Check {
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

fn open_files() -> Check {
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit < FILES => Check::warn(
            "open files",
            format!("at most {limit}"),
            format!("raise the limit for all gateway connections: ulimit -n {FILES}"),
        ),
        limit => {
            Check::ok("open files", limit.map_or("no limit".to_owned(), |limit| format!("at most {limit}")))
        }
    }
}

fn disk(given: Option<&Path>) -> Check {
    let name = "disk";
    let cache = match cache_folder(given) {
        Ok(cache) => cache,
        Err(error) => return Check::warn(name, error.to_string(), "set REMOE_MODEL_CACHE to a folder"),
    };
    // The folder is made when something is fetched.
    let there = cache.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("/"));
    let free = match statvfs(there) {
        Ok(facts) => facts.f_bavail.saturating_mul(facts.f_frsize),
        Err(error) => {
            return Check::warn(
                name,
                format!("{}: {error}", there.display()),
                "set REMOE_MODEL_CACHE to another folder",
            );
        }
    };
    if let Err(error) = access(there, Access::WRITE_OK) {
        let found = format!("cannot write to {}: {error}", there.display());
        return Check::warn(name, found, "set REMOE_MODEL_CACHE to another folder");
    }
    let found = format!("{} free for fetched models in {}", table::bytes(free), cache.display());
    match free {
        free if free < LITTLE_DISK => {
            Check::warn(name, found, "free disk space, or set REMOE_MODEL_CACHE to a folder on a larger disk")
        }
        _ => Check::ok(name, found),
    }
}

fn runtime_folder() -> Check {
    match running_commands::list() {
        Ok(running) => Check::ok("runtime folder", format!("usable; running deployments: {}", running.len())),
        Err(error) => Check::warn("runtime folder", error.message, "fix it for `remoe ps` and `remoe stop`"),
    }
}

fn gpu(gpus: Option<&Gpus>) -> Check {
    let name = "GPU";
    let Some(gpus) = gpus else { return Check::ok(name, "none; models run on the CPU") };
    let driver = gpus.driver.as_ref().map_or_else(
        || "NVIDIA driver of unknown version".to_owned(),
        |version| format!("NVIDIA driver {version}"),
    );
    match gpu::query_devices() {
        Ok(found) if !found.is_empty() => {
            let each = found.iter().map(|gpu| {
                format!(
                    "{}, compute capability {}, {}",
                    gpu.name,
                    gpu.capability,
                    table::bytes(gpu.memory_bytes)
                )
            });
            Check::ok(name, format!("{}; {driver}", each.collect::<Vec<_>>().join("; ")))
        }
        found => {
            let why = found.err().unwrap_or_else(|| "nvidia-smi lists no GPU".to_owned());
            let named = gpus.model().map_or_else(String::new, |model| format!("{model}; "));
            Check::warn(
                name,
                format!("{named}{driver}; compute capability unknown: {why}"),
                "check the driver with nvidia-smi",
            )
        }
    }
}

fn libtorch(gpus: Option<&Gpus>) -> Check {
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
    /// URL of the API server that `kubectl` would speak to.
    fn server(&self) -> Option<&str> {
        let wanted = self.current_context.as_deref()?;
        let context = self.contexts.iter().find(|context| context.name == wanted)?;
        let cluster = self.clusters.iter().find(|cluster| cluster.name == context.context.cluster)?;
        Some(&cluster.cluster.server)
    }
}

fn cluster() -> Check {
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
    match reach(&server) {
        Ok(()) => Check::ok(name, format!("{server} reachable ({})", file.display())),
        Err(problem) => {
            let found = format!("cannot reach {server}: {problem}");
            Check::warn(name, found, format!("check the network and {}", file.display()))
        }
    }
}

/// Connects to the host of a URL.
fn reach(server: &str) -> Result<(), String> {
    let uri: axum::http::Uri = server.parse().map_err(|_| "invalid URL".to_owned())?;
    let host = uri.host().ok_or("missing host")?.trim_matches(['[', ']']);
    let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("http") { 80 } else { 443 });
    let mut addresses = (host, port).to_socket_addrs().map_err(|error| error.to_string())?;
    let address = addresses.next().ok_or("host name does not resolve")?;
    TcpStream::connect_timeout(&address, CONNECT).map(drop).map_err(|error| error.to_string())
}

fn model(source: &ModelArgs) -> Result<Check, CliError> {
    let facts = source.open()?.checkpoint.inspect()?;
    let needed = facts.decoded().total_bytes;
    let (whole, free) = (machine::memory_bytes(), machine::free_memory_bytes());
    let found = format!(
        "{}: {} of weights, {} of memory available",
        source.model.name(),
        table::bytes(needed),
        table::bytes(free)
    );
    Ok(match needed {
        needed if needed > whole => Check::fail(
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
    fn the_server_is_that_of_the_current_context() {
        let text = "current-context: b\ncontexts:\n- {name: a, context: {cluster: one}}\n- {name: b, context: {cluster: two, user: me}}\n\
                    clusters:\n- {name: one, cluster: {server: https://one}}\n- {name: two, cluster: {server: 'https://two:6443'}}\n";
        let config: KubeConfig = serde_yaml::from_str(text).unwrap();
        assert_eq!(config.server(), Some("https://two:6443"));
        assert!(reach("no url at all").is_err());
    }
}
