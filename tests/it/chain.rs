//! Wake of `remoe up` with 27 layers of 64 experts, by the method of the Remoe paper: predict, pre-allocate, plan,
//! partition.

use remoe_hardware::Profile;
use remoe_model::Checkpoint;
use remoe_test_support::many_experts::ManyExperts;
use remoe_test_support::raw;
use remoe_test_support::up::Up;
use serde_json::{Value, json};
use std::net::SocketAddr;

const TOPICS: [&str; 3] = ["headers", "python", "licences"];

async fn ask(address: SocketAddr, prompt: &str) -> Value {
    let body = json!({"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": true, "include_figures": true,
        "return_token_ids": true});
    raw::ask(address, raw::post("/v1/completions", &body.to_string())).await.ok()
}

fn tokens(answer: &Value) -> &Value {
    &answer["choices"][0]["token_ids"]
}

#[tokio::test(flavor = "multi_thread")]
async fn wake_at_27_x_64_experts_plans_for_waiting_requests() {
    let model = ManyExperts::get().await;
    let prompts: Vec<&str> = TOPICS.iter().map(|topic| model.prompts(topic)[0]).collect();
    let local = Up::start_with(&model.folder, &["--remote-ratio", "0"]).await;
    let mut expected = Vec::new();
    for prompt in &prompts {
        expected.push(ask(local.ready.http(), prompt).await);
    }
    drop(local);

    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("profile.json");
    let facts = Checkpoint::open(&model.folder).unwrap().inspect().unwrap();
    std::fs::write(&profile, serde_json::to_string(&Profile::prior(&facts, &facts.dtype)).unwrap()).unwrap();
    let prices = folder.path().join("prices.yaml");
    // Functions are billed while they work, so the choice of remote experts matters.
    std::fs::write(&prices, "billing: Invocation\ncpuCoreHour: 0.04\nmemoryGBHour: 0.004\n").unwrap();
    let arguments = [
        "--profile",
        profile.to_str().unwrap(),
        "--pricing",
        prices.to_str().unwrap(),
        "--remote",
        "always",
        // Main functions have memory for half of the experts, and few vCPUs.
        "--main-memory-mb",
        "250:250:10",
        "--main-cpu",
        "500:500:500",
        "--remote-memory-mb",
        "60:600:20",
        "--remote-cpu",
        "2000:2000:1000",
        "--max-replicas",
        "1",
        "--replan",
        "3600s",
        "--idle",
        "1s",
        "--experience",
        folder.path().to_str().unwrap(),
    ];
    let mut up = Up::start_with(&model.folder, &arguments).await;
    let address = up.ready.http();
    let mut own = 0.0;
    let mut round = 0;
    // On a busy machine the plan may be late and is not used.
    while own < 1.0 && round < 4 {
        round += 1;
        for (prompt, expected) in prompts.iter().zip(&expected) {
            up.next("asleep").await;
            let answer = ask(address, prompt).await;
            up.next("awake").await;
            assert_eq!(tokens(&answer), tokens(expected), "round {round}");
            let experts = &answer["usage"]["remoe"]["experts"];
            assert_eq!(experts["fallback"], 0, "{experts}");
            assert!(experts["remote"].as_u64() > Some(0), "{experts}");
            eprintln!("{experts} {}", answer["usage"]["remoe"]["timing"]);
        }
        let metrics = raw::ask(address, raw::get("/metrics")).await.text();
        let replans = metrics.lines().find(|line| line.starts_with("remoe_replans_total{cause=\"wake\""));
        own = replans.and_then(|line| line.rsplit_once(' ')).map_or(0.0, |(_, count)| count.parse().unwrap());
    }
    let log = up.process.log();
    let planned =
        log.iter().filter(|line| line.contains("wake planned while the main function starts")).count();
    assert_eq!(planned, round * TOPICS.len(), "{log:?}");
    assert!(own >= 1.0, "no wake had a plan of its own: {log:?}");
}
