//! Replicas that follow load: more with many requests, fewer with none.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::ListParams;
use remoe_e2e::pods::{FUNCTIONS, is_ready};
use remoe_e2e::scene::Scene;
use remoe_e2e::{demo, gateways, release};
use remoe_test_support::deadline::{LONG, until};
use remoe_test_support::http;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const PROMPTS: [&str; 12] = [
    "And it came to pass in those days, that he went out into a mountain to pray,",
    "fn main() { let numbers: Vec<u32> = (0..10).collect();",
    "The mitochondrion is the part of the cell that",
    "Once upon a time there was a little girl who",
    "SELECT name, count(*) FROM users WHERE",
    "Dear Sir or Madam, I am writing to you",
    "In the beginning God created the heaven",
    "import numpy as np",
    "It was the best of times, it was the worst",
    "To whom it may concern: the party of the first",
    "struct Point { x: f64, y: f64 }",
    "Whosoever therefore shall confess me before men,",
];

/// Returns the ready, not terminating pods of each function.
async fn ready(scene: &Scene) -> BTreeMap<String, BTreeSet<String>> {
    let labels = ListParams::default().labels(FUNCTIONS);
    let pods = scene.api::<Pod>().list(&labels).await.unwrap().items;
    let mut functions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for pod in pods.iter().filter(|pod| is_ready(pod) && pod.metadata.deletion_timestamp.is_none()) {
        functions.entry(pod.labels()[FUNCTIONS].clone()).or_default().insert(pod.uid().unwrap());
    }
    functions
}

#[tokio::test(flavor = "multi_thread")]
async fn functions_follow_load_and_no_answer_is_lost_or_another() {
    Scene::run("functions_follow_load_and_no_answer_is_lost_or_another", async |scene| {
        let cluster = &scene.cluster;
        let _release = release::shared(cluster).await;
        let gateway = gateways::address(&gateways::pods(cluster, 1).await[0]);
        let more = json!({
            // A low target, so that a few clients exceed it: 3.2 concurrent requests, a tenth of a second of work per
            // second.
            "scaling": {"min": 1, "max": 3, "targetPercent": 10, "window": "10s", "remote": {"max": 2}},
            "prediction": {"replan": "Never"},
        });
        let demo = demo::deploy(scene, &more).await;
        demo.wait_until_settled().await;
        let before = ready(scene).await;
        assert_eq!(before["main"].len(), 1, "{before:?}");
        let plan = demo.status().await["plan"].clone();

        let name = format!("{}/demo", scene.namespace);
        let is_over = Arc::new(AtomicBool::new(false));
        let clients: Vec<_> = PROMPTS
            .into_iter()
            .map(|prompt| {
                let (name, is_over) = (name.clone(), is_over.clone());
                tokio::spawn(async move {
                    let body = json!({"model": name, "prompt": prompt, "max_tokens": 48, "temperature": 0,
                        "ignore_eos": true});
                    let mut texts = Vec::new();
                    while !is_over.load(Ordering::Relaxed) {
                        let answer = http::post(gateway, "/v1/completions", &body).await.unwrap();
                        let answer = answer.finish().await.unwrap();
                        assert_eq!(answer.status, 200, "{}", answer.body);
                        let answer: Value = serde_json::from_str(&answer.body).unwrap();
                        texts.push(answer["choices"][0]["text"].as_str().unwrap().to_owned());
                    }
                    texts
                })
            })
            .collect();
        let during = until(LONG, "three main functions", async || {
            let now = ready(scene).await;
            (now["main"].len() == 3).then_some(now)
        })
        .await;
        assert!(before["main"].is_subset(&during["main"]));
        assert_eq!(demo.status().await["plan"], plan, "more functions are no other plan");
        assert!(during.iter().all(|(function, pods)| function == "main" || pods.len() <= 2), "{during:?}");
        is_over.store(true, Ordering::Relaxed);
        let mut answers = 0;
        for client in clients {
            let texts = client.await.unwrap();
            answers += texts.len();
            assert_eq!(
                texts.iter().collect::<BTreeSet<_>>().len(),
                1,
                "the same from any replica: {texts:?}"
            );
        }
        until(LONG, "as many as before", async || (ready(scene).await == before).then_some(())).await;
        let metrics = release::operator_metrics(cluster).await;
        let count = |component: &str, direction: &str| {
            metrics.value(&format!(
                "remoe_operator_scalings_total{{component=\"{component}\",direction=\"{direction}\"}}"
            ))
        };
        eprintln!("{answers} answers; {during:?} for a while");
        assert!(count("main", "up") >= 1 && count("main", "down") >= 1);
        demo.delete().await;
        demo.wait_until_gone(scene).await;
    })
    .await;
}
