//! `remoe plan --nodes`: from a configuration and a list to nodes, and to a resource.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const AWS: &str = "examples/nodes/aws-us-east-1.yaml";

fn workspace(path: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    path.to_str().unwrap().to_owned()
}

fn published(name: &str) -> String {
    workspace(&format!("tests/fixtures/published/{name}"))
}

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_remoe")).args(arguments).output().unwrap()
}

/// Exit code and object of `remoe plan MODEL --nodes LIST`.
fn plan(model: &str, list: &str, arguments: &[&str]) -> (Option<i32>, Value) {
    let output = run(&[&["plan", model, "--nodes", list, "--json"][..], arguments].concat());
    let answer = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (output.status.code(), answer)
}

/// Few shapes of the list, in a folder that goes with it.
fn few_nodes() -> (tempfile::TempDir, String) {
    const FEW: [&str; 6] =
        ["m7i.xlarge", "r7i.4xlarge", "r7i.48xlarge", "g6e.4xlarge", "p5.48xlarge", "p5en.48xlarge"];
    let text = std::fs::read_to_string(workspace(AWS)).unwrap();
    let is_kept = |line: &&str| {
        !line.starts_with("  - {name:") || FEW.iter().any(|name| line.contains(&format!("name: {name},")))
    };
    listed(&text.lines().filter(is_kept).collect::<Vec<_>>().join("\n"))
}

/// A list in a folder that goes with it.
fn listed(text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nodes.yaml");
    std::fs::write(&path, text).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (folder, path)
}

