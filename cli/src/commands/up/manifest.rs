//! Options of `up` from a MoEDeployment: each field sets the option that its flag would set. Flags of the user come first,
//! and fields that mean nothing on one machine are named.

use super::args::UpArgs;
use crate::exit::CliError;
use crate::flags::{Dtype, RemoteArg, device};
use crate::planning::{MOST_COUNT, share, size_range, vcpu_range};
use crate::resource::{
    IDLE_WINDOW, MainSpec, ModelSpec, PredictionSpec, Privacy, REPLAN_INTERVAL, Range, RemoteExpertsSpec,
    Replan, Resource, ScalingSpec, SloSpec, Spec, TPOT, TTFT, read_one, wrong_field, wrong_resource,
};
use clap::parser::ValueSource;
use clap::{ArgMatches, ValueEnum};
use remoe_hub::ModelLocation;
use remoe_model::ONE_GPU;
use remoe_planner::{SizeRange, VcpuRange};
use remoe_process::parse_duration;
use std::ffi::OsString;
use std::fmt::Display;
use std::path::Path;
use std::time::Duration;

/// Bytes of a field in MB.
const MB: f64 = 1e6;

/// Sets the options that the resource in the file at `path` states and the user did not give with `matches`. Returns the
/// fields that mean nothing on one machine.
pub(crate) fn fill_from_file(
    args: &mut UpArgs,
    path: &Path,
    matches: &ArgMatches,
) -> Result<Vec<&'static str>, CliError> {
    fill(args, &read_one(path)?, path, matches)
}

/// Sets the options that `resource` of the file at `path` states and the user did not give with `matches`. Returns the fields
/// that mean nothing on one machine.
pub(crate) fn fill(
    args: &mut UpArgs,
    resource: &Resource,
    path: &Path,
    matches: &ArgMatches,
) -> Result<Vec<&'static str>, CliError> {
    let form = Form { path, matches };
    let spec = &resource.spec;
    form.model(&spec.model, args)?;
    if form.takes("served_model_name") {
        let name = spec.served_name.as_ref().unwrap_or(&resource.metadata.name);
        args.served_model_name = vec![name.clone()];
    }
    form.limits(&spec.slo, &spec.scaling, args)?;
    form.idle_windows(&spec.scaling, args)?;
    // The placement stays unless the resource says otherwise. One that a plan file gives stays in any case.
    let follows = spec.prediction.as_ref().filter(|it| it.replan == Replan::Auto && !form.given("plan"));
    if let Some(follows) = follows {
        form.follow(follows, args)?;
    }
    // A file of its own for either has the same fields.
    if form.plans("workload") && spec.workload.is_some() {
        args.planning.workload.workload = Some(path.to_owned());
    }
    if form.plans("pricing") && spec.pricing.is_some() {
        args.planning.pricing = Some(path.to_owned());
    }
    form.sizes(&spec.main, &spec.remote_experts, args)?;
    Ok(left_out(spec))
}

/// Resource in the file at `path`, for a user who gave `matches`.
struct Form<'a> {
    path: &'a Path,
    matches: &'a ArgMatches,
}

