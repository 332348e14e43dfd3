//! Profiles, plans, and functions that run under a plan.

use remoe_hardware::{Origin, Profile};
use remoe_test_support::binaries::workspace;
use remoe_test_support::command::{remoe, remoe_with_log};
use remoe_test_support::deadline::{LONG, until};
use remoe_test_support::http::post;
use remoe_test_support::metrics::MetricsPage;
use remoe_test_support::once;
use remoe_test_support::up::Up;
use serde_json::{Value, json};

fn demo() -> String {
    workspace().join("demo/model").to_str().unwrap().to_owned()
}

/// Parses the two numbers of a progress line such as `[3/14] ..`.
fn step(line: &str) -> Option<(usize, usize)> {
    let (step, all) = line.strip_prefix('[')?.split_once(']')?.0.split_once('/')?;
    Some((step.parse().ok()?, all.parse().ok()?))
}

/// Returns a profile of the demo model, measured once per test run.
async fn profile() -> String {
    let folder = once::folder("profile", async |folder| {
        let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
        let (file, plot) = (path("profile.json"), path("profile.svg"));
        let arguments =
            ["profile", "--model", &demo(), "--quick", "--out", &file, "--plot", &plot, "--device", "cpu"];
        let (code, _, log) = remoe_with_log(&arguments).await;
        assert_eq!(code, Some(0));
        // The number of steps equals the announced one.
        let steps: Vec<(usize, usize)> = log.iter().filter_map(|line| step(line)).collect();
        let expected: Vec<_> = (1..=steps.len()).map(|step| (step, steps.len())).collect();
        assert!(!steps.is_empty() && steps == expected, "{log:?}");
        assert!(std::fs::read_to_string(plot).unwrap().contains("</svg>"));
    });
    folder.await.join("profile.json").to_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn profile_names_its_checkpoint_and_machine() {
    let profile = Profile::from_json(&std::fs::read_to_string(profile().await).unwrap()).unwrap();
    let (_, facts) = remoe(&["inspect", "--model", &demo()]).await;
    assert_eq!(profile.origin, Origin::Measured);
    assert_eq!(profile.model.fingerprint, facts["fingerprint"]);
    assert_eq!(profile.model.dtype, "bfloat16");
    assert!(!profile.machine.cpu.is_empty() && profile.machine.cores > 0, "{:?}", profile.machine);
    assert!(!profile.kernels.instruction_path.is_empty());
    let positive = |table: &remoe_planner::CpuProfile| table.seconds.iter().flatten().all(|time| *time > 0.0);
    assert!(positive(&profile.expert_seconds) && positive(&profile.nonexpert_seconds));
    assert!(positive(profile.remote_expert_seconds.as_ref().unwrap()));
    assert!(profile.starts.main.seconds(1e7) > 0.0 && profile.memory.main_bytes > 1e7);
    // On one core, functions do not compute concurrently.
    assert_eq!(profile.contention.is_some(), profile.machine.cores > 1, "{:?}", profile.contention);
}

/// Returns an answer with the figures of the request.
async fn answer(up: &Up) -> Value {
    let body = json!({
        "prompt": "In the beginning", "max_tokens": 12, "seed": 5, "ignore_eos": true, "include_figures": true,
    });
    let exchange = post(up.ready.http(), "/v1/completions", &body).await.unwrap();
    let reply: Value = serde_json::from_str(&exchange.finish().await.unwrap().body).unwrap();
    assert_eq!(reply["usage"]["completion_tokens"], 12, "{reply}");
    reply
}

#[tokio::test(flavor = "multi_thread")]
async fn planned_deployment_answers_alike_and_reports_expectations() {
    let local = Up::start_with(demo().as_ref(), &["--remote-ratio", "0"]).await;
    let expected = answer(&local).await;
    assert_eq!(expected["usage"]["remoe"].get("plan"), None);
    drop(local);
    for start in ["planned", "preallocated", "sequential"] {
        let arguments = ["--profile", &profile().await, "--remote", "always", "--start", start];
        let up = Up::start_with(demo().as_ref(), &arguments).await;
        // At least one function for each of the six layers.
        assert!(up.ready.remote_pids().len() >= 6, "{:?}", up.ready);
        let reply = answer(&up).await;
        assert_eq!(reply["choices"], expected["choices"], "{start}");
        let figures = &reply["usage"]["remoe"];
        assert!(figures["experts"]["remote"].as_u64() > Some(0), "{figures}");
        assert_eq!(figures["experts"]["fallback"], 0);
        for side in ["expected", "measured"] {
            for figure in ["ttft_s", "tpot_s", "cost"] {
                let value = figures["plan"][side][figure].as_f64();
                assert!(value.is_some_and(|value| value > 0.0 && value < 1e3), "{side} {figure}: {figures}");
            }
        }
        let parts = &up.ready.start.unwrap();
        assert!(parts.functions_s > 0.0 && parts.placement_s > 0.0, "{parts:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn planned_deployment_serves_its_stated_concurrency() {
    const CLIENTS: u64 = 8;
    let up = Up::start_with(demo().as_ref(), &["--profile", &profile().await]).await;
    let main = up.ready.main.unwrap();
    assert_eq!(u64::from(main.concurrency), CLIENTS);
    assert!(main.threads >= 1 && main.kv_cache_bytes > 0, "{main:?}");
    // 128 tokens of prompt and 200 of output, of which the prefill yields the first.
    assert_eq!(main.kv_cache_tokens, CLIENTS * (128 + 199));
    let http = up.ready.http();
    let body = |seed: u64, n: u32| {
        json!({
            "prompt": "In the beginning", "max_tokens": 300, "seed": seed, "n": n, "temperature": 1.0,
            "ignore_eos": true,
        })
    };
    let four = post(http, "/v1/completions", &body(0, 4)).await.unwrap();
    let (status, reply) = (four.status, four.finish().await.unwrap().body);
    assert_eq!(status, 200, "{reply}");
    let reply: Value = serde_json::from_str(&reply).unwrap();
    assert_eq!(reply["usage"]["completion_tokens"], 1200, "{reply}");
    let clients: Vec<_> = (0..CLIENTS)
        .map(|seed| {
            let body = body(seed, 1);
            tokio::spawn(async move {
                let exchange = post(http, "/v1/completions", &body).await.unwrap();
                (exchange.status, exchange.finish().await.unwrap().body)
            })
        })
        .collect();
    let of_model = |name: &str| format!("{name}{{model=\"{}\"}}", up.ready.model);
    until(LONG, "all requests running at once", async || {
        let running = MetricsPage::read(http).await.value(&of_model("remoe_requests_running"));
        (running == CLIENTS).then_some(())
    })
    .await;
    for client in clients {
        let (status, reply) = client.await.unwrap();
        assert_eq!(status, 200, "{reply}");
    }
    // No request was preempted.
    assert_eq!(MetricsPage::read(http).await.value(&of_model("remoe_preemptions_total")), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_at_once_are_said_by_flag_or_workload() {
    let folder = tempfile::tempdir().unwrap();
    let workload = folder.path().join("workload.yaml");
    std::fs::write(&workload, "concurrency: 3\n").unwrap();
    let workload = workload.to_str().unwrap();
    let planned = async |arguments: &[&str]| {
        let demo = demo();
        let command = ["plan", "--model", &demo, "--profile", &profile().await];
        remoe(&[&command[..], arguments].concat()).await
    };
    for (arguments, expected) in [
        (vec![], 8),
        (vec!["--concurrency", "1"], 1),
        (vec!["--workload", workload], 3),
        (vec!["--workload", workload, "--concurrency", "64"], 64),
    ] {
        let (code, answer) = planned(&arguments).await;
        assert_eq!(code, Some(0), "{answer}");
        assert_eq!(answer["problem"]["request"]["concurrency"], expected, "{arguments:?}");
    }
    for wrong in ["0", "257", "many"] {
        let (code, answer) = planned(&["--concurrency", wrong]).await;
        assert_eq!((code, &answer["error"]["code"]), (Some(2), &json!("arguments")), "{wrong}: {answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn plan_file_contains_its_problem() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json").to_str().unwrap().to_owned();
    let (code, plan) =
        remoe(&["plan", "--model", &demo(), "--profile", &profile().await, "--remote", "always"]).await;
    assert_eq!(code, Some(0), "{plan}");
    std::fs::write(&file, plan.to_string()).unwrap();
    let arguments = [
        "generate",
        "--model",
        &demo(),
        "--prompt",
        "In the beginning",
        "--max-tokens",
        "4",
        "--plan",
        &file,
    ];
    let (code, generated) = remoe(&arguments).await;
    assert_eq!(code, Some(0), "{generated}");
    assert!(generated["plan"]["expected"]["ttft_s"].as_f64() > Some(0.0), "{generated}");
    assert!(generated["experts"]["remote"].as_u64() > Some(0), "{generated}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_planned_is_said() {
    let model = demo();
    let refused = async |arguments: &[&str]| {
        let command = ["plan", "--model", &model, "--profile", &profile().await];
        remoe(&[&command[..], arguments].concat()).await
    };
    let (code, answer) = refused(&["--tpot", "1ms", "--ttft", "1ms"]).await;
    assert_eq!(code, Some(3), "{answer}");
    assert!(answer["infeasible"]["limit"].is_string(), "{answer}");
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let text = std::fs::read_to_string(profile().await).unwrap();
    let prices = "cpuCoreHour: 1\nmemoryGBHour: 1\n";
    let cases = [
        ("--profile", file("cut.json", &text[..text.len() / 2])),
        ("--profile", file("unknown.json", &text.replacen("\"version\"", "\"edition\"", 1))),
        ("--profile", file("absent.json", &text) + ".gone"),
        ("--pricing", file("zero.yaml", "cpuCoreHour: 0\nmemoryGBHour: 0\n")),
        ("--pricing", file("units.yaml", &prices.replace("cpuCoreHour", "cpuCoreMinute"))),
        ("--workload", file("workload.yaml", "typicalInputTokens: 0\n")),
        ("--workload", file("fields.yaml", "inputTokens: 10\n")),
        ("--workload", file("concurrency.yaml", "concurrency: 0\n")),
    ];
    for (flag, path) in &cases {
        let (code, answer) = if *flag == "--profile" {
            remoe(&["plan", "--model", &demo(), flag, path]).await
        } else {
            refused(&[flag, path]).await
        };
        assert_eq!((code, &answer["error"]["code"]), (Some(2), &json!("arguments")), "{path}: {answer}");
    }
    // A profile of another checkpoint, and of another dtype.
    let foreign = workspace().join("tests/fixtures/mixtral-basic");
    let foreign = foreign.to_str().unwrap();
    let (code, answer) = remoe(&["plan", "--model", foreign, "--profile", &profile().await]).await;
    assert_eq!((code, &answer["error"]["field"]), (Some(2), &json!("--profile")), "{answer}");
    let (code, answer) = refused(&["--dtype", "float32"]).await;
    assert_eq!((code, &answer["error"]["field"]), (Some(2), &json!("--profile")), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sizes_that_are_asked_for_hold_in_a_plan() {
    let arguments = ["--profile", &profile().await, "--remote", "always", "--remote-memory", "200MB"];
    let up = Up::start_with(demo().as_ref(), &arguments).await;
    let command =
        |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap().replace('\0', " ");
    assert!(up.ready.remote_pids().len() >= 6, "{:?}", up.ready);
    for pid in up.ready.remote_pids() {
        assert!(command(pid).contains("--memory-bytes 200000000"), "{}", command(pid));
    }
    assert!(command(up.ready.main().pid.unwrap()).contains("--threads 1 "));
}
