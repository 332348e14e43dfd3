//! `remoe profile`: what this machine takes to run a model.

mod functions;
mod gate;
mod grid;
mod in_use;
mod lines;
mod main_function;
mod remote;

use crate::args::{Backend, Dtype};
use crate::exit::CliError;
use crate::machine::{self, CpuTimes};
use crate::output::plot::{Axis, Lines, Series};
use crate::output::progress::{Progress, print_warning};
use crate::output::{folders, json, table};
use crate::planning::RemoteArg;
use crate::signals::EndSignals;
use functions::Functions;
pub(crate) use gate::{Counts, Gate};
use grid::Grid;
use main_function::MainSetup;
use remoe_fetch::ModelArgs;
use remoe_function::Role;
use remoe_model::{Checkpoint, DenseDtype, ExpertsDtype, Inspection, StoredDtype};
use remoe_planner::{Contention, Fit, Problem, SizeRange, Specs, VcpuRange, seconds};
use remoe_profile::{CpuLimit, Kernels, Machine, Made, Memory, ModelId, Origin, Profile, Starts};
use remote::RemoteSetup;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a function works before anything counts, at least: at first weights are where they have never been read, and instruction paths take turns in them.
const WARMING: Duration = Duration::from_millis(300);
/// Share of the CPU time that other programs may take before figures are not trusted.
const DISTURBED: f64 = 0.1;
/// Bytes that a main function under measurement takes beside its weights, with remote experts beside those.
const BESIDE_WEIGHTS: u64 = 500 << 20;

/// Arguments of `remoe profile`.
#[derive(Debug, clap::Args)]
pub(crate) struct ProfileArgs {
    #[command(flatten)]
    source: ModelArgs,
    /// Output file [default: a file for this model and machine in the cache folder]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Plot expert time over vCPUs, with the fit, into this SVG file
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Measure fewer points, in a third of the time: half a minute for a small model, minutes for a large one
    #[arg(long)]
    quick: bool,
    /// Compute dtype [default: that of the checkpoint]
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<Dtype>,
    /// Quantise routed experts to int8, int4 or mxfp4 at load time, or keep stored fp8 experts
    /// [default: the compute dtype]
    #[arg(long, value_name = "int8|int4|mxfp4|fp8")]
    experts_dtype: Option<ExpertsDtype>,
    /// Dtype of all weights but routed experts (embedding, attention, dense layers, shared experts, head): int8 or int4
    /// on CPUs, or the compute dtype [default: int8 on CPUs if --experts-dtype is int8, int4 or mxfp4, else the compute
    /// dtype]
    #[arg(long, value_name = "int8|int4|bfloat16|float32")]
    dense_dtype: Option<DenseDtype>,
    /// Device of the main function: cpu, cuda or cuda:INDEX. Other commands use cuda if available, `profile` only if
    /// this flag says so
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Backend of the main function [default: torch on cuda, native on CPUs]
    #[arg(long, value_enum, env = "REMOE_BACKEND")]
    backend: Option<Backend>,
    /// Measure the network to the remote function at HOST:PORT. It must host the first experts of the model, by layer
    /// and id: at least 8 of them and 256 MiB
    #[arg(long, value_name = "HOST:PORT")]
    address: Option<String>,
}