impl Form<'_> {
    /// Reports if the user gave the flag.
    fn given(&self, id: &str) -> bool {
        self.matches.try_contains_id(id).is_ok()
            && self.matches.value_source(id) == Some(ValueSource::CommandLine)
    }

    /// Reports if the resource may set an option.
    fn takes(&self, id: &str) -> bool {
        !self.given(id)
    }

    /// Reports if the resource may set an option of planning. A placement that the user gave leaves nothing to plan.
    fn plans(&self, id: &str) -> bool {
        let is_placed = ["remote_ratio", "replicas", "groups", "plan"].into_iter().any(|id| self.given(id));
        !is_placed && self.takes(id)
    }

    /// Returns the error that `field` has `value`.
    fn wrong(&self, field: &str, value: &dyn Display, why: &dyn Display) -> CliError {
        wrong_field(self.path, field, &format!("invalid value '{value}': {why}"))
    }

    /// Parses a field that is stated, where the resource `may` set its option.
    fn parsed<V: Display, T, E: Display>(
        &self,
        may: bool,
        field: &str,
        value: Option<V>,
        parse: impl FnOnce(&V) -> Result<T, E>,
    ) -> Result<Option<T>, CliError> {
        let Some(value) = value.filter(|_| may) else { return Ok(None) };
        parse(&value).map(Some).map_err(|error| self.wrong(field, &value, &error))
    }

    fn duration(&self, field: &str, text: Option<&str>, without: &str) -> Result<Duration, CliError> {
        let parsed = parse_duration(text.unwrap_or(without));
        parsed.map_err(|error| wrong_field(self.path, field, &error))
    }

    fn model(&self, spec: &ModelSpec, args: &mut UpArgs) -> Result<(), CliError> {
        if args.source.model.is_none() {
            args.source.model = Some(self.location(spec)?);
        }
        let options = &mut args.deployment;
        let stated = spec.dtype.as_deref();
        set(
            &mut options.dtype,
            self.parsed(self.takes("dtype"), "spec.model.dtype", stated, |it| choice::<Dtype>(it))?,
        );
        let (takes, stated) = (self.takes("experts_dtype"), spec.experts_dtype.as_deref());
        set(
            &mut options.experts_dtype,
            self.parsed(takes, "spec.model.expertsDtype", stated, |it| it.parse())?,
        );
        let (takes, stated) = (self.takes("dense_dtype"), spec.dense_dtype.as_deref());
        set(&mut options.dense_dtype, self.parsed(takes, "spec.model.denseDtype", stated, |it| it.parse())?);
        let (takes, stated) = (self.takes("max_model_len"), spec.max_model_len);
        let positions =
            |it: &u32| if *it > 0 { Ok(*it as usize) } else { Err("expected 1 or more".to_owned()) };
        set(&mut options.max_model_len, self.parsed(takes, "spec.model.maxModelLen", stated, positions)?);
        if let Some(variables) =
            spec.chat_template_kwargs.as_ref().filter(|_| self.takes("chat_template_kwargs"))
        {
            args.chat_template_kwargs = Some(serde_json::Value::Object(variables.clone()).to_string());
        }
        Ok(())
    }

    fn location(&self, spec: &ModelSpec) -> Result<ModelLocation, CliError> {
        if let Some(claim) = spec.source.strip_prefix("pvc://") {
            let message = format!(
                "cannot read spec.model.source: claim {claim} exists only in a cluster; give the model's folder: \
                 remoe up --file {} FOLDER",
                self.path.display()
            );
            return Err(wrong_resource(self.path, &message));
        }
        let revision = spec.revision.as_ref().map_or_else(String::new, |revision| format!("@{revision}"));
        let place = format!("{}{revision}", spec.source);
        ModelLocation::try_from(OsString::from(&place))
            .map_err(|error| self.wrong("spec.model.source", &place, &error))
    }

    fn limits(&self, slo: &SloSpec, scaling: &ScalingSpec, args: &mut UpArgs) -> Result<(), CliError> {
        let (ttft, tpot) = (
            self.duration("spec.slo.ttft", slo.ttft.as_deref(), TTFT)?,
            self.duration("spec.slo.tpot", slo.tpot.as_deref(), TPOT)?,
        );
        let planning = &mut args.planning;
        if self.plans("ttft") {
            planning.ttft = ttft;
        }
        if self.plans("tpot") {
            planning.tpot = tpot;
        }
        // Without scale to zero no request is cold.
        if scaling.min != Some(0) {
            return Ok(());
        }
        if let Some(text) = &slo.cold_ttft {
            let limit = self.duration("spec.slo.coldTtft", Some(text), TTFT)?;
            set(&mut planning.cold_ttft, Some(limit).filter(|_| self.plans("cold_ttft")));
        }
        let percent = slo.cold_percent.as_deref();
        let cold_share = self.parsed(self.plans("cold_share"), "spec.slo.coldPercent", percent, |it| {
            share(&format!("{it}%"))
        })?;
        set(&mut planning.cold_share, cold_share);
        Ok(())
    }

    fn idle_windows(&self, scaling: &ScalingSpec, args: &mut UpArgs) -> Result<(), CliError> {
        if scaling.min == Some(0) {
            let window =
                self.duration("spec.scaling.idleWindow", scaling.idle_window.as_deref(), IDLE_WINDOW)?;
            set(&mut args.idle, Some(window).filter(|_| self.takes("idle")));
        }
        if let Some(text) = &scaling.remote_idle_window {
            let window = self.duration("spec.scaling.remoteIdleWindow", Some(text), IDLE_WINDOW)?;
            set(&mut args.remote_idle, Some(window).filter(|_| self.takes("remote_idle")));
        }
        Ok(())
    }

    fn follow(&self, spec: &PredictionSpec, args: &mut UpArgs) -> Result<(), CliError> {
        let interval =
            self.duration("spec.prediction.interval", spec.interval.as_deref(), REPLAN_INTERVAL)?;
        set(&mut args.follow.replan, Some(interval).filter(|_| self.takes("replan")));
        if spec.privacy == Privacy::CountsOnly && self.takes("forget") && self.takes("experience") {
            args.follow.forget = true;
        }
        Ok(())
    }

    fn sizes(&self, main: &MainSpec, remote: &RemoteExpertsSpec, args: &mut UpArgs) -> Result<(), CliError> {
        let (takes, stated) = (self.takes("device"), main.device.as_deref());
        set(&mut args.deployment.device, self.parsed(takes, "spec.main.device", stated, |it| device(it))?);
        let gpus = main.gpu.as_ref().and_then(|gpu| gpu.get("count")?.as_u64());
        if let Some(count) = gpus.filter(|count| *count != 1) {
            return Err(wrong_field(self.path, "spec.main.gpu.count", &format!("is {count}, {ONE_GPU}")));
        }
        let plans = self.plans("remote");
        if let Some(mode) = self.parsed(plans, "spec.remoteExperts.mode", remote.mode.as_deref(), |it| {
            choice::<RemoteArg>(&it.to_lowercase())
        })? {
            args.remote = mode;
        }
        let planning = &mut args.planning;
        let plans = self.plans("main_memory_mb");
        let memory = self.parsed(plans, "spec.main.memoryMB", main.memory_mb, memory)?;
        set(&mut planning.main_memory_mb, memory);
        let plans = self.plans("main_cpu");
        set(&mut planning.main_cpu, self.parsed(plans, "spec.main.cpu", main.cpu, vcpus)?);
        let plans = self.plans("remote_memory_mb");
        if let Some(memory) =
            self.parsed(plans, "spec.remoteExperts.memoryMB", remote.memory_mb, self::memory)?
        {
            planning.remote_memory_mb = memory;
        }
        let plans = self.plans("remote_cpu");
        set(&mut planning.remote_cpu, self.parsed(plans, "spec.remoteExperts.cpu", remote.cpu, vcpus)?);
        let plans = self.plans("max_groups");
        set(
            &mut planning.max_groups,
            self.parsed(plans, "spec.remoteExperts.maxGroups", remote.max_groups, count)?,
        );
        let plans = self.plans("max_replicas");
        if let Some(count) =
            self.parsed(plans, "spec.remoteExperts.maxReplicas", remote.max_replicas, count)?
        {
            planning.max_replicas = count;
        }
        let requires = match (planning.main_cpu, planning.remote_cpu) {
            (Some(_), None) => Some(("spec.main.cpu", "spec.remoteExperts.cpu")),
            (None, Some(_)) => Some(("spec.remoteExperts.cpu", "spec.main.cpu")),
            (Some(_), Some(_)) | (None, None) => None,
        };
        requires.map_or(Ok(()), |(field, other)| {
            Err(wrong_field(self.path, field, &format!("requires {other}; state both or neither")))
        })
    }
}

