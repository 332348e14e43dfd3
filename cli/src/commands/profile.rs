//! `remoe profile`: measures the hardware profile of this machine for a model.

use crate::device::MainDevice;
use crate::exit::CliError;
use crate::flags::{Backend, Dtype, check_experts_dtype, default_dtype, device};
use crate::output::plot::{Axis, Lines, Series};
use crate::output::progress::{Progress, print_warning};
use crate::output::{folders, json, table};
use crate::profiling::{
    BelowOne, Gate, OnDevice, ProfileRequest, doubts, measure, save, save_to, write_atomically,
};
use crate::signals::TerminationSignals;
use remoe_hardware::{CpuLimit, Profile};
use remoe_hub::ModelArgs;
use remoe_model::{DenseDtype, ExpertsDtype};
use remoe_planner::{Contention, seconds};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

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
    /// Device of the main function: cpu, cuda or cuda:INDEX [default: cuda if available]
    #[arg(long, value_parser = device)]
    device: Option<String>,
    /// Assume the times of the device instead of measuring them: it is in use, or not there
    #[arg(long, requires = "out")]
    assume_device: bool,
    /// Backend of the main function [default: torch on cuda, native on CPUs]
    #[arg(long, value_enum, env = "REMOE_BACKEND")]
    backend: Option<Backend>,
    /// Measure the network to the remote function at HOST:PORT. It must host the first experts of the model, by layer
    /// and id: at least 8 of them and 256 MiB
    #[arg(long, value_name = "HOST:PORT")]
    address: Option<String>,
}

/// Measures a profile, saves it, and prints it.
pub(crate) async fn run(args: &ProfileArgs, as_json: bool, progress: &Arc<Progress>) -> Result<(), CliError> {
    for (flag, path) in [("--out", &args.out), ("--plot", &args.plot)] {
        path.iter().try_for_each(|path| folders::require_writable(flag, path))?;
    }
    let opened = args.source.open()?;
    let experts_dtype = args.experts_dtype;
    check_experts_dtype(&opened.checkpoint, experts_dtype, args.dtype)?;
    let device = MainDevice::resolve(args.device.as_deref(), args.backend);
    let inspection = opened.checkpoint.inspect()?.kept_as(experts_dtype, args.dense_dtype, &device.name);
    let dtype = args.dtype.map_or_else(|| default_dtype(&inspection), |dtype| dtype.name());
    let measurement = remoe_profiler::ProfileRequest {
        source: args.source.pinned(&opened),
        inspection,
        dtype: dtype.to_owned(),
        device: device.name,
        gpu: device.gpu,
        on_device: if args.assume_device { OnDevice::Assume } else { OnDevice::Measure },
        quick: args.quick,
        address: args.address.clone(),
        below_one: BelowOne { main: true, remote: true },
    };
    let request = ProfileRequest { measurement, backend: args.backend };
    let started = Instant::now();
    let mut signals = TerminationSignals::listen()?;
    let profile = tokio::select! {
        profile = measure(request, Gate::new(true), progress) => profile?,
        // When the runtime is dropped, the functions of the measurement end.
        () = signals.next() => return Err(CliError::interrupted()),
    };
    let path = match &args.out {
        Some(path) => save_to(&profile, path).map(|()| path.clone()),
        None => save(&profile),
    }?;
    doubts(&profile).iter().for_each(|doubt| print_warning(doubt));
    if let Some(path) = &args.plot {
        write_atomically(path, plot(&profile).as_bytes())?;
    }
    if as_json {
        return Ok(json::print(&profile)?);
    }
    progress.line(&to_text(&profile));
    progress.line(&format!("\nwritten to {} after {:.0} s", path.display(), started.elapsed().as_secs_f64()));
    Ok(())
}

/// Plots the time of one expert over vCPUs, with the fitted curve (Remoe paper, figure 6).
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
        let vcpus_at = |part: u32| first + (last - first) * f64::from(part) / 40.0;
        let points = (0..=40).map(|part| (vcpus_at(part), fit.seconds(vcpus_at(part)) * 1e3)).collect();
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

/// Formats the device of the main function, and notes if its times are assumed.
fn device_text(profile: &Profile) -> String {
    let gpu = profile.machine.gpu.as_ref().map_or_else(String::new, |gpu| format!(", {gpu}"));
    let is_assumed = profile.device.is_some_and(|device| device.assumed);
    format!("{}{gpu}{}", profile.machine.device, if is_assumed { ", times assumed" } else { "" })
}

fn to_text(profile: &Profile) -> String {
    let micros = |seconds: f64| format!("{:.1} us", seconds * 1e6);
    let mut text = table::of_pairs(&[
        ("machine", format!("{}, {} cores", profile.machine.cpu, profile.machine.cores)),
        ("device", device_text(profile)),
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