/// Measures, writes the profile and shows it.
pub(crate) async fn run(args: &ProfileArgs, as_json: bool, progress: &Arc<Progress>) -> Result<(), CliError> {
    for (flag, path) in [("--out", &args.out), ("--plot", &args.plot)] {
        path.iter().try_for_each(|path| folders::require_writable(flag, path))?;
    }
    let opened = args.source.open()?;
    let experts_dtype = args.experts_dtype;
    check_experts_dtype(&opened.checkpoint, experts_dtype, args.dtype)?;
    let inspection = opened.checkpoint.inspect()?.kept_as(experts_dtype, args.dense_dtype, &args.device);
    let dtype = args.dtype.map_or_else(|| default_dtype(&inspection), |dtype| dtype.name());
    let request = Request {
        source: args.source.pinned(&opened),
        inspection,
        dtype: dtype.to_owned(),
        device: args.device.clone(),
        backend: args.backend,
        quick: args.quick,
        address: args.address.clone(),
        below_one: BelowOne { main: true, remote: true },
    };
    let started = Instant::now();
    let mut signals = EndSignals::catch()?;
    let profile = tokio::select! {
        profile = measure(request, Gate::new(true), progress) => profile?,
        // The functions of the measurement end with the runtime, and with them what they were given.
        () = signals.next() => return Err(CliError::interrupted()),
    };
    let path = match &args.out {
        Some(path) => store(&profile, path).map(|()| path.clone()),
        None => keep(&profile),
    }?;
    doubts(&profile).iter().for_each(|doubt| print_warning(doubt));
    if let Some(path) = &args.plot {
        write(path, plot(&profile).as_bytes())?;
    }
    if as_json {
        return Ok(json::print(&profile)?);
    }
    progress.line(&for_people(&profile));
    progress.line(&format!("\nwritten to {} after {:.0} s", path.display(), started.elapsed().as_secs_f64()));
    Ok(())
}

/// What is to be measured.
pub(crate) struct Request {
    pub(crate) source: ModelArgs,
    pub(crate) inspection: Inspection,
    pub(crate) dtype: String,
    pub(crate) device: String,
    pub(crate) backend: Option<Backend>,
    pub(crate) quick: bool,
    pub(crate) address: Option<String>,
    pub(crate) below_one: BelowOne,
}

/// Functions that plans may give less than one vCPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BelowOne {
    pub(crate) main: bool,
    pub(crate) remote: bool,
}

impl BelowOne {
    /// Returns the roles that plans for `problem` with this use of remote experts may give less than one vCPU.
    pub(crate) fn of(problem: &Problem, remote: RemoteArg) -> Self {
        let Specs { main, remote: apart, main_vcpus, remote_vcpus } = problem.specs;
        let below = |bytes: SizeRange, vcpus: Option<VcpuRange>| {
            vcpus.map_or(bytes.min_bytes / problem.pricing.vcpu_bytes(), |vcpus| vcpus.min) < 1.0
        };
        Self {
            main: below(main, main_vcpus),
            remote: remote != RemoteArg::Never && below(apart, remote_vcpus),
        }
    }
}

/// Measures a profile on this machine while `gate` is open.
pub(crate) async fn measure(
    request: Request,
    gate: Arc<Gate>,
    progress: &Arc<Progress>,
) -> Result<Profile, CliError> {
    let progress = progress.clone();
    let measured = tokio::task::spawn_blocking(move || measure_blocking(&request, gate, &progress)).await;
    measured.map_err(|error| CliError::runtime(format!("cannot measure: {error}")))?
}

/// Reasons to measure again, for people; none where a profile looks sound.
pub(crate) fn doubts(profile: &Profile) -> Vec<String> {
    let busy = profile.disturbed.map(|share| {
        format!(
            "other programs used {:.0} % of the CPUs during the measurements; measure again on an idle machine",
            100.0 * share
        )
    });
    let slower = profile.slower_with_more_vcpus().map(|slower| format!("unexpected measurement: {slower}"));
    busy.into_iter().chain(slower).collect()
}

/// Memory that measuring takes beside what runs, in bytes: a whole model, or copies of some of its experts.
pub(crate) fn memory_needed(inspection: &Inspection, dtype: &str) -> u64 {
    inspection
        .resident_total_bytes(dtype)
        .saturating_add(remote::COPIES_BYTES as u64)
        .saturating_add(BESIDE_WEIGHTS)
}

