//! Wake by the method of the Remoe paper with 27 layers of 64 experts: predict, pre-allocate, plan, partition.

use jiff::Timestamp;
use k8s_openapi::api::events::v1::Event;
use kube::api::ListParams;
use remoe_e2e::deployment::Deployment;
use remoe_e2e::scene::Scene;
use remoe_e2e::{audit, claim, figures, gateways, release};
use remoe_test_support::deadline::{LONG, until};
use remoe_test_support::http;
use remoe_test_support::many_experts::ManyExperts;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Steps of a wake, each of which has an event.
const STEPS: [&str; 4] = ["Predicted", "Preallocated", "Planned", "Partitioned"];

/// Requests 16 tokens. Returns them and the parts of the time to first token in milliseconds, which do not exceed the
/// client's waiting time.
async fn ask(gateway: SocketAddr, model: &str, prompt: &str) -> (Value, BTreeMap<String, f64>) {
    let begun = Instant::now();
    let body = json!({"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": true,
        "include_figures": true, "return_token_ids": true});
    let answer = http::post(gateway, "/v1/completions", &body).await.unwrap().finish().await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer: Value = serde_json::from_str(&answer.body).unwrap();
    let timing: BTreeMap<String, f64> =
        serde_json::from_value(answer["usage"]["remoe"]["timing"].clone()).unwrap();
    let (accounted, took) = (timing.values().sum::<f64>(), begun.elapsed().as_secs_f64() * 1e3);
    assert!(accounted <= took, "{timing:?} of {took} ms");
    (answer["choices"][0]["token_ids"].clone(), timing)
}

/// Returns the latest event of the deployment for each reason: its time and its note.
async fn events(scene: &Scene, deployment: &Deployment) -> BTreeMap<String, (Timestamp, String)> {
    let mut found = BTreeMap::new();
    for event in scene.api::<Event>().list(&ListParams::default()).await.unwrap().items {
        let is_ours = event.regarding.and_then(|of| of.name).as_deref() == Some(deployment.name.as_str());
        let (Some(time), Some(reason)) = (event.event_time, event.reason.filter(|_| is_ours)) else {
            continue;
        };
        let entry = (time.0, event.note.unwrap_or_default());
        let last: &mut (Timestamp, String) = found.entry(reason).or_insert_with(|| entry.clone());
        if entry.0 > last.0 {
            *last = entry;
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn wake_at_27_x_64_experts_plans_for_waiting_requests() {
    let model = ManyExperts::get().await;
    Scene::run("wake_at_27_x_64_experts_plans_for_waiting_requests", async |scene| {
        let cluster = &scene.cluster;
        let _release = release::shared(cluster).await;
        let gateway = gateways::address(&gateways::pods(cluster, 1).await[0]);
        claim::create(scene, "models", &["--put", &format!("many={}", model.folder.display())]).await;
        figures::create_for(scene, "many", &model.folder).await;
        let spec = json!({
            "model": {"source": "pvc://models/many"},
            "profile": figures::reference_to("many"),
            // Memory for half of the experts. Remote functions are billed while they work, so the choice of remote
            // experts matters.
            "main": {"memoryMB": {"min": 300, "max": 300}, "cpu": {"min": 500, "max": 500}},
            "remoteExperts": {"mode": "Always", "memoryMB": {"min": 100, "max": 600}, "cpu": {"min": 2000, "max": 2000},
                "maxReplicas": 1, "maxGroups": 2},
            "scaling": {"min": 0, "idleWindow": "10s"},
            "pricing": {"billing": "Invocation"},
            "prediction": {"interval": "1h"},
        });
        let many = Deployment::apply(scene, "many", &spec).await;
        many.wait_for_condition("Ready", "True").await;
        let name = format!("{}/many", scene.namespace);
        // Answers of running functions, before any request was learned from.
        let mut expected = BTreeMap::new();
        for topic in ["headers", "python", "licences"] {
            for prompt in model.prompts(topic).into_iter().take(2) {
                expected.insert(prompt, ask(gateway, &name, prompt).await.0);
            }
        }

        let mut plans = Vec::new();
        for topic in ["headers", "python", "licences"] {
            gateways::wait_until_asleep(scene, &many).await;
            // Wakes of one minute share their events.
            tokio::time::sleep(Duration::from_secs(61)).await;
            let mark = audit::position(cluster);
            let slept = Timestamp::now();
            let wakes = gateways::demand(scene, "many").await["spec"]["wakes"].as_u64().unwrap_or(0);
            let prompt = model.prompts(topic)[0];
            let (tokens, timing) = ask(gateway, &name, prompt).await;
            assert_eq!(tokens, expected[prompt], "{topic}");
            let told = until(LONG, "an event of each step", async || {
                let events = events(scene, &many).await;
                let is_told = |step: &str| events.get(step).is_some_and(|(time, _)| *time > slept);
                STEPS.iter().all(|step| is_told(step)).then_some(events)
            })
            .await;
            let times: Vec<_> = STEPS.iter().map(|step| told[*step].0).collect();
            assert!(times.is_sorted(), "{told:?}");
            let predicted = &told["Predicted"].1;
            assert!(predicted.starts_with("Predicted the expert usage of 1 waiting request "), "{predicted}");
            let main = audit::entries_since(cluster, mark).into_iter().find(|request| {
                request.verb == "create" && request.resource() == "pods" && request.namespace() == scene.namespace
            });
            let main = main.expect("a pod was made").received;
            assert!(main < told["Planned"].0, "the main function starts before its plan is there: {told:?}");

            let demand = gateways::demand(scene, "many").await;
            let chain = &demand["spec"]["planning"];
            assert_eq!(chain["wake"], wakes + 1, "{demand}");
            let microseconds = |name: &str| chain[name].as_u64().unwrap_or(0);
            assert!(microseconds("predictUs") > 0 && microseconds("planUs") > 0, "{chain}");
            let running = many.status().await["plan"].as_str().unwrap().to_owned();
            let note = &told["Planned"].1;
            assert!(note.starts_with(&format!("Plan {running} ")), "{note}, {running} runs");
            let sum: f64 = timing.values().sum();
            eprintln!("{topic}: {chain}; {note}; first token after {sum:.0} ms: {timing:?}");
            for step in STEPS {
                eprintln!("  {step}: {}", told[step].1);
            }
            plans.push(running);
        }
        assert!(plans.windows(2).any(|pair| pair[0] != pair[1]), "topics have plans of their own: {plans:?}");
        tokio::time::sleep(Duration::from_secs(1)).await;
        many.delete().await;
        many.wait_until_gone(scene).await;
    })
    .await;
}
