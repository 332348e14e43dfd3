//! Options of `up` from a MoEDeployment. Each field sets the option that its flag would set. Flags of the user override
//! fields, and fields without meaning on one machine are reported.

use super::args::UpArgs;
use crate::exit::CliError;
use crate::flags::{Dtype, RemoteArg};
use crate::planning::{share, size_range, vcpu_range};
use crate::resource::{Resource, read_one, resource_error, resource_field_error};
use clap::ArgMatches;
use clap::parser::ValueSource;
use remoe_api::{
    ComputeDtype, CpuRange, MemoryRange, ModelSpec, PredictionSpec, Privacy, RemoteMode, Replan, ScalingSpec,
    SloSpec,
};
use remoe_hub::ModelLocation;
use remoe_model::ONE_GPU;
use remoe_planner::{SizeRange, VcpuRange};
use std::ffi::OsString;
use std::fmt::Display;
use std::path::Path;

/// Bytes of a field in MB.
const MB: f64 = 1e6;

/// Sets the options that the resource in the file at `path` states and that are no flags in `matches`. Returns the ignored
/// fields, which have no meaning on one machine.
pub(crate) fn fill_from_file(
    args: &mut UpArgs,
    path: &Path,
    matches: &ArgMatches,
) -> Result<Vec<String>, CliError> {
    fill(args, &read_one(path)?, path, matches)
}

/// Sets the options that `resource` of the file at `path` states and that are no flags in `matches`. Returns the ignored
/// fields, which have no meaning on one machine.
pub(crate) fn fill(
    args: &mut UpArgs,
    resource: &Resource,
    path: &Path,
    matches: &ArgMatches,
) -> Result<Vec<String>, CliError> {
    let source = ManifestSource { path, matches, resource };
    let spec = &resource.spec;
    source.model(&spec.model, args)?;
    if source.may_set("served_model_name") {
        let name = spec.served_name.as_ref().unwrap_or(&resource.name);
        args.served_model_name = vec![name.clone()];
    }
    source.limits(&spec.slo, &spec.scaling, args)?;
    source.idle_windows(&spec.scaling, args);
    // The placement is fixed unless the resource states a prediction. One from a plan file is always fixed.
    let follows = spec.prediction.replan == Replan::Auto && !source.is_given("plan");
    if follows && resource.states("spec.prediction") {
        source.follow(&spec.prediction, args);
    }
    // The fields are those of a separate workload or price file, so the manifest is read as such a file.
    if source.may_set_planning("workload") && resource.states("spec.workload") {
        args.planning.workload.workload = Some(path.to_owned());
    }
    if source.may_set_planning("pricing") && resource.states("spec.pricing") {
        args.planning.pricing = Some(path.to_owned());
    }
    source.sizes(args)?;
    Ok(ignored_fields(resource))
}

/// A resource from the file at `path`, with the flags of the user.
struct ManifestSource<'a> {
    path: &'a Path,
    matches: &'a ArgMatches,
    resource: &'a Resource,
}