fn measure_blocking(
    request: &Request,
    gate: Arc<Gate>,
    progress: &Arc<Progress>,
) -> Result<Profile, CliError> {
    let Request { source, inspection, dtype, device, backend, quick, address, below_one } = request;
    if inspection.moe_layers.is_empty() {
        let message = format!("cannot profile family {}: no routed experts", inspection.family);
        return Err(CliError::arguments("--model", message));
    }
    let functions = Functions::new(progress, machine::memory_bytes().max(1 << 30), *backend, device, gate)?;
    let grid = Grid::new(machine::cores(), *quick, inspection.served_context());
    let step = |what: String| progress.doing(what);
    let subject =
        Subject { functions: &functions, source, inspection, dtype, grid: &grid, below_one: *below_one };
    progress.expect(steps(&subject, device, address.is_some()));
    let before = CpuTimes::now();
    let remote = RemoteSetup { subject: &subject, address: address.as_deref() }.measure(&step)?;
    let last = remote.expert_seconds.vcpus.len() - 1;
    let alone = remote.expert_seconds.seconds.iter().map(|row| row[last]).collect();
    let main = MainSetup { subject: &subject, device, alone }.measure(&step)?;
    let others = before.zip(CpuTimes::now()).map(|(before, after)| after.others_since(&before));
    progress.clear();
    let mut transport = remote.transport;
    // What a call computes is known by itself, and sending is part of it; a difference of decode steps has all their noise.
    let computed = Some(transport.main_cpu_seconds).filter(|seconds| *seconds > 0.0);
    transport.send_seconds = computed.map_or(main.call.send, |most| main.call.send.min(most));
    if address.is_none() {
        // As the main function sees a call: it sleeps and wakes, and drives its connections itself.
        let per_expert = remote.expert_seconds.seconds.first().map_or(0.0, |row| row[0]);
        let rows = (1 + inspection.top_k) as f64 * subject.resident(inspection.token_bytes);
        let known = inspection.top_k as f64 * per_expert + rows / transport.bytes_per_second;
        transport.invoke_seconds = (main.call.wait - known).max(0.0);
    }
    let one_token: Vec<f64> = remote.expert_seconds.seconds.first().cloned().unwrap_or_default();
    Ok(Profile {
        version: 1,
        origin: Origin::Measured,
        made: Made { date: crate::machine::now(), version: env!("CARGO_PKG_VERSION").to_owned() },
        machine: Machine {
            cpu: machine::cpu(),
            cores: grid.cores,
            memory_bytes: machine::memory_bytes(),
            device: device.clone(),
            vcpus_by: if functions.quotas { CpuLimit::Quota } else { CpuLimit::Threads },
        },
        model: ModelId::of(inspection, dtype),
        kernels: Kernels { numerics_class: remote.numerics_class, instruction_path: remote.instruction_path },
        // 1 GB comes with one vCPU.
        fit: Fit::of(&remote.expert_seconds.vcpus, &one_token),
        expert_seconds: main.expert_seconds,
        remote_expert_seconds: Some(remote.expert_seconds),
        gpu_expert_seconds: None,
        nonexpert_seconds: main.nonexpert_seconds,
        context_seconds: Some(main.context_seconds),
        device: main.device,
        transport,
        contention: remote.contention,
        starts: Starts { main: main.start, remote: remote.start },
        memory: Memory { main_bytes: main.main_bytes, function_bytes: remote.function_bytes.max(0.0) },
        disturbed: others.filter(|share| *share > DISTURBED),
    })
}

/// How many steps [`RemoteSetup::measure`] and [`MainSetup::measure`] announce together.
fn steps(subject: &Subject<'_>, device: &str, elsewhere: bool) -> usize {
    // Each function starts and is then measured with every size.
    let of_role = |role: Role| {
        let groups = subject.grid.by_threads(subject.below_one(role));
        groups.len() + groups.iter().map(|(_, vcpus)| vcpus.len()).sum::<usize>()
    };
    let own_device = if device == "cpu" { 0 } else { 2 };
    // The overhead of a call and the way, another one where it was named, several functions at the same time, start
    // times; remote calls of the main function.
    of_role(Role::Remote) + of_role(Role::Main) + 2 + usize::from(elsewhere) + 2 + 1 + own_device
}

/// The dtype that functions compute in where nothing is said: the checkpoint's, float32 for float16.
pub(crate) fn default_dtype(inspection: &Inspection) -> &'static str {
    if inspection.dtype == "bfloat16" { "bfloat16" } else { "float32" }
}

