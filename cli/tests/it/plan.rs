//! `remoe plan` for a model, from figures that need no measurement.

use remoe_hardware::Profile;
use remoe_model::{Checkpoint, Inspection};
use remoe_predictor::record::{ActivationRecord, DEFAULT_FILE_BYTES, RecordHeader, RecordWriter};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn workspace(path: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    path.to_str().unwrap().to_owned()
}

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_remoe")).args(arguments).output().unwrap()
}

/// Exit code and object of `remoe plan` for the demo model.
fn plan(arguments: &[&str]) -> (Option<i32>, Value) {
    let model = workspace("demo/model");
    let output = run(&[&["plan", "--model", &model, "--json"][..], arguments].concat());
    let answer = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (output.status.code(), answer)
}

fn facts() -> Inspection {
    Checkpoint::open(workspace("demo/model")).unwrap().inspect().unwrap()
}

/// Writes a profile of the demo model that the prior states.
fn profile(folder: &Path, on_gpu: bool) -> String {
    let path = folder.join(format!("profile-{on_gpu}.json"));
    let make = if on_gpu { Profile::prior_on_gpu } else { Profile::prior };
    std::fs::write(&path, serde_json::to_string(&make(&facts(), "bfloat16")).unwrap()).unwrap();
    path.to_str().unwrap().to_owned()
}

/// A predictor of the demo model whose history has decode steps, or prefills alone.
fn predictor(folder: &Path, decodes: bool) -> String {
    let facts = facts();
    let header = RecordHeader {
        model: facts.fingerprint.clone(),
        layers: facts.moe_layers.iter().map(|&layer| layer as u32).collect(),
        experts: facts.experts as u32,
        top_k: facts.top_k as u32,
        dtype: "bfloat16".to_owned(),
        tokens: false,
    };
    let cells = header.cells();
    let mut writer = RecordWriter::new(Vec::new(), header, 0, DEFAULT_FILE_BYTES).unwrap();
    for n in 0..150_u32 {
        let prompt: Vec<u32> = (0..4 + n % 7).map(|t| (n * 5 + t * t) % 1000).collect();
        let counts = |step: u32| (0..cells).map(|cell| (n + prompt[0] + cell as u32 * step) % 5).collect();
        let (prefill, decode) = (counts(3), if decodes { counts(2) } else { vec![0; cells] });
        let record = ActivationRecord { prompt, prefill, decode, steps: decodes.into(), experts: None };
        writer.append(&record).unwrap();
    }
    let (history, out) = (folder.join("history.npy"), folder.join("predictor"));
    std::fs::write(&history, writer.finish().unwrap()).unwrap();
    let (history, out) = (history.to_str().unwrap(), out.to_str().unwrap());
    let model = workspace("demo/model");
    let built = run(&["predictor", "build", "--history", history, "--model", &model, "--out", out]);
    assert!(built.status.success(), "{built:?}");
    out.to_owned()
}

#[test]
fn robust_plan_takes_error_factor_of_every_expert_count() {
    let folder = tempfile::tempdir().unwrap();
    let (profile, predictor) = (profile(folder.path(), false), predictor(folder.path(), true));
    let known = ["--profile", &profile, "--predictor", &predictor, "--robust"];
    let experts = facts().experts;
    for prompt in [&[][..], &["--prompt", "Once upon a time"]] {
        let (code, answer) = plan(&[&known[..], prompt].concat());
        assert_eq!(code, Some(0), "{answer}");
        let factors = answer["problem"]["prediction_p95"].as_array().unwrap();
        assert_eq!(factors.len(), facts().moe_layers.len());
        for layer in factors {
            let layer: Vec<f64> = serde_json::from_value(layer.clone()).unwrap();
            assert_eq!(layer.len(), experts + 1);
            // All experts together are used as often as predicted, a single one is not.
            assert!((layer[experts] - 1.0).abs() < 1e-5 && layer[1] > 1.01, "{layer:?}");
        }
    }
}