impl ManifestSource<'_> {
    /// Returns `true` if the user gave the flag `id`.
    fn is_given(&self, id: &str) -> bool {
        self.matches.try_contains_id(id).is_ok()
            && self.matches.value_source(id) == Some(ValueSource::CommandLine)
    }

    /// Returns `true` if the resource may set the option `id`.
    fn may_set(&self, id: &str) -> bool {
        !self.is_given(id)
    }

    /// Returns `true` if the resource may set the planning option `id`. With a placement by the user, nothing is planned.
    fn may_set_planning(&self, id: &str) -> bool {
        let is_placed =
            ["remote_ratio", "replicas", "groups", "plan"].into_iter().any(|id| self.is_given(id));
        !is_placed && self.may_set(id)
    }

    /// Returns the error for an invalid `value` of `field`.
    fn field_error(&self, field: &str, value: &dyn Display, why: &dyn Display) -> CliError {
        resource_field_error(self.path, field, &format!("invalid value '{value}': {why}"))
    }

    /// Returns `true` if the resource states `field` and may set the planning option `id` with it.
    fn states_planning(&self, id: &str, field: &str) -> bool {
        self.may_set_planning(id) && self.resource.states(field)
    }

    fn model(&self, spec: &ModelSpec, args: &mut UpArgs) -> Result<(), CliError> {
        if args.source.model.is_none() {
            args.source.model = Some(self.location(spec)?);
        }
        let options = &mut args.deployment;
        let dtype = spec.dtype.map(|dtype| match dtype {
            ComputeDtype::Bfloat16 => Dtype::Bfloat16,
            ComputeDtype::Float32 => Dtype::Float32,
        });
        set(&mut options.dtype, dtype.filter(|_| self.may_set("dtype")));
        let experts = spec.experts_dtype.filter(|_| self.may_set("experts_dtype"));
        set(&mut options.experts_dtype, experts.map(Into::into));
        let dense = spec.dense_dtype.filter(|_| self.may_set("dense_dtype"));
        set(&mut options.dense_dtype, dense.map(Into::into));
        let kv_cache = spec.kv_cache_dtype.filter(|_| self.may_set("kv_cache_dtype"));
        set(&mut options.kv_cache_dtype, kv_cache.map(Into::into));
        let positions = spec.max_model_len.filter(|_| self.may_set("max_model_len"));
        set(&mut options.max_model_len, positions.map(|positions| positions as usize));
        let variables = spec.chat_template_kwargs.as_ref().filter(|_| self.may_set("chat_template_kwargs"));
        let variables = variables.map(|variables| serde_json::Value::Object(variables.clone()).to_string());
        set(&mut args.chat_template_kwargs, variables);
        Ok(())
    }

    fn location(&self, spec: &ModelSpec) -> Result<ModelLocation, CliError> {
        if let Some(claim) = spec.source.strip_prefix("pvc://") {
            let message = format!(
                "cannot read spec.model.source: claim {claim} exists only in a cluster; give the model's folder: \
                 remoe up --file {} FOLDER",
                self.path.display()
            );
            return Err(resource_error(self.path, &message));
        }
        let revision = spec.revision.as_ref().map_or_else(String::new, |revision| format!("@{revision}"));
        let place = format!("{}{revision}", spec.source);
        ModelLocation::try_from(OsString::from(&place))
            .map_err(|error| self.field_error("spec.model.source", &place, &error))
    }

    fn limits(&self, slo: &SloSpec, scaling: &ScalingSpec, args: &mut UpArgs) -> Result<(), CliError> {
        let planning = &mut args.planning;
        if self.may_set_planning("ttft") {
            planning.ttft = slo.ttft.into();
        }
        if self.may_set_planning("tpot") {
            planning.tpot = slo.tpot.into();
        }
        // Without scale to zero no request is cold.
        if scaling.min != 0 {
            return Ok(());
        }
        set(
            &mut planning.cold_ttft,
            slo.cold_ttft.filter(|_| self.may_set_planning("cold_ttft")).map(Into::into),
        );
        if let Some(percent) = slo.cold_percent.as_ref().filter(|_| self.may_set_planning("cold_share")) {
            let share = share(&format!("{percent}%"));
            let share = share.map_err(|error| self.field_error("spec.slo.coldPercent", percent, &error))?;
            planning.cold_share = Some(share);
        }
        Ok(())
    }

    fn idle_windows(&self, scaling: &ScalingSpec, args: &mut UpArgs) {
        let window = (scaling.min == 0).then(|| scaling.idle_window.into());
        set(&mut args.idle, window.filter(|_| self.may_set("idle")));
        let window = scaling.remote_idle_window.filter(|_| self.may_set("remote_idle"));
        set(&mut args.remote_idle, window.map(Into::into));
    }

    fn follow(&self, spec: &PredictionSpec, args: &mut UpArgs) {
        set(&mut args.follow.replan, Some(spec.interval.into()).filter(|_| self.may_set("replan")));
        if spec.privacy == Privacy::CountsOnly && self.may_set("forget") && self.may_set("experience") {
            args.follow.forget = true;
        }
    }

    fn sizes(&self, args: &mut UpArgs) -> Result<(), CliError> {
        let (main, remote) = (&self.resource.spec.main, &self.resource.spec.remote_experts);
        set(&mut args.deployment.device, self.resource.device.clone().filter(|_| self.may_set("device")));
        if let Some(gpu) = main.gpu.as_ref().filter(|gpu| gpu.count != 1) {
            let why = format!("is {}, {ONE_GPU}", gpu.count);
            return Err(resource_field_error(self.path, "spec.main.gpu.count", &why));
        }
        if self.states_planning("remote", "spec.remoteExperts.mode") {
            args.remote = match remote.mode {
                RemoteMode::Auto => RemoteArg::Auto,
                RemoteMode::Always => RemoteArg::Always,
                RemoteMode::Never => RemoteArg::Never,
            };
        }
        let planning = &mut args.planning;
        let field = "spec.main.memoryMB";
        if self.states_planning("main_memory_mb", field) {
            planning.main_memory_mb = Some(self.memory(field, main.memory_mb)?);
        }
        let field = "spec.remoteExperts.memoryMB";
        if self.states_planning("remote_memory_mb", field) {
            planning.remote_memory_mb = self.memory(field, remote.memory_mb)?;
        }
        if let Some(range) = main.cpu.filter(|_| self.may_set_planning("main_cpu")) {
            planning.main_cpu = Some(self.vcpus("spec.main.cpu", range)?);
        }
        if let Some(range) = remote.cpu.filter(|_| self.may_set_planning("remote_cpu")) {
            planning.remote_cpu = Some(self.vcpus("spec.remoteExperts.cpu", range)?);
        }
        if self.states_planning("max_groups", "spec.remoteExperts.maxGroups") {
            planning.max_groups = Some(remote.max_groups);
        }
        if self.states_planning("max_replicas", "spec.remoteExperts.maxReplicas") {
            planning.max_replicas = remote.max_replicas;
        }
        let requires = match (planning.main_cpu, planning.remote_cpu) {
            (Some(_), None) => Some(("spec.main.cpu", "spec.remoteExperts.cpu")),
            (None, Some(_)) => Some(("spec.remoteExperts.cpu", "spec.main.cpu")),
            (Some(_), Some(_)) | (None, None) => None,
        };
        requires.map_or(Ok(()), |(field, other)| {
            Err(resource_field_error(self.path, field, &format!("requires {other}; state both or neither")))
        })
    }

    fn memory(&self, field: &str, range: MemoryRange) -> Result<SizeRange, CliError> {
        let MemoryRange { min, max, step } = range;
        let parsed = size_range([min, max, step].map(|number| f64::from(number) * MB));
        self.checked_range(field, [min, max, step], parsed)
    }

    fn vcpus(&self, field: &str, range: CpuRange) -> Result<VcpuRange, CliError> {
        let CpuRange { min, max, step } = range;
        self.checked_range(field, [min, max, step], vcpu_range([min, max, step].map(f64::from)))
    }

    fn checked_range<T>(
        &self,
        field: &str,
        [min, max, step]: [u32; 3],
        parsed: Result<Option<T>, String>,
    ) -> Result<T, CliError> {
        let expected = "expected min of 1 or more, max of min or more, and step of 1 or more";
        parsed
            .and_then(|range| range.ok_or_else(|| expected.to_owned()))
            .map_err(|error| self.field_error(field, &format!("{min}:{max}:{step}"), &error))
    }
}