/// Whether the experts of `checkpoint` can be kept as `experts` where the model computes in `dtype`, or in its own.
///
/// # Errors
/// They cannot: before anything is started, and in the words of the functions.
pub(crate) fn check_experts_dtype(
    checkpoint: &Checkpoint,
    experts: Option<ExpertsDtype>,
    dtype: Option<Dtype>,
) -> Result<(), CliError> {
    let computed_in = match dtype {
        Some(Dtype::Float32) => StoredDtype::F32,
        Some(Dtype::Bfloat16) => StoredDtype::Bf16,
        None => checkpoint.config().dtype,
    };
    Ok(checkpoint.check_experts_dtype(experts, computed_in)?)
}

/// What is measured, and where.
struct Subject<'a> {
    functions: &'a Functions,
    source: &'a ModelArgs,
    inspection: &'a Inspection,
    dtype: &'a str,
    grid: &'a Grid,
    below_one: BelowOne,
}

impl Subject<'_> {
    /// Returns true if functions of this role are measured with less than one vCPU.
    fn below_one(&self, role: Role) -> bool {
        self.functions.quotas
            && match role {
                Role::Main => self.below_one.main,
                Role::Remote => self.below_one.remote,
            }
    }

    /// `bytes` at rest as they are resident in the compute dtype.
    fn resident(&self, bytes: u64) -> f64 {
        self.inspection.resident_bytes(bytes, self.dtype) as f64
    }

    /// Bytes of so many experts, as they are resident.
    fn resident_experts(&self, count: usize) -> f64 {
        count as f64 * self.inspection.resident_expert_bytes(self.dtype) as f64
    }

    /// What functions are told about the types to compute in; the main one also [`Self::dense`].
    fn precision(&self) -> Vec<OsString> {
        let mut arguments = vec!["--dtype".into(), self.dtype.into()];
        if let Some(experts) = self.inspection.experts_dtype {
            arguments.extend(["--experts-dtype".into(), experts.name().into()]);
        }
        arguments
    }

    /// What a main function is told beside it.
    fn dense(&self) -> [OsString; 2] {
        let kept = self.inspection.dense_dtype.map_or(self.dtype, |quantised| quantised.name());
        ["--dense-dtype".into(), kept.into()]
    }
}

/// Where the profile of a model on this machine is kept.
pub(crate) fn default_path(model: &ModelId) -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let folder = cache.or_else(home).unwrap_or_else(std::env::temp_dir);
    let short = model.fingerprint.get(..16).unwrap_or(&model.fingerprint);
    folder.join("remoe").join("profiles").join(format!("{short}-{}.json", model.precision()))
}

/// Stores `profile` where it is looked for, and says where that is.
pub(crate) fn keep(profile: &Profile) -> Result<PathBuf, CliError> {
    let path = default_path(&profile.model);
    path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(|error| unwritten(&path, &error))?;
    store(profile, &path)?;
    Ok(path)
}

/// Stores `profile`, unless another process measured all of the model undisturbed in the meantime.
pub(crate) fn keep_unless_known(profile: &Profile) -> Result<(), CliError> {
    let known = std::fs::read_to_string(default_path(&profile.model)).ok();
    let known = known.and_then(|text| Profile::from_json(&text).ok());
    match known.filter(|known| known.disturbed.is_none() && known.made.date >= profile.made.date) {
        Some(_) => Ok(()),
        None => keep(profile).map(drop),
    }
}

fn store(profile: &Profile, path: &Path) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(profile)
        .map_err(|error| CliError::runtime(format!("cannot write the profile: {error}")))?;
    write(path, text.as_bytes())
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    // Others may read it meanwhile.
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    let written = std::fs::write(&partial, bytes).and_then(|()| std::fs::rename(&partial, path));
    written.map_err(|error| unwritten(path, &error))
}

fn unwritten(path: &Path, error: &std::io::Error) -> CliError {
    CliError {
        path: Some(path.to_owned()),
        ..CliError::runtime(format!("cannot write {}: {error}", path.display()))
    }
}