#[test]
fn a_configuration_alone_is_enough() {
    let (_list, few) = few_nodes();
    for (name, billions) in [
        ("deepseek-v3", 671.0),
        ("mixtral-8x22b", 140.6),
        ("gpt-oss-120b", 116.8),
        ("qwen3-235b-a22b", 235.1),
    ] {
        let (code, answer) = plan(&published(name), &few, &[]);
        assert_eq!(code, Some(0), "{name}: {answer}");
        let (model, verdict) = (&answer["model"], &answer["verdict"]);
        let parameters = model["parameters"].as_f64().unwrap() / 1e9;
        assert!((parameters / billions - 1.0).abs() < 0.001, "{name}: {parameters}");
        assert_eq!(model["weights_seen"], json!(false));
        // What is missing is their weights.
        assert_eq!(model["runs"], json!(true), "{name}: {model}");
        assert!(model["because"].as_str().unwrap().contains("missing "), "{model}");
        let hosts: Vec<&str> = answer["nodes"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|node| node["hosts"].as_array().unwrap())
            .map(|host| host.as_str().unwrap())
            .collect();
        assert!(["main", "stage-0"].contains(&hosts[0]), "{hosts:?}");
        assert!(answer["nodes"][0]["count"].as_u64() >= Some(1) && answer["nodes"][0]["shape"].is_string());
        let rivals = verdict["rivals"].as_array().unwrap();
        let names: Vec<&str> = rivals.iter().map(|rival| rival["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["gpu", "cpu", "mix", "offload", "fetch", "gpus", "pipeline", "layers", "sliced"]);
        assert!(rivals.iter().all(|rival| rival["why"].as_str().is_some_and(|why| !why.is_empty())));
        let best = rivals.iter().find(|rival| rival["name"] == verdict["best"]).unwrap();
        assert_eq!(best["dollars_per_hour"], answer["dollars_per_hour"]);
        assert!(verdict["sentence"].as_str().unwrap().contains(" pay"), "{verdict}");
        // People see the same, with the warning.
        let shown = run(&["plan", &published(name), "--nodes", &few]);
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert!(
            shown.contains("not read: sizes from config.json")
                && shown.contains(verdict["sentence"].as_str().unwrap()),
            "{shown}"
        );
    }
}

#[test]
fn weights_that_are_there_are_seen() {
    let (demo, (_list, few)) = (workspace("demo/model"), few_nodes());
    let (code, answer) = plan(&demo, &few, &[]);
    assert_eq!(code, Some(0), "{answer}");
    let model = &answer["model"];
    assert_eq!((&model["weights_seen"], &model["runs"]), (&json!(true), &json!(true)));
    assert_eq!(model.get("because"), None);
    // Counted in the dtype that is named.
    let total = |dtype: &str| {
        let (_, answer) = plan(&demo, &few, &["--dtype", dtype]);
        answer["model"]["total_bytes"].as_u64().unwrap()
    };
    assert_eq!(total("float32"), 2 * total("bfloat16"));
    // Quantised experts, 9 bytes for 32 of bfloat16, of a checkpoint as of a configuration.
    for model in [&demo, &published("deepseek-v3")] {
        let figures = |arguments: &[&str]| {
            let (_, answer) = plan(model, &few, &[&["--dtype", "bfloat16"], arguments].concat());
            let number = |name: &str| answer["model"][name].as_u64().unwrap();
            (number("expert_bytes"), number("total_bytes"), answer["model"]["counted"].to_string())
        };
        let (expert, total, _) = figures(&[]);
        let (quantised, smaller, counted) = figures(&["--experts-dtype", "int4"]);
        assert_eq!(quantised * 32, expert * 9);
        assert_eq!((total - smaller) % (expert - quantised), 0);
        assert!(smaller < total && counted.contains("int4"), "{counted}");
    }
    // Weights that are stored as fp8 are counted so, unless a dtype is stated.
    let (_, fp8) = plan(&published("deepseek-v3"), &few, &[]);
    let (_, wide) = plan(&published("deepseek-v3"), &few, &["--dtype", "bfloat16"]);
    let bytes = |answer: &Value| answer["model"]["total_bytes"].as_f64().unwrap();
    assert!((1.9..2.0).contains(&(bytes(&wide) / bytes(&fp8))), "{fp8}");
    // In a form that is not read, they are counted as they are stored.
    let folder = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(Path::new(&published("deepseek-v3")).join("config.json")).unwrap();
    let e5m2 = config.replacen("\"e4m3\"", "\"e5m2\"", 1);
    assert_ne!(e5m2, config);
    std::fs::write(folder.path().join("config.json"), e5m2).unwrap();
    let (_, unread) = plan(folder.path().to_str().unwrap(), &few, &[]);
    assert_eq!(unread["model"]["runs"], json!(false), "{unread}");
    assert!(unread["model"]["because"].as_str().unwrap().contains("quantization_config.fmt"), "{unread}");
    let ratio =
        wide["model"]["total_bytes"].as_f64().unwrap() / unread["model"]["total_bytes"].as_f64().unwrap();
    assert!((1.9..2.0).contains(&ratio), "{ratio}");
}

#[test]
fn a_wrong_list_is_refused_with_file_and_field() {
    for (text, field) in [
        ("nodes: []", "nodes"),
        ("nodes: [{name: a, vcpus: 4, memoryGB: 16, perHour: -1}]", "nodes[0].perHour"),
        ("nodes: [{name: a, vcpus: 4, memoryGB: 16, perHour: 1, cores: 4}]", "nodes[0].cores"),
        ("- 1", "--nodes"),
    ] {
        let (_folder, list) = listed(text);
        let (code, answer) = plan(&published("mixtral-8x22b"), &list, &[]);
        assert_eq!((code, &answer["error"]["field"]), (Some(2), &json!(field)), "{answer}");
        assert_eq!(answer["error"]["path"], json!(list));
    }
    // What would mean nothing beside nodes.
    for wrong in [
        &["--pricing", "x"][..],
        &["--remote", "always"],
        &["--max-replicas", "2"],
        &["--preallocate"],
        &["--manifest"],
    ] {
        let (code, _) = plan(&published("mixtral-8x22b"), &workspace(AWS), wrong);
        assert_eq!(code, Some(2), "{wrong:?}");
    }
    let (code, answer) = plan(&published("mixtral-8x22b"), &workspace(AWS), &["--predictor", "/nowhere"]);
    assert_eq!((code, &answer["error"]["field"]), (Some(2), &json!("--predictor")));
    let output = run(&["plan", "--nodes", &workspace(AWS)]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

#[test]
fn what_nothing_on_the_list_holds_is_said_with_the_limit() {
    let (_folder, list) = listed("nodes: [{name: small, vcpus: 4, memoryGB: 16, perHour: 0.2, max: 3}]");
    let (code, answer) = plan(&published("deepseek-v3"), &list, &[]);
    assert_eq!(code, Some(3), "{answer}");
    assert_eq!((&answer["verdict"]["pays"], &answer["verdict"]["best"]), (&json!(false), &Value::Null));
    let infeasible = &answer["infeasible"];
    assert!(infeasible["value"].as_f64() > infeasible["allowed"].as_f64(), "{answer}");
    assert_eq!((&infeasible["limit"], &infeasible["shape"]), (&json!("memory"), &json!("small")));
    let output = run(&["plan", &published("deepseek-v3"), "--nodes", &list, "--manifest"]);
    assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(3), false));
    let (code, answer) = plan(&published("gpt-oss-120b"), &workspace(AWS), &["--tpot", "1ms"]);
    assert_eq!((code, &answer["infeasible"]["limit"]), (Some(3), &json!("tpot")), "{answer}");
}

/// Fields of `value` that `schema` does not take.
fn misfits(path: &str, value: &Value, schema: &Value) -> Vec<String> {
    let number = |name: &str| schema[name].as_f64();
    let mut found = Vec::new();
    match (value, schema["type"].as_str().unwrap_or_default()) {
        (Value::Object(fields), "object") => {
            for (name, field) in fields {
                let path = format!("{path}.{name}");
                match schema["properties"].get(name) {
                    Some(schema) => found.extend(misfits(&path, field, schema)),
                    None => found.push(path),
                }
            }
            let required = schema["required"].as_array().into_iter().flatten();
            found.extend(
                required
                    .filter(|name| fields.get(name.as_str().unwrap()).is_none())
                    .map(|name| format!("{path} needs {name}")),
            );
        }
        (Value::Number(given), "integer") => {
            let given = given.as_f64().unwrap();
            let fits = given.fract() == 0.0
                && number("minimum").is_none_or(|least| given >= least)
                && number("maximum").is_none_or(|most| given <= most)
                && number("multipleOf").is_none_or(|unit| given % unit == 0.0);
            found.extend((!fits).then(|| format!("{path} is {given}")));
        }
        (Value::String(given), "string") => {
            let known = schema["enum"].as_array().is_none_or(|known| known.iter().any(|one| one == given));
            let short = number("maxLength").is_none_or(|most| given.len() as f64 <= most);
            found.extend((!known || !short).then(|| format!("{path} is {given}")));
        }
        (value, kind) => found.push(format!("{path} is {value}, expected {kind}")),
    }
    found
}

#[test]
fn the_manifest_is_one_that_the_custom_resource_takes() {
    let crd = std::fs::read_to_string(workspace("crds/moedeployments.remoe.dev.yaml")).unwrap();
    let crd: Value = serde_yaml::from_str(&crd).unwrap();
    let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
    // Of both clouds, on CPUs and GPUs, with remote experts and without.
    let (mut gpus, mut groups) = (0, 0);
    for (name, list, tpot) in [
        ("deepseek-v3", AWS, "200ms"),
        ("mixtral-8x22b", AWS, "200ms"),
        ("mixtral-8x22b", AWS, "500ms"),
        ("gpt-oss-120b", "examples/nodes/gcp-us-central1.yaml", "200ms"),
    ] {
        let (_, answer) = plan(&published(name), &workspace(list), &["--tpot", tpot]);
        let output =
            run(&["plan", &published(name), "--nodes", &workspace(list), "--tpot", tpot, "--manifest"]);
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        let resource: Value = serde_yaml::from_str(&text).unwrap();
        let spec = &resource["spec"];
        assert_eq!(misfits("", spec, schema), Vec::<String>::new(), "{text}");
        assert_eq!(
            (&resource["kind"], &resource["metadata"]["name"]),
            (&json!("MoEDeployment"), &json!(name))
        );
        assert_eq!(spec["main"].get("gpu").is_some(), spec["main"]["device"] == "cuda");
        assert_eq!(spec["pricing"].get("gpuHour").is_some(), spec["main"]["device"] == "cuda");
        gpus += i32::from(spec["main"]["device"] == "cuda");
        // The functions that the answer has, with a comment for each kind of node.
        let served = answer.get("best_of_remoe").cloned().unwrap_or_else(|| {
            let rivals = answer["verdict"]["rivals"].as_array().unwrap();
            rivals.iter().find(|rival| rival["name"] == answer["verdict"]["best"]).unwrap().clone()
        });
        for node in served["nodes"].as_array().unwrap() {
            let pool = format!("{} x {}", node["count"], node["shape"].as_str().unwrap());
            assert!(text.lines().any(|line| line.starts_with('#') && line.contains(&pool)), "{pool}: {text}");
        }
        let layout = &served["layout"];
        let remote = layout["remote_functions"].as_u64().unwrap();
        let mode = if remote > 0 { "Always" } else { "Never" };
        assert_eq!(spec["remoteExperts"]["mode"], json!(mode), "{text}");
        if served["name"] == "sliced" {
            groups += 1;
            assert_eq!(spec["remoteExperts"]["maxGroups"], json!(remote));
            let size = spec["remoteExperts"]["memoryMB"]["min"].as_f64().unwrap() * 1e6;
            assert!((0.0..1e8).contains(&(size - layout["remote_bytes"].as_f64().unwrap())), "{text}");
        }
    }
    assert!(gpus >= 1 && groups >= 1, "{gpus} {groups}");
}

/// Every figure of README about nodes is what the command prints.
#[test]
fn readme_states_what_the_planner_answers() {
    const GCP: &str = "examples/nodes/gcp-us-central1.yaml";
    const AZURE: &str = "examples/nodes/azure-eastus.yaml";
    let readme = std::fs::read_to_string(workspace("README.md")).unwrap();
    let guide = std::fs::read_to_string(workspace("docs/guides/planning-a-purchase.md")).unwrap();
    let dollars = |answer: &Value| format!("${:.2}", answer["dollars_per_hour"].as_f64().unwrap());
    let once_a_day = "arrivals: {perHour: 0.0416667}";
    for (model, arrivals, tpot, pays) in
        [("mixtral-8x22b", once_a_day, "300ms", false), ("deepseek-v3", once_a_day, "200ms", false)]
    {
        let (_folder, workload) = listed(arrivals);
        let arguments = ["--workload", workload.as_str(), "--tpot", tpot];
        let (_, answer) = plan(&published(model), &workspace(GCP), &arguments);
        assert_eq!(answer["verdict"]["pays"], json!(pays), "{model} {arrivals}");
        let sentence = answer["verdict"]["sentence"].as_str().unwrap();
        if model == "mixtral-8x22b" {
            assert!(readme.contains(sentence), "{model} {arrivals}: {sentence}");
        }
        assert!(readme.contains(&dollars(&answer)), "{model} {arrivals}: {}", dollars(&answer));
        if model == "mixtral-8x22b" {
            assert!(guide.contains(sentence), "{sentence}");
        }
    }
    let (_folder, workload) = listed("arrivals: {perHour: 100}");
    let (_, answer) = plan(&published("qwen3-235b-a22b"), &workspace(AZURE), &["--workload", &workload]);
    assert_eq!(answer["verdict"]["pays"], json!(false));
    assert!(readme.contains(&dollars(&answer)), "{}", dollars(&answer));
    // One node is enough although an estimate of its time to the first token is above the limit.
    assert_eq!(answer["nodes"][0]["count"], json!(1), "{answer}");
    let ttft = answer["expected"]["met"]["ttft_seconds"].as_f64().unwrap();
    assert!(ttft < 7.0, "{ttft}");
    // The row about money names clouds, lists and dates, and the command stands below it.
    let row = readme.lines().find(|line| line.starts_with("| What can remote experts save?")).unwrap();
    for source in ["Google us-central1 (2026-07-30)", "[Azure eastus](examples/nodes/azure-eastus.yaml)"] {
        assert!(row.contains(source), "{source} in {row}");
    }
    assert!(readme.contains("remoe plan hf://mistralai/Mixtral-8x22B-v0.1"));
}

#[test]
fn quantised_experts_are_priced_where_they_are_smaller() {
    let (_folder, few) = few_nodes();
    let priced = |model: &str, arguments: &[&str]| {
        let (_, answer) = plan(&published(model), &few, arguments);
        let all = answer["quantised"].as_array().cloned().unwrap_or_default();
        let each = all.iter().map(|one| {
            (one["experts_dtype"].as_str().unwrap().to_owned(), one["cheapest"]["dollars_per_hour"].as_f64())
        });
        (answer["dollars_per_hour"].as_f64(), each.collect::<Vec<_>>())
    };
    // Stored in bfloat16: what is printed is what asking for it answers.
    let (full, each) = priced("qwen3-235b-a22b", &[]);
    assert_eq!(each.len(), 2);
    for (form, dollars) in each {
        assert!(dollars <= full, "{form}: {dollars:?}, {full:?}");
        assert_eq!(priced("qwen3-235b-a22b", &["--experts-dtype", &form]), (dollars, vec![]));
    }
    // Stored in MXFP4, which is as small.
    assert_eq!(priced("gpt-oss-120b", &[]).1, []);
}

/// The throughput that is stated can be had within the limits.
#[test]
fn full_load_keeps_the_limit_per_token() {
    let (_folder, workload) = listed("arrivals: {perHour: 10000}");
    for model in ["qwen3-30b-a3b", "mixtral-8x22b", "gpt-oss-120b"] {
        let (_, answer) = plan(&published(model), &workspace(AWS), &["--workload", &workload]);
        let expected = &answer["expected"];
        let per_second = expected["full_load_tokens_per_second"].as_f64().unwrap();
        let (mains, copies) = (&answer["layout"]["mains"], &answer["layout"]["copies"]);
        let units = mains.as_f64().unwrap() * copies.as_f64().unwrap();
        let (step, prefill) = ("busy_tpot_seconds", "ttft_seconds");
        let [step, prefill] = [step, prefill].map(|name| expected[name].as_f64().unwrap());
        // Of a full batch every request has 201 tokens in the time of all prefills and 200 steps.
        let per_copy = per_second / units;
        let batch = 200.0 * step * per_copy / (201.0 - prefill * per_copy);
        let per_token = step + (batch - 1.0) * prefill / 200.0;
        assert!(
            batch > 1.0 && per_token <= 0.2 + 1e-6,
            "{model}: {batch} requests, {per_token} s; {expected}"
        );
    }
}

#[test]
fn concurrency_beside_a_rate_changes_no_answer() {
    let (_folder, workload) = listed("arrivals: {perHour: 10000}");
    let at = |concurrency: &str| {
        let arguments = ["--workload", workload.as_str(), "--concurrency", concurrency];
        let (_, answer) = plan(&published("qwen3-235b-a22b"), &workspace(AWS), &arguments);
        (answer["verdict"].clone(), answer["dollars_per_hour"].as_f64().unwrap())
    };
    let (verdict, dollars) = at("8");
    assert_eq!((verdict, dollars), at("256"));
    assert!(dollars < 170.0, "{dollars}");
}

#[test]
fn quantile_prices_and_forms_reach_the_answer() {
    let (model, (_list, few)) = (published("deepseek-v3"), few_nodes());
    let (_folder, workload) = listed("arrivals: {perHour: 2000}");
    let with = |more: &[&str]| {
        let arguments = [&["--workload", workload.as_str()][..], more].concat();
        plan(&model, &few, &arguments).1
    };
    let dollars = |answer: &Value| answer["dollars_per_hour"].as_f64().unwrap();
    let mean = with(&["--api-price", "0.2/0.8"]);
    // 2,000 requests of 128 tokens in and 200 out.
    let api = mean["api"]["dollars_per_hour"].as_f64().unwrap();
    assert!((api - 2000.0 * (128.0 * 0.2 + 200.0 * 0.8) / 1e6).abs() < 1e-9, "{api}");
    let late = with(&["--quantile", "p99"]);
    assert!(dollars(&late) >= dollars(&mean));
    let met = &late["expected"]["met"]["latency"];
    assert!(met["ttft"]["p99"].as_f64().unwrap() <= 10.0 && met["tpot"]["p99"].as_f64().unwrap() <= 0.2);
    let table =
        run(&["plan", &model, "--nodes", &few, "--workload", &workload, "--quantile", "p99", "--verbose"]);
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("p50 / p95 / p99"), "{table}");
    assert!(dollars(&with(&["--commitment", "three-years"])) <= dollars(&mean));
    // As it is published, in fp8, and with all weights in bfloat16.
    let bytes = |answer: &Value| answer["model"]["total_bytes"].as_f64().unwrap();
    assert!(bytes(&mean) < 0.72e12, "{}", bytes(&mean));
    let plain = with(&["--experts-dtype", "int8", "--dense-dtype", "bfloat16"]);
    let dense = with(&["--experts-dtype", "int8", "--dense-dtype", "int4"]);
    assert!(bytes(&dense) < bytes(&plain) - 1e10, "{} {}", bytes(&dense), bytes(&plain));
}