#[test]
fn a_robust_plan_without_known_errors_says_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let (profile, prefills_alone) = (profile(folder.path(), false), predictor(folder.path(), false));
    for known in [&[][..], &["--predictor", &prefills_alone]] {
        let (code, answer) = plan(&[&["--profile", &profile, "--robust"][..], known].concat());
        assert_eq!((code, &answer["error"]["field"]), (Some(2), &json!("--robust")), "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains("--predictor") && message.contains("decode steps"), "{answer}");
    }
}

#[test]
fn a_gpu_has_a_price_and_its_baselines_are_shown() {
    let folder = tempfile::tempdir().unwrap();
    let (on_cpu, on_gpu) = (profile(folder.path(), false), profile(folder.path(), true));
    let (with_gpu, without) =
        (workspace("examples/pricing/gke-autopilot.yaml"), workspace("examples/pricing/aws-fargate.yaml"));
    let (code, answer) = plan(&["--profile", &on_gpu, "--pricing", &without]);
    assert_eq!((code, &answer["error"]["field"]), (Some(2), &json!("--pricing")), "{answer}");
    // Without a list a GPU has a price by default.
    let (code, answer) = plan(&["--profile", &on_gpu]);
    assert_eq!((code, &answer["problem"]["device"]), (Some(0), &json!("gpu")), "{answer}");
    assert_eq!(answer["problem"]["limits"]["gpu_bytes"], answer["problem"]["pricing"]["gpu_bytes_each"]);
    let (code, answer) = plan(&["--profile", &on_gpu, "--pricing", &with_gpu]);
    assert_eq!(code, Some(0), "{answer}");
    for baseline in ["mix", "gpu", "fetch"] {
        assert!(answer["baselines"][baseline]["total_cost"].as_f64() > Some(0.0), "{baseline}: {answer}");
    }
    // On CPUs a list with GPUs bills none: what the plan costs is what its memory and cores cost.
    let (code, answer) = plan(&["--profile", &on_cpu, "--pricing", &with_gpu]);
    assert_eq!(code, Some(0), "{answer}");
    let (evaluation, pricing) = (&answer["evaluation"], &answer["problem"]["pricing"]);
    let figure = |of: &Value, name: &str| of[name].as_f64().unwrap();
    let seconds = figure(evaluation, "prefill_seconds") + figure(evaluation, "decode_seconds");
    let rate = figure(pricing, "cpu_per_gb_second") * figure(&answer["plan"], "main_bytes")
        + figure(pricing, "memory_per_gb_second") * figure(evaluation, "gpu_bytes");
    assert!((figure(evaluation, "main_cost") / (seconds * rate / 1e9) - 1.0).abs() < 1e-9, "{answer}");
    assert_eq!(answer["baselines"]["gpu"], Value::Null);
    let model = workspace("demo/model");
    let shown = run(&["plan", "--model", &model, "--profile", &on_cpu]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("everything on GPUs: the main function has no GPU"), "{shown}");
    assert!(!shown.contains("-0.0 %"), "{shown}");
    // Terms of the paper are for those who ask for them.
    let of_paper = |text: &str| ["MIX", "i = ", "continuous form"].iter().any(|term| text.contains(term));
    assert!(!of_paper(&shown), "{shown}");
    let said = |flag: &str| {
        let output = run(&["plan", &workspace("demo/model"), "--profile", &on_cpu, flag]);
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(of_paper(&said("--verbose")));
    let words = said("--explain");
    assert!(
        !of_paper(&words) && words.contains("experts") && words.contains("time to first token of"),
        "{words}"
    );
    assert!(words.contains("A million such requests cost $"), "{words}");
}

#[test]
fn what_is_infeasible_is_said_with_units_and_a_flag_that_helps() {
    let folder = tempfile::tempdir().unwrap();
    let profile = profile(folder.path(), false);
    let model = workspace("demo/model");
    let refused = run(&["plan", "--model", &model, "--profile", &profile, "--tpot", "0.1ms"]);
    assert_eq!(refused.status.code(), Some(3));
    let message = String::from_utf8(refused.stderr).unwrap();
    assert!(message.contains("infeasible: time per output token is at least"), "{message}");
    assert!(message.contains("limit 100 us") && !message.contains("tpot_seconds"), "{message}");
    let (_, flag) = message.split_once("feasible with --tpot ").unwrap();
    let limit = flag.split_whitespace().next().unwrap();
    let (code, answer) = plan(&["--profile", &profile, "--tpot", limit]);
    assert_eq!(code, Some(0), "{limit}: {answer}");
    // Nothing to plan for.
    let nothing = run(&["plan"]);
    assert_eq!(nothing.status.code(), Some(2));
    let message = String::from_utf8(nothing.stderr).unwrap();
    assert!(message.contains("--model") && message.contains("--problem"), "{message}");
}

#[test]
fn plan_on_a_disturbed_profile_says_to_measure_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = profile(folder.path(), false);
    let mut figures: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let said = |figures: &Value| {
        std::fs::write(&path, figures.to_string()).unwrap();
        let output = run(&["plan", "--model", &workspace("demo/model"), "--profile", &path]);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(!said(&figures).contains("other programs"));
    figures["disturbed"] = json!(0.3);
    let warning = said(&figures);
    assert!(warning.contains("other programs used 30 % of the CPUs"), "{warning}");
    assert!(warning.contains("measure again on an idle machine"), "{warning}");
}

/// A profile may come from a pipe, which can be read once.
#[test]
fn plan_reads_a_profile_from_standard_input() {
    let folder = tempfile::tempdir().unwrap();
    let figures = std::fs::File::open(profile(folder.path(), false)).unwrap();
    let (read, mut write) = std::io::pipe().unwrap();
    let sent = std::thread::spawn(move || std::io::copy(&mut { figures }, &mut write).unwrap());
    let arguments = ["plan", "--model", &workspace("demo/model"), "--profile", "/dev/stdin"];
    let command = Command::new(env!("CARGO_BIN_EXE_remoe")).args(arguments).stdin(read).output();
    let output = command.unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(sent.join().unwrap() > 0);
}

/// Limits of a problem file mean nothing to those who plan for a model.
#[test]
fn plan_of_a_model_names_no_field_of_a_problem_file() {
    let folder = tempfile::tempdir().unwrap();
    let profile = profile(folder.path(), false);
    let model = workspace("demo/model");
    for more in [&[][..], &["--tpot", "0.1ms"], &["--remote-memory-mb", "1:2:1", "--remote", "always"]] {
        let output = run(&[&["plan", "--model", &model, "--profile", &profile][..], more].concat());
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8(said).unwrap();
        for field in ["limits.", "slo.", "specs.", "problem file"] {
            assert!(!said.contains(field), "{more:?}: {field} in {said}");
        }
    }
}

/// Flags are never dropped silently: a problem in a file has its own limits, prices and sizes.
#[test]
fn a_problem_in_a_file_takes_nothing_from_flags() {
    for (flag, value) in [
        ("--ttft", "1s"),
        ("--tpot", "1ms"),
        ("--pricing", "/nowhere"),
        ("--profile", "/nowhere"),
        ("--workload", "/nowhere"),
        ("--predictor", "/nowhere"),
        ("--main-memory-mb", "1:2:1"),
        ("--remote-memory-mb", "1:2:1"),
        ("--max-replicas", "1"),
        ("--concurrency", "2"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_remoe"))
            .args(["plan", "--json", "--problem", "/nowhere/problem.json", flag, value])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{flag}: {output:?}");
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(flag) && message.contains("--problem"), "{flag}: {message}");
    }
}

/// When requests come, in the file of a workload.
fn workload(folder: &Path, text: &str) -> String {
    let path = folder.join("workload.yaml");
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn requests_that_find_functions_asleep_have_limits_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let profile = profile(folder.path(), false);
    let with = |text: &str, more: &[&str]| {
        let workload = workload(folder.path(), text);
        plan(
            &[&["--profile", &profile, "--workload", &workload, "--main-memory-mb", "1000:4000:500"], more]
                .concat(),
        )
    };
    let sleeps = "arrivals: {perHour: 20, idleSeconds: 60}";
    let (code, answer) = with(sleeps, &[]);
    assert_eq!(code, Some(0), "{answer}");
    let life = answer["evaluation"]["life"].clone();
    let (share, cold) = (life["cold_share"].as_f64().unwrap(), life["cold_ttft_seconds"].as_f64().unwrap());
    assert!(share > 0.5 && cold > answer["evaluation"]["ttft_seconds"].as_f64().unwrap(), "{life}");
    // Limits that hold change nothing, and are in the problem.
    let kept = [format!("{}s", cold + 1.0), format!("{}%", (share * 100.0).ceil())];
    let (code, answer) = with(sleeps, &["--cold-ttft", &kept[0], "--cold-share", &kept[1]]);
    assert_eq!(code, Some(0), "{answer}");
    assert_eq!(answer["evaluation"]["life"], life);
    assert!(
        answer["problem"]["slo"]["cold_ttft_seconds"].is_f64()
            && answer["problem"]["slo"]["cold_share"].is_f64()
    );
    // Those that nothing keeps are named, with a flag that helps.
    for (flag, value, limit) in [("--cold-share", "0.01", "cold_share"), ("--cold-ttft", "1ms", "cold_ttft")]
    {
        let (code, refused) = with(sleeps, &[flag, value]);
        assert_eq!(code, Some(3), "{refused}");
        assert_eq!(refused["infeasible"]["limit"], limit, "{refused}");
        let workload = workload(folder.path(), sleeps);
        let model = workspace("demo/model");
        let said =
            run(&["plan", "--model", &model, "--profile", &profile, "--workload", &workload, flag, value]);
        let said = String::from_utf8(said.stderr).unwrap();
        assert!(said.contains(flag), "{said}");
    }
    // Nothing sleeps: who asks for such a limit has forgotten to say when.
    for text in ["arrivals: {perHour: 20}", "typicalInputTokens: 10"] {
        let (code, refused) = with(text, &["--cold-ttft", "2s"]);
        assert_eq!((code, &refused["error"]["field"]), (Some(2), &json!("--cold-ttft")), "{refused}");
    }
    for wrong in ["1.5", "101%", "-0.1", "few"] {
        let argument = format!("--cold-share={wrong}");
        let output = run(&["plan", "--model", &workspace("demo/model"), &argument]);
        assert_eq!(output.status.code(), Some(2), "{wrong}");
    }
}

#[test]
fn a_resource_that_sleeps_is_planned_as_one() {
    let folder = tempfile::tempdir().unwrap();
    let profile = profile(folder.path(), false);
    let resource = |scaling: &str| {
        let text = format!(
            "apiVersion: remoe.dev/v1alpha1\nkind: MoEDeployment\nmetadata: {{name: a}}\nspec:\n  model: {{source: \"hf://a/b\"}}\n  \
             workload: {{maxInputTokens: 256, maxOutputTokens: 64, typicalInputTokens: 128, typicalOutputTokens: 32, arrivals: \
             {{perHour: \"20\", burst: \"1\"}}}}\n  scaling: {scaling}\n"
        );
        let workload = workload(folder.path(), &text);
        plan(&["--profile", &profile, "--workload", &workload])
    };
    let idle = |answer: &Value| answer["problem"]["arrivals"]["idle_seconds"].clone();
    assert_eq!(idle(&resource("{min: 0, idleWindow: 1m}").1), 60.0);
    assert_eq!(idle(&resource("{min: 0}").1), 600.0);
    assert_eq!(idle(&resource("{min: 1, idleWindow: 1m}").1), Value::Null);
    let (code, refused) = resource("{min: 0, idleWindow: soon}");
    assert_eq!(code, Some(2));
    assert!(
        refused["error"]["message"].as_str().unwrap().contains("idleWindow: invalid duration \"soon\""),
        "{refused}"
    );
}