/// Sets `option` if there is a value for it.
fn set<T>(option: &mut Option<T>, value: Option<T>) {
    if value.is_some() {
        *option = value;
    }
}

/// Fields without meaning on one machine, each with the setting that replaces it.
const CLUSTER_ONLY_FIELDS: [(&str, &str); 17] = [
    ("spec.model.endpoint", " (set HF_ENDPOINT or AWS_ENDPOINT_URL)"),
    ("spec.model.credentialsSecretName", " (read from the environment)"),
    ("spec.model.ambientCredentials", " (use --ambient-credentials)"),
    ("spec.model.cacheClaimName", " (use --model-cache)"),
    ("spec.mode", ""),
    ("spec.acceptedPlan", ""),
    ("spec.scaling.max", ""),
    ("spec.scaling.targetPercent", ""),
    ("spec.scaling.window", ""),
    ("spec.scaling.remote", ""),
    ("spec.replicas", ""),
    ("spec.main.gpu", ""),
    ("spec.main.template", ""),
    ("spec.remoteExperts.payloadLimitMB", ""),
    ("spec.remoteExperts.template", ""),
    ("spec.rollout", ""),
    ("spec.profile", " (use --profile)"),
];

/// Returns the stated fields that have no meaning on one machine.
fn ignored_fields(resource: &Resource) -> Vec<String> {
    let stated = CLUSTER_ONLY_FIELDS.iter().filter(|(field, _)| resource.states(field));
    stated.map(|(field, remedy)| format!("{field}{remedy}")).collect()
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
    /// Flags that correspond to [`RESOURCE`], except its limits.
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

    /// Fills options from a file with `text` and from `arguments`. Returns the options as text, and the ignored fields.
    fn filled(text: &str, arguments: &[&str]) -> Result<(String, Vec<String>), String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let name = file.path().to_str().unwrap();
        let (mut args, matches) = parsed(&[&["--file", name], arguments].concat());
        let ignored_fields =
            fill_from_file(&mut args, file.path(), &matches).map_err(|error| error.message)?;
        args.file = None;
        Ok((format!("{args:?}").replace(name, "FILE"), ignored_fields))
    }

    /// Asserts that a file with `text` and `arguments` sets the same options as `arguments` and `flags`.
    fn assert_filled_as(text: &str, arguments: &[&str], flags: &[&str]) {
        let (options, _) = filled(text, arguments).unwrap();
        let (args, _) = parsed(&[arguments, flags].concat());
        assert_eq!(options, format!("{args:?}"), "{arguments:?} {flags:?}");
    }

    #[test]
    fn resource_fills_options_as_its_flags_would() {
        assert_filled_as(RESOURCE, &[], &[&FLAGS[..], &LIMITS].concat());
        let (_, ignored_fields) = filled(RESOURCE, &[]).unwrap();
        assert_eq!(ignored_fields, ["spec.model.cacheClaimName (use --model-cache)", "spec.replicas"]);
        for (from, to, flag) in [
            ("cacheClaimName: c", "dtype: float32", "--dtype=float32"),
            ("cacheClaimName: c", "expertsDtype: mxfp4", "--experts-dtype=mxfp4"),
            ("cacheClaimName: c", "kvCacheDtype: int8", "--kv-cache-dtype=int8"),
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
            assert_filled_as(&RESOURCE.replace(from, to), &[], &[&FLAGS[..], &LIMITS, &[flag]].concat());
        }
    }

    #[test]
    fn placement_of_the_user_leaves_nothing_to_plan() {
        let served = ["--model=hf://a/b@main", "--served-model-name=demo", "--dtype=float32"];
        let text = RESOURCE.replace("cacheClaimName: c", "dtype: float32");
        assert_filled_as(&text, &["--remote-ratio", "0"], &served);
        assert_filled_as(&text, &["--plan", "plan.json"], &served);
    }

    #[test]
    fn cold_limits_are_set_only_with_scale_to_zero() {
        let slo = "slo: {tpot: 1m30s, coldTtft: 20s, coldPercent: \"5\"}";
        let text =
            |scaling: &str| RESOURCE.replace("replicas: 2", scaling).replace("slo: {tpot: 1m30s}", slo);
        let flags = [&FLAGS[..], &LIMITS].concat();
        let cold = ["--cold-ttft=20s", "--cold-share=5%", "--idle=10m"];
        assert_filled_as(&text("scaling: {min: 0}"), &[], &[&flags[..], &cold].concat());
        assert_filled_as(&text("scaling: {min: 1}"), &[], &flags);
    }

    #[test]
    fn prediction_of_a_resource_sets_replan() {
        let text = |prediction: &str| RESOURCE.replace("replicas: 2", &format!("prediction: {prediction}"));
        let flags = [&FLAGS[..], &LIMITS].concat();
        let with = |more: &[&'static str]| [&flags[..], more].concat();
        assert_filled_as(&text("{interval: 1m}"), &[], &with(&["--replan=1m"]));
        assert_filled_as(&text("{privacy: CountsOnly}"), &[], &with(&["--replan=10m", "--forget"]));
        assert_filled_as(&text("{privacy: CountsOnly}"), &["--replan", "5s"], &with(&["--forget"]));
        assert_filled_as(&text("{replan: Never}"), &[], &flags);
        assert_filled_as(
            &text("{}"),
            &["--plan", "p.json"],
            &["--model=hf://a/b@main", "--served-model-name=demo"],
        );
        assert_filled_as(
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
        assert_filled_as(RESOURCE, &["--tpot", "1s", "some/folder"], &flags);
        let (options, _) = filled(RESOURCE, &["--model-cache", "cache", "--ambient-credentials"]).unwrap();
        assert!(options.contains("\"cache\"") && options.contains("ambient_credentials: true"), "{options}");
    }

    #[test]
    fn wrong_field_is_named_with_value_and_remedy() {
        for (from, to, expected) in [
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
                "spec.remoteExperts.mode: invalid value 'Often': expected Auto, Always or Never",
            ),
            ("max: 400", "max: 100", "spec.main.memoryMB: invalid value '200:100:100': expected min of 1"),
            ("max: 2000, step: 250", "max: 200000, step: 10", "expected at most 10000 values, got 19976"),
            (
                "step: 250",
                "step: 1",
                "spec.remoteExperts.cpu.step: invalid value '1': expected 10 to 1000000",
            ),
            (", cpu: {min: 500, max: 4000}", "", "spec.remoteExperts.cpu: requires spec.main.cpu"),
            (
                "cacheClaimName: c",
                "dtype: half",
                "spec.model.dtype: invalid value 'half': expected bfloat16 or",
            ),
            ("cacheClaimName: c", "expertsDtype: int2", "spec.model.expertsDtype: invalid value 'int2'"),
            ("cacheClaimName: c", "kvCacheDtype: int2", "spec.model.kvCacheDtype: invalid value 'int2'"),
            ("cacheClaimName: c", "maxModelLen: 0", "spec.model.maxModelLen: invalid value '0'"),
            ("main: {", "main: {device: tpu, ", "spec.main.device: invalid value 'tpu': expected cpu, cuda"),
            (
                "main: {",
                "main: {device: cuda, gpu: {count: 2}, ",
                "spec.main.gpu.count: is 2, must be 1: the layers of a model are not divided",
            ),
        ] {
            let error = filled(&RESOURCE.replace(from, to), &[]).unwrap_err();
            assert!(error.contains(expected), "{expected}: {error}");
        }
        let twice = format!("{RESOURCE}---\n{}", RESOURCE.split_once("---\n").unwrap().1);
        assert!(filled(&twice, &[]).unwrap_err().contains("got 2"));
    }
}
