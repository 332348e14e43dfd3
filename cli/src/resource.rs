//! A MoEDeployment in a file, as a cluster takes it, for one machine: what it means is said in flags, and what
//! only a cluster has is named and left out.

mod part;

pub(crate) use part::{in_spec, part_of_spec};

use crate::exit::CliError;
use crate::files::{in_file, read};
use clap::ArgMatches;
use clap::parser::ValueSource;
use remoe_planner::FieldError;
use remoe_process::{format_duration, parse_duration};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_yaml::Value;
use std::ffi::OsString;
use std::path::Path;

pub(crate) const KIND: &str = "MoEDeployment";
const API_VERSION: &str = "remoe.dev/v1alpha1";
/// Promises where the resource states none, as in a cluster.
const TTFT: &str = "10s";
const TPOT: &str = "150ms";
/// Between two plans where a resource that says that they follow requests does not say.
const REPLAN_INTERVAL: &str = "10m";
/// What a resource that may sleep waits for requests where it does not say.
const IDLE_WINDOW: &str = "10m";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Resource {
    api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    metadata: Metadata,
    spec: Spec,
    #[serde(rename = "status")]
    _status: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Metadata {
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Spec {
    model: ModelSpec,
    served_name: Option<String>,
    mode: Option<Value>,
    accepted_plan: Option<Value>,
    #[serde(default)]
    scaling: ScalingSpec,
    replicas: Option<Value>,
    #[serde(default)]
    slo: SloSpec,
    workload: Option<Value>,
    #[serde(default)]
    main: MainSpec,
    #[serde(default)]
    remote_experts: RemoteExpertsSpec,
    pricing: Option<Value>,
    rollout: Option<Value>,
    prediction: Option<PredictionSpec>,
    profile: Option<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PredictionSpec {
    #[serde(default)]
    replan: Replan,
    interval: Option<String>,
    #[serde(default)]
    privacy: Privacy,
}

#[derive(Default, PartialEq, Deserialize)]
enum Replan {
    #[default]
    Auto,
    Never,
}

#[derive(Default, PartialEq, Deserialize)]
enum Privacy {
    #[default]
    None,
    CountsOnly,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ModelSpec {
    source: String,
    revision: Option<String>,
    endpoint: Option<Value>,
    credentials_secret_name: Option<Value>,
    ambient_credentials: Option<Value>,
    cache_claim_name: Option<Value>,
    dtype: Option<String>,
    experts_dtype: Option<String>,
    dense_dtype: Option<String>,
    max_model_len: Option<u32>,
    chat_template_kwargs: Option<serde_json::Map<String, serde_json::Value>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ScalingSpec {
    min: Option<u32>,
    max: Option<Value>,
    idle_window: Option<String>,
    remote_idle_window: Option<String>,
    target_percent: Option<Value>,
    window: Option<Value>,
    remote: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct SloSpec {
    ttft: Option<String>,
    tpot: Option<String>,
    cold_ttft: Option<String>,
    cold_percent: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct MainSpec {
    device: Option<String>,
    gpu: Option<Value>,
    #[serde(rename = "memoryMB")]
    memory_mb: Option<Range<100>>,
    cpu: Option<Range<500>>,
    template: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RemoteExpertsSpec {
    mode: Option<String>,
    #[serde(rename = "memoryMB")]
    memory_mb: Option<Range<100>>,
    cpu: Option<Range<500>>,
    max_groups: Option<u32>,
    max_replicas: Option<u32>,
    #[serde(rename = "payloadLimitMB")]
    payload_limit_mb: Option<Value>,
    template: Option<Value>,
}

/// `STEP` is the step where none is stated.
#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct Range<const STEP: u32> {
    min: u32,
    max: u32,
    step: Option<u32>,
}

impl<const STEP: u32> Range<STEP> {
    fn text(self) -> String {
        format!("{}:{}:{}", self.min, self.max, self.step.unwrap_or(STEP))
    }
}

/// What a resource means for `remoe up`.
#[derive(Debug)]
pub(crate) struct Expanded {
    /// Flags that say what the resource says, beside those of the user, which come first.
    pub(crate) arguments: Vec<OsString>,
    /// Fields that mean nothing on one machine.
    pub(crate) left_out: Vec<&'static str>,
}

/// Reads the resource at `path` for a user who has given `matches`.
pub(crate) fn expand(path: &Path, matches: &ArgMatches) -> Result<Expanded, CliError> {
    let text = read("--file", path)?;
    let wrong = |message: String| CliError {
        path: Some(path.to_owned()),
        ..CliError::arguments("--file", format!("{}: {message}", path.display()))
    };
    let mut found = documents(&text).map_err(|error| in_file("--file", path, &error))?;
    let document = found.pop().ok_or_else(|| wrong(format!("missing {KIND}")))?;
    if !found.is_empty() {
        return Err(wrong(format!("expected one {KIND}, got {}; use one file for each", found.len() + 1)));
    }
    expand_document(path, document, matches)
}

/// Reads one resource of the file at `path`.
pub(crate) fn expand_document(
    path: &Path,
    document: Value,
    matches: &ArgMatches,
) -> Result<Expanded, CliError> {
    let wrong = |message: String| CliError {
        path: Some(path.to_owned()),
        ..CliError::arguments("--file", format!("{}: {message}", path.display()))
    };
    let resource: Resource = serde_path_to_error::deserialize(document)
        .map_err(|error| in_file("--file", path, &unreadable_resource(error)))?;
    if resource.api_version != API_VERSION {
        return Err(wrong(format!("apiVersion is {}, expected {API_VERSION}", resource.api_version)));
    }
    let given = |id: &str| {
        matches.try_contains_id(id).is_ok() && matches.value_source(id) == Some(ValueSource::CommandLine)
    };
    let mut arguments = Vec::new();
    // A placement that is given leaves nothing to plan.
    let placed = ["remote_ratio", "replicas", "groups", "plan"].into_iter().any(given);
    let of_planning = |id: &str| {
        ![
            "model",
            "served_model_name",
            "dtype",
            "experts_dtype",
            "dense_dtype",
            "max_model_len",
            "chat_template_kwargs",
            "idle",
            "remote_idle",
            "device",
            "replan",
        ]
        .contains(&id)
    };
    let mut say = |id: &str, value: Option<String>| {
        if let Some(value) = value.filter(|_| !(given(id) || placed && of_planning(id))) {
            arguments.push(OsString::from(format!("--{}={value}", id.replace('_', "-"))));
        }
    };
    let Spec { model, main, remote_experts: remote, slo, .. } = &resource.spec;
    if !given("model") && !given("model_positional") {
        if let Some(claim) = model.source.strip_prefix("pvc://") {
            return Err(wrong(format!(
                "cannot read spec.model.source: claim {claim} exists only in a cluster; give the model's folder: \
                 remoe up --file {} FOLDER",
                path.display()
            )));
        }
        let revision = model.revision.as_ref().map_or_else(String::new, |revision| format!("@{revision}"));
        say("model", Some(format!("{}{revision}", model.source)));
    }
    let name = resource.spec.served_name.clone().unwrap_or_else(|| resource.metadata.name.clone());
    say("served_model_name", Some(name));
    say("dtype", model.dtype.clone());
    say("experts_dtype", model.experts_dtype.clone());
    say("dense_dtype", model.dense_dtype.clone());
    say("max_model_len", model.max_model_len.map(|positions| positions.to_string()));
    let variables = model.chat_template_kwargs.clone().map(serde_json::Value::Object);
    say("chat_template_kwargs", variables.map(|variables| variables.to_string()));
    let duration = |field: &str, value: &Option<String>, without: &str| {
        let parsed = parse_duration(value.as_deref().unwrap_or(without));
        parsed
            .map(|duration| Some(format_duration(duration)))
            .map_err(|error| CliError { field: Some(field.to_owned()), ..wrong(format!("{field}: {error}")) })
    };
    say("ttft", duration("spec.slo.ttft", &slo.ttft, TTFT)?);
    say("tpot", duration("spec.slo.tpot", &slo.tpot, TPOT)?);
    let scaling = &resource.spec.scaling;
    // Where nothing sleeps nobody finds it asleep.
    if scaling.min == Some(0) {
        if slo.cold_ttft.is_some() {
            say("cold_ttft", duration("spec.slo.coldTtft", &slo.cold_ttft, TTFT)?);
        }
        say("cold_share", slo.cold_percent.as_ref().map(|percent| format!("{percent}%")));
        say("idle", duration("spec.scaling.idleWindow", &scaling.idle_window, IDLE_WINDOW)?);
    }
    if scaling.remote_idle_window.is_some() {
        say(
            "remote_idle",
            duration("spec.scaling.remoteIdleWindow", &scaling.remote_idle_window, IDLE_WINDOW)?,
        );
    }
    // Where it says nothing the placement stays, as without a file. One that is given whole is not made anew.
    let follows = resource.spec.prediction.as_ref().filter(|it| it.replan == Replan::Auto && !given("plan"));
    if let Some(follows) = follows {
        say("replan", duration("spec.prediction.interval", &follows.interval, REPLAN_INTERVAL)?);
    }
    // A file of its own for either says the same fields.
    let file = path.to_str().map(str::to_owned);
    say("workload", file.clone().filter(|_| resource.spec.workload.is_some()));
    say("pricing", file.filter(|_| resource.spec.pricing.is_some()));
    say("device", main.device.clone());
    say("main_memory_mb", main.memory_mb.map(Range::text));
    say("main_cpu", main.cpu.map(Range::text));
    say("remote", remote.mode.as_deref().map(str::to_lowercase));
    say("remote_memory_mb", remote.memory_mb.map(Range::text));
    say("remote_cpu", remote.cpu.map(Range::text));
    say("max_groups", remote.max_groups.map(|count| count.to_string()));
    say("max_replicas", remote.max_replicas.map(|count| count.to_string()));
    let spec = &resource.spec;
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
        ("spec.main.gpu", &main.gpu),
        ("spec.main.template", &main.template),
        ("spec.remoteExperts.payloadLimitMB", &remote.payload_limit_mb),
        ("spec.remoteExperts.template", &remote.template),
        ("spec.rollout", &spec.rollout),
        ("spec.profile (use --profile)", &spec.profile),
    ];
    if follows.is_some_and(|follows| follows.privacy == Privacy::CountsOnly)
        && !given("forget")
        && !given("experience")
    {
        arguments.push(OsString::from("--forget"));
    }
    let left_out =
        of_clusters.into_iter().filter(|(_, value)| value.is_some()).map(|(name, _)| name).collect();
    Ok(Expanded { arguments, left_out })
}

fn unreadable_resource(error: serde_path_to_error::Error<serde_yaml::Error>) -> FieldError {
    let path = error.path().to_string();
    FieldError::unreadable(&path, &error.into_inner().to_string())
}

/// Seconds without requests after which the one MoEDeployment that `text` is sleeps; `None` where it is none, or never
/// does.
///
/// # Errors
/// An invalid duration.
pub(crate) fn idle_window(text: &str) -> Result<Option<f64>, String> {
    let document = documents(text).ok().and_then(|mut found| found.pop());
    let scaling = document.as_ref().and_then(|document| document.get("spec")?.get("scaling"));
    let Some(scaling) = scaling.filter(|it| it.get("min").and_then(Value::as_u64) == Some(0)) else {
        return Ok(None);
    };
    let text = match scaling.get("idleWindow") {
        None => IDLE_WINDOW,
        Some(value) => {
            value.as_str().ok_or_else(|| format!("got {value:?}, expected a duration such as 10m"))?
        }
    };
    parse_duration(text).map(|window| Some(window.as_secs_f64())).map_err(|error| error.to_string())
}

/// Reports if a document of `text` is a MoEDeployment.
pub(crate) fn is_one(text: &str) -> bool {
    text.contains(KIND) && documents(text).is_ok_and(|found| !found.is_empty())
}

/// Returns the documents of kind MoEDeployment.
pub(crate) fn documents(text: &str) -> Result<Vec<Value>, serde_yaml::Error> {
    let documents = serde_yaml::Deserializer::from_str(text).map(Value::deserialize);
    let of_kind = |value: &Value| value.get("kind").and_then(Value::as_str) == Some(KIND);
    Ok(documents.collect::<Result<Vec<_>, _>>()?.into_iter().filter(of_kind).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::CommandFactory;

    #[test]
    fn limits_of_cold_requests_count_where_it_sleeps() {
        let said = |scaling: &str| {
            let slo = "slo: {tpot: 1m30s, coldTtft: 20s, coldPercent: \"5\"}";
            let text = RESOURCE.replace("replicas: 2", scaling).replace("slo: {tpot: 1m30s}", slo);
            let said = expanded(&text, &[]).unwrap().into_iter();
            said.filter(|flag| flag.contains("cold")).collect::<Vec<_>>()
        };
        assert_eq!(said("scaling: {min: 0}"), ["--cold-ttft=20s", "--cold-share=5%"]);
        assert!(said("scaling: {min: 1}").is_empty());
    }

    #[test]
    fn a_resource_whose_plans_follow_has_the_placement_follow() {
        let with = |prediction: &str| RESOURCE.replace("replicas: 2", &format!("prediction: {prediction}"));
        let said = |prediction: &str, arguments: &[&str]| {
            let said = expanded(&with(prediction), arguments).unwrap().into_iter();
            said.filter(|flag| flag.contains("replan") || flag.contains("forget")).collect::<Vec<_>>()
        };
        assert_eq!(said("{interval: 1m}", &[]), ["--replan=1m"]);
        assert_eq!(said("{privacy: CountsOnly}", &[]), ["--replan=10m", "--forget"]);
        assert_eq!(said("{privacy: CountsOnly}", &["--replan", "5s"]), ["--forget"]);
        assert!(said("{replan: Never}", &[]).is_empty() && said("{}", &["--plan", "p.json"]).is_empty());
        assert_eq!(said("{interval: 1m}", &["--remote-ratio", "0.5"]), ["--replan=1m"]);
        assert!(
            expanded(&with("{interval: soon}"), &[]).is_err()
                && expanded(&with("{replan: Off}"), &[]).is_err()
        );
    }

    const RESOURCE: &str = "apiVersion: v1\nkind: ConfigMap\n---\napiVersion: remoe.dev/v1alpha1\nkind: MoEDeployment\n\
        metadata: {name: demo, namespace: x}\nspec:\n  model: {source: 'hf://a/b', revision: main, cacheClaimName: c}\n  \
        slo: {tpot: 1m30s}\n  replicas: 2\n  workload: {maxInputTokens: 10, maxOutputTokens: 10, typicalInputTokens: 5, typicalOutputTokens: 5}\n  \
        pricing: {billing: Reserved, cpuCoreHour: '0.03', memoryGBHour: \"0.004\"}\n  \
        main: {memoryMB: {min: 200, max: 400}}\n  remoteExperts: {mode: Always, cpu: {min: 250, max: 2000, step: 250}, maxGroups: 3}\n";

    fn expanded(text: &str, arguments: &[&str]) -> Result<Vec<String>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let name = file.path().to_str().unwrap();
        let line = [&["remoe", "up", "--file", name], arguments].concat();
        let matches = Cli::command().try_get_matches_from(line).unwrap();
        let expanded = expand(file.path(), matches.subcommand().unwrap().1).map_err(|error| error.message)?;
        let said = expanded.arguments.iter().map(|argument| argument.to_str().unwrap().replace(name, "FILE"));
        Ok(said.chain(expanded.left_out.iter().map(|field| (*field).to_owned())).collect())
    }

    #[test]
    fn a_resource_is_said_in_flags_and_what_is_of_clusters_is_named() {
        assert_eq!(
            expanded(RESOURCE, &[]).unwrap(),
            [
                "--model=hf://a/b@main",
                "--served-model-name=demo",
                "--ttft=10s",
                "--tpot=1m30s",
                "--workload=FILE",
                "--pricing=FILE",
                "--main-memory-mb=200:400:100",
                "--remote=always",
                "--remote-cpu=250:2000:250",
                "--max-groups=3",
                "spec.model.cacheClaimName (use --model-cache)",
                "spec.replicas",
            ]
        );
        let shorter = RESOURCE.replace("cacheClaimName: c", "denseDtype: int4, maxModelLen: 2048");
        let said = expanded(&shorter, &["--remote-ratio", "0"]).unwrap();
        for flag in ["--max-model-len=2048", "--dense-dtype=int4"] {
            assert!(said.contains(&flag.to_owned()), "{said:?}");
        }
        let variables = RESOURCE.replace("cacheClaimName: c", "chatTemplateKwargs: {enable_thinking: false}");
        let said = expanded(&variables, &[]).unwrap();
        assert!(said.contains(&r#"--chat-template-kwargs={"enable_thinking":false}"#.to_owned()), "{said:?}");
        let sleeps = RESOURCE.replace("replicas: 2", "scaling: {min: 0, idleWindow: 1m}");
        assert!(expanded(&sleeps, &[]).unwrap().contains(&"--idle=1m".to_owned()));
        let tiers = RESOURCE.replace("replicas: 2", "scaling: {remoteIdleWindow: 90s}");
        let said = expanded(&tiers, &[]).unwrap();
        assert!(
            said.contains(&"--remote-idle=1m30s".to_owned())
                && !said.iter().any(|it| it.starts_with("--idle"))
        );
    }

    #[test]
    fn flags_of_the_user_stand_in_place_of_fields() {
        let said = expanded(RESOURCE, &["--tpot", "1s", "some/folder"]).unwrap();
        assert!(
            !said.iter().any(|flag| flag.starts_with("--tpot") || flag.starts_with("--model")),
            "{said:?}"
        );
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (from, to, says) in [
            ("hf://a/b', revision: main", "pvc://models/demo'", "only in a cluster"),
            ("MoEDeployment", "Other", "missing MoEDeployment"),
            ("v1alpha1", "v2", "expected remoe.dev/v1alpha1"),
            ("replicas: 2", "replcas: 2", "replcas"),
            ("1m30s", "soon", "spec.slo.tpot: invalid duration \"soon\""),
        ] {
            let error = expanded(&RESOURCE.replace(from, to), &[]).unwrap_err();
            assert!(error.contains(says), "{says}: {error}");
        }
        let twice = format!("{RESOURCE}---\n{}", RESOURCE.split_once("---\n").unwrap().1);
        assert!(expanded(&twice, &[]).unwrap_err().contains("got 2"));
    }

    #[test]
    fn parts_of_the_spec_have_numbers() {
        let prices = part_of_spec(RESOURCE, "pricing").unwrap().unwrap();
        let prices = remoe_hardware::Prices::from_yaml(&prices).unwrap();
        assert_eq!(prices.cpu_core_hour, 0.03);
        assert_eq!(part_of_spec("cpuCoreHour: 1", "pricing").unwrap(), None);
    }
}