/// Sets `option` if there is a value for it.
fn set<T>(option: &mut Option<T>, value: Option<T>) {
    if value.is_some() {
        *option = value;
    }
}

/// Parses a value of a flag with fixed values.
fn choice<T: ValueEnum>(text: &str) -> Result<T, String> {
    T::from_str(text, false).map_err(|_unknown| {
        let known = T::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let names: Vec<String> = known.map(|value| value.get_name().to_owned()).collect();
        format!("expected {}", names.join(" or "))
    })
}

fn count(count: &u32) -> Result<u32, String> {
    match count {
        1..=MOST_COUNT => Ok(*count),
        _ => Err(format!("expected 1 to {MOST_COUNT}")),
    }
}

const NO_RANGE: &str = "expected min of 1 or more, max of min or more, and step of 1 or more";

fn memory(range: &Range<100>) -> Result<SizeRange, String> {
    size_range(range.numbers().map(|number| number * MB))?.ok_or_else(|| NO_RANGE.to_owned())
}

fn vcpus(range: &Range<500>) -> Result<VcpuRange, String> {
    vcpu_range(range.numbers())?.ok_or_else(|| NO_RANGE.to_owned())
}

/// Returns the stated fields that mean nothing on one machine.
fn left_out(spec: &Spec) -> Vec<&'static str> {
    let (model, scaling) = (&spec.model, &spec.scaling);
    let of_clusters = [
        ("spec.model.endpoint (set HF_ENDPOINT or AWS_ENDPOINT_URL)", &model.endpoint),
        ("spec.model.credentialsSecretName (read from the environment)", &model.credentials_secret_name),
        ("spec.model.ambientCredentials (use --ambient-credentials)", &model.ambient_credentials),
        ("spec.model.cacheClaimName (use --model-cache)", &model.cache_claim_name),
        ("spec.mode", &spec.mode),
        ("spec.acceptedPlan", &spec.accepted_plan),
        ("spec.scaling.max", &scaling.max),
        ("spec.scaling.targetPercent", &scaling.target_percent),
        ("spec.scaling.window", &scaling.window),
        ("spec.scaling.remote", &scaling.remote),
        ("spec.replicas", &spec.replicas),
        ("spec.main.gpu", &spec.main.gpu),
        ("spec.main.template", &spec.main.template),
        ("spec.remoteExperts.payloadLimitMB", &spec.remote_experts.payload_limit_mb),
        ("spec.remoteExperts.template", &spec.remote_experts.template),
        ("spec.rollout", &spec.rollout),
        ("spec.profile (use --profile)", &spec.profile),
    ];
    of_clusters.into_iter().filter(|(_, value)| value.is_some()).map(|(name, _)| name).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use clap::{Args, FromArgMatches};

    const RESOURCE: &str = "apiVersion: v1\nkind: ConfigMap\n---\napiVersion: remoe.dev/v1alpha1\nkind: MoEDeployment\n\
        metadata: {name: demo, namespace: x}\nspec:\n  model: {source: 'hf://a/b', revision: main, cacheClaimName: c}\n  \
        slo: {tpot: 1m30s}\n  replicas: 2\n  workload: {maxInputTokens: 10, maxOutputTokens: 10, typicalInputTokens: 5, typicalOutputTokens: 5}\n  \
        pricing: {billing: Reserved, cpuCoreHour: '0.03', memoryGBHour: \"0.004\"}\n  \
        main: {memoryMB: {min: 200, max: 400}, cpu: {min: 500, max: 4000}}\n  \
        remoteExperts: {mode: Always, cpu: {min: 250, max: 2000, step: 250}, maxGroups: 3}\n";
    /// Flags of [`RESOURCE`] beside its limits.
    const FLAGS: [&str; 9] = [
        "--model=hf://a/b@main",
        "--served-model-name=demo",
        "--workload=FILE",
        "--pricing=FILE",
        "--main-memory-mb=200:400:100",
        "--main-cpu=500:4000:500",
        "--remote=always",
        "--remote-cpu=250:2000:250",
        "--max-groups=3",
    ];
    const LIMITS: [&str; 2] = ["--ttft=10s", "--tpot=1m30s"];

    fn parsed(arguments: &[&str]) -> (UpArgs, ArgMatches) {
        let line = ["up"].iter().chain(arguments);
        let matches = UpArgs::augment_args(clap::Command::new("up")).try_get_matches_from(line).unwrap();
        (UpArgs::from_arg_matches(&matches).unwrap(), matches)
    }

    /// Fills options from a file with `text` beside `arguments`: the options as text, and the fields that are left out.
    fn filled(text: &str, arguments: &[&str]) -> Result<(String, Vec<&'static str>), String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let name = file.path().to_str().unwrap();
        let (mut args, matches) = parsed(&[&["--file", name], arguments].concat());
        let left_out = fill_from_file(&mut args, file.path(), &matches).map_err(|error| error.message)?;
        args.file = None;
        Ok((format!("{args:?}").replace(name, "FILE"), left_out))
    }

    /// Options that a file with `text` fills beside `arguments` are those of `flags`.
    fn is_filled_as(text: &str, arguments: &[&str], flags: &[&str]) {
        let (options, _) = filled(text, arguments).unwrap();
        let (args, _) = parsed(&[arguments, flags].concat());
        assert_eq!(options, format!("{args:?}"), "{arguments:?} {flags:?}");
    }

    #[test]
    fn resource_fills_options_as_its_flags_would() {
        is_filled_as(RESOURCE, &[], &[&FLAGS[..], &LIMITS].concat());
        let (_, left_out) = filled(RESOURCE, &[]).unwrap();
        assert_eq!(left_out, ["spec.model.cacheClaimName (use --model-cache)", "spec.replicas"]);
        for (from, to, flag) in [
            ("cacheClaimName: c", "dtype: float32", "--dtype=float32"),
            ("cacheClaimName: c", "expertsDtype: mxfp4", "--experts-dtype=mxfp4"),
            ("cacheClaimName: c", "denseDtype: int4", "--dense-dtype=int4"),
            ("cacheClaimName: c", "maxModelLen: 2048", "--max-model-len=2048"),
            (
                "cacheClaimName: c",
                "chatTemplateKwargs: {enable_thinking: false}",
                r#"--chat-template-kwargs={"enable_thinking":false}"#,
            ),
            ("replicas: 2", "scaling: {min: 0, idleWindow: 1m}", "--idle=1m"),
            ("replicas: 2", "scaling: {min: 0}", "--idle=10m"),
            ("replicas: 2", "scaling: {remoteIdleWindow: 90s}", "--remote-idle=1m30s"),
            ("replicas: 2", "scaling: {min: 1, idleWindow: 1m}", "--port=8000"),
            ("maxGroups: 3", "maxGroups: 3, maxReplicas: 2", "--max-replicas=2"),
            (
                "maxGroups: 3",
                "maxGroups: 3, memoryMB: {min: 100, max: 300}",
                "--remote-memory-mb=100:300:100",
            ),
            ("main: {", "main: {device: 'cuda:1', ", "--device=cuda:1"),
        ] {
            is_filled_as(&RESOURCE.replace(from, to), &[], &[&FLAGS[..], &LIMITS, &[flag]].concat());
        }
    }

    #[test]
    fn placement_of_the_user_leaves_nothing_to_plan() {
        let served = ["--model=hf://a/b@main", "--served-model-name=demo", "--dtype=float32"];
        let text = RESOURCE.replace("cacheClaimName: c", "dtype: float32");
        is_filled_as(&text, &["--remote-ratio", "0"], &served);
        is_filled_as(&text, &["--plan", "plan.json"], &served);
    }

    #[test]
    fn cold_limits_are_set_only_with_scale_to_zero() {
        let slo = "slo: {tpot: 1m30s, coldTtft: 20s, coldPercent: \"5\"}";
        let text =
            |scaling: &str| RESOURCE.replace("replicas: 2", scaling).replace("slo: {tpot: 1m30s}", slo);
        let flags = [&FLAGS[..], &LIMITS].concat();
        let cold = ["--cold-ttft=20s", "--cold-share=5%", "--idle=10m"];
        is_filled_as(&text("scaling: {min: 0}"), &[], &[&flags[..], &cold].concat());
        is_filled_as(&text("scaling: {min: 1}"), &[], &flags);
    }

    #[test]
    fn prediction_of_a_resource_sets_replan() {
        let text = |prediction: &str| RESOURCE.replace("replicas: 2", &format!("prediction: {prediction}"));
        let flags = [&FLAGS[..], &LIMITS].concat();
        let with = |more: &[&'static str]| [&flags[..], more].concat();
        is_filled_as(&text("{interval: 1m}"), &[], &with(&["--replan=1m"]));
        is_filled_as(&text("{privacy: CountsOnly}"), &[], &with(&["--replan=10m", "--forget"]));
        is_filled_as(&text("{privacy: CountsOnly}"), &["--replan", "5s"], &with(&["--forget"]));
        is_filled_as(&text("{replan: Never}"), &[], &flags);
        is_filled_as(
            &text("{}"),
            &["--plan", "p.json"],
            &["--model=hf://a/b@main", "--served-model-name=demo"],
        );
        is_filled_as(
            &text("{interval: 1m}"),
            &["--remote-ratio", "0.5"],
            &["--model=hf://a/b@main", "--served-model-name=demo", "--replan=1m"],
        );
        assert!(
            filled(&text("{interval: soon}"), &[]).is_err() && filled(&text("{replan: Off}"), &[]).is_err()
        );
    }

    #[test]
    fn flags_of_the_user_come_before_fields() {
        let flags = [&FLAGS[1..], &LIMITS[..1]].concat();
        is_filled_as(RESOURCE, &["--tpot", "1s", "some/folder"], &flags);
        let (options, _) = filled(RESOURCE, &["--model-cache", "cache", "--ambient-credentials"]).unwrap();
        assert!(options.contains("\"cache\"") && options.contains("ambient_credentials: true"), "{options}");
    }

    #[test]
    fn wrong_field_is_named_with_value_and_remedy() {
        for (from, to, says) in [
            ("hf://a/b', revision: main", "pvc://models/demo'", "only in a cluster"),
            ("MoEDeployment", "Other", "missing MoEDeployment"),
            ("v1alpha1", "v2", "expected remoe.dev/v1alpha1"),
            ("replicas: 2", "replcas: 2", "replcas"),
            ("1m30s", "soon", "spec.slo.tpot: invalid duration \"soon\""),
            (
                "maxGroups: 3",
                "maxGroups: 65",
                "spec.remoteExperts.maxGroups: invalid value '65': expected 1 to 64",
            ),
            (
                "Always",
                "Often",
                "spec.remoteExperts.mode: invalid value 'Often': expected auto or always or never",
            ),
            ("max: 400", "max: 100", "spec.main.memoryMB: invalid value '200:100:100': expected min of 1"),
            ("max: 2000, step: 250", "max: 20000, step: 1", "expected at most 10000 values, got 19751"),
            (", cpu: {min: 500, max: 4000}", "", "spec.remoteExperts.cpu: requires spec.main.cpu"),
            (
                "cacheClaimName: c",
                "dtype: half",
                "spec.model.dtype: invalid value 'half': expected float32 or",
            ),
            ("cacheClaimName: c", "expertsDtype: int2", "spec.model.expertsDtype: invalid value 'int2'"),
            ("cacheClaimName: c", "maxModelLen: 0", "spec.model.maxModelLen: invalid value '0'"),
            ("main: {", "main: {device: tpu, ", "spec.main.device: invalid value 'tpu': expected cpu, cuda"),
            (
                "main: {",
                "main: {device: cuda, gpu: {count: 2}, ",
                "spec.main.gpu.count: is 2, must be 1: the layers of a model are not divided",
            ),
        ] {
            let error = filled(&RESOURCE.replace(from, to), &[]).unwrap_err();
            assert!(error.contains(says), "{says}: {error}");
        }
        let twice = format!("{RESOURCE}---\n{}", RESOURCE.split_once("---\n").unwrap().1);
        assert!(filled(&twice, &[]).unwrap_err().contains("got 2"));
    }
}