/// Expert time over vCPUs, measured and as the fit says (Remoe paper, figure 6).
fn plot(profile: &Profile) -> String {
    let table = profile.remote_expert_seconds.as_ref().unwrap_or(&profile.expert_seconds);
    let names: Vec<String> = table.tokens.iter().map(|tokens| format!("{tokens} tokens")).collect();
    let measured = names.iter().zip(&table.seconds).map(|(name, row)| Series {
        name: name.clone(),
        meaning: "",
        points: table.vcpus.iter().copied().zip(row.iter().map(|seconds| seconds * 1e3)).collect(),
    });
    let mut series: Vec<Series<'_>> = measured.collect();
    if let (Some(fit), Some(first), Some(last)) = (profile.fit, table.vcpus.first(), table.vcpus.last()) {
        let at = |part: u32| first + (last - first) * f64::from(part) / 40.0;
        let points = (0..=40).map(|part| (at(part), fit.seconds(at(part)) * 1e3)).collect();
        series.push(Series { name: "fit, 1 token".to_owned(), meaning: "", points });
    }
    Lines {
        title: "One expert in a remote function",
        subtitle: "measured for several numbers of tokens, with the curve fitted to one token",
        x: Axis { label: "memory (GB) and vCPUs", logarithmic: false },
        y: Axis { label: "milliseconds", logarithmic: true },
        series,
    }
    .svg()
}

fn for_people(profile: &Profile) -> String {
    let micros = |seconds: f64| format!("{:.1} us", seconds * 1e6);
    let mut text = table::of_pairs(&[
        ("machine", format!("{}, {} cores", profile.machine.cpu, profile.machine.cores)),
        ("kernels", format!("{}, {}", profile.kernels.instruction_path, profile.kernels.numerics_class)),
        (
            "vCPUs by",
            match profile.machine.vcpus_by {
                CpuLimit::Quota => "control group quotas".to_owned(),
                CpuLimit::Threads => "threads (no permission for CPU quotas)".to_owned(),
                CpuLimit::Assumed => "assumption".to_owned(),
            },
        ),
        (
            "a remote call",
            format!(
                "{} plus {} per MB, over {}",
                micros(profile.transport.invoke_seconds),
                micros(1e6 / profile.transport.bytes_per_second),
                profile.transport.over
            ),
        ),
        (
            "contention",
            profile.contention.map_or("not measured".to_owned(), |contention| {
                let Contention { functions, step, prefill } = contention;
                format!(
                    "slowdown of {functions} concurrent functions: decode {step:.2}, prefill {prefill:.2}"
                )
            }),
        ),
        (
            "starts",
            format!(
                "main {} plus {} per GB, remote {} plus {} per GB",
                seconds(profile.starts.main.process_seconds),
                seconds(1e9 / profile.starts.main.load_bytes_per_second),
                seconds(profile.starts.remote.process_seconds),
                seconds(1e9 / profile.starts.remote.load_bytes_per_second),
            ),
        ),
        (
            "memory besides weights",
            format!(
                "main {}, remote {}",
                table::bytes(profile.memory.main_bytes as u64),
                table::bytes(profile.memory.function_bytes as u64)
            ),
        ),
        (
            "fit over memory",
            profile.fit.map_or_else(
                || "none: more memory has no effect".to_owned(),
                |fit| {
                    format!(
                        "{} exp(-{:.2} GB) + {}, R² {:.3}",
                        seconds(fit.theta1),
                        fit.theta2,
                        seconds(fit.theta3),
                        fit.r2
                    )
                },
            ),
        ),
    ]);
    let remote = profile.remote_expert_seconds.as_ref();
    let tables = [
        ("one expert in a remote function", remote),
        ("one expert in the main function", Some(&profile.expert_seconds)),
        ("non-expert part", Some(&profile.nonexpert_seconds)),
        ("attention to the context of one request in a decode step", profile.context_seconds.as_ref()),
    ];
    for (name, figures) in tables {
        let Some(figures) = figures else { continue };
        let header: Vec<String> = std::iter::once("tokens".to_owned())
            .chain(figures.vcpus.iter().map(|vcpus| format!("{vcpus} vCPUs")))
            .collect();
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        let rows = figures.tokens.iter().zip(&figures.seconds).map(|(tokens, row)| {
            std::iter::once(tokens.to_string()).chain(row.iter().map(|value| seconds(*value))).collect()
        });
        text.push_str(&format!("\n\n{name}\n{}", table::with_header(&header, rows.collect())));
    }
    text
}
