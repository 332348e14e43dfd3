//! Plans that follow expert usage: from answers through gateways to the operator and to new functions.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::ListParams;
use remoe_e2e::deployment::Deployment;
use remoe_e2e::scene::Scene;
use remoe_e2e::{demo, gateways, release};
use remoe_test_support::deadline::{LONG, until};
use remoe_test_support::http;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::sleep;

const SCRIPTURE: [&str; 8] = [
    "And the LORD spake unto Moses, saying, Speak unto the children of Israel, and say unto them,",
    "And it came to pass in those days, that he went out into a mountain to pray,",
    "And Abraham said unto his servant, Put, I pray thee, thy hand under my thigh:",
    "Thus saith the LORD of hosts, the God of Israel; Behold, I will bring evil upon this place,",
    "And the children of Israel did evil in the sight of the LORD, and forgat the LORD their God,",
    "And he said unto them, Go ye into all the world, and preach the gospel to every creature.",
    "And David said unto Saul, Thy servant kept his father's sheep, and there came a lion,",
    "The words of the preacher, the son of David, king in Jerusalem. Vanity of vanities,",
];

/// Answer with its figures.
struct TimedResponse {
    text: String,
    /// Share of remote (token, expert) pairs.
    remote: f64,
    /// Cost, in nano-dollars.
    cost: f64,
}

async fn ask(gateway: SocketAddr, model: &str, prompt: &str) -> TimedResponse {
    let body = json!({"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": true,
        "include_figures": true});
    let answer = http::post(gateway, "/v1/completions", &body).await.unwrap().finish().await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer: Value = serde_json::from_str(&answer.body).unwrap();
    let experts = &answer["usage"]["remoe"]["experts"];
    let count = |name: &str| experts[name].as_f64().unwrap();
    assert_eq!(count("fallback"), 0.0, "{experts}");
    TimedResponse {
        text: answer["choices"][0]["text"].as_str().unwrap().to_owned(),
        remote: count("remote") / (count("remote") + count("local")),
        cost: answer["usage"]["remoe"]["cost"]["total"].as_f64().unwrap(),
    }
}

async fn mains(scene: &Scene) -> BTreeSet<String> {
    let labels = ListParams::default().labels("remoe.dev/function=main");
    let pods = scene.api::<Pod>().list(&labels).await.unwrap().items;
    pods.iter().map(|pod| pod.uid().unwrap()).collect()
}

/// Returns the prediction for which the running plan was made.
async fn expected(scene: &Scene, demo: &Deployment) -> Option<Value> {
    let running = demo.status().await["plan"].as_str()?.to_owned();
    let plan = scene.kubectl(&["get", "moeplan", &format!("demo-{running}"), "-o", "json"]).await;
    let plan: Value = serde_json::from_str(&plan).unwrap();
    Some(plan["spec"]["prediction"].clone()).filter(Value::is_object)
}

#[tokio::test(flavor = "multi_thread")]
async fn plan_follows_the_topic_and_the_waking_request() {
    Scene::run("plan_follows_the_topic_and_the_waking_request", async |scene| {
        let cluster = &scene.cluster;
        let _release = release::shared(cluster).await;
        let gateway = gateways::address(&gateways::pods(cluster, 1).await[0]);
        let more = json!({
            "scaling": {"min": 0, "idleWindow": "30s"},
            "pricing": {"billing": "Invocation"},
            "prediction": {"interval": "10s"},
        });
        let demo = demo::deploy(scene, &more).await;
        let name = format!("{}/demo", scene.namespace);
        let order = gateways::demand(scene, "demo").await["spec"]["prediction"].clone();
        assert_eq!(order["everySeconds"], 10, "{order}");

        let mut before = Vec::new();
        for prompt in SCRIPTURE {
            before.push(ask(gateway, &name, prompt).await);
        }
        let served = mains(scene).await;
        let prediction = until(LONG, "a plan for what was asked", async || {
            for prompt in SCRIPTURE {
                ask(gateway, &name, prompt).await;
            }
            expected(scene, &demo).await
        })
        .await;
        assert_eq!(prediction["of"], "Answered", "{prediction}");
        demo.wait_until_settled().await;
        let mut after = Vec::new();
        for prompt in SCRIPTURE {
            after.push(ask(gateway, &name, prompt).await);
        }
        let mean = |answers: &[TimedResponse], of: fn(&TimedResponse) -> f64| {
            answers.iter().map(of).sum::<f64>() / answers.len() as f64
        };
        let of_both = |of| [mean(&before, of), mean(&after, of)];
        let ([remote_before, remote_after], costs) = (of_both(|one| one.remote), of_both(|one| one.cost));
        eprintln!("remote pairs {remote_before:.3} before, {remote_after:.3} after; nano-dollars a request {costs:.0?}");
        assert!(remote_after < remote_before * 0.8, "{remote_before} and {remote_after}");
        let texts = |answers: &[TimedResponse]| answers.iter().map(|one| one.text.clone()).collect::<Vec<_>>();
        assert_eq!(texts(&before), texts(&after), "the answers are what they were");
        assert_eq!(mains(scene).await, served, "main functions went on");
        let metrics = http::get(SocketAddr::new(gateway.ip(), 9090), "/metrics").await.body;
        let compared = format!("remoe_prediction_compared_requests{{model=\"{name}\"}}");
        assert!(metrics.contains(&compared), "{metrics}");
        let replans =
            release::operator_metrics(cluster).await.value("remoe_operator_replans_total{cause=\"drift\"}");
        assert!(replans >= 1, "{replans}");

        // The operator plans for the waking request if the plan differs; in any case it receives that request's
        // usage.
        gateways::wait_until_asleep(scene, &demo).await;
        let waking = tokio::spawn({
            let name = name.clone();
            async move { ask(gateway, &name, SCRIPTURE[0]).await }
        });
        until(LONG, "what those who wait are expected to use", async || {
            let demand = gateways::demand(scene, "demo").await;
            let said = demand["status"]["gateways"][0]["mix"].clone();
            (said["of"] == "Waiting" && said["requests"] == 1).then_some(())
        })
        .await;
        let woken = waking.await.unwrap();
        assert_eq!(woken.text, before[0].text);
        assert!(woken.remote <= before[0].remote, "{} of pairs are remote, {} were", woken.remote, before[0].remote);
        sleep(Duration::from_secs(1)).await;
        demo.delete().await;
        demo.wait_until_gone(scene).await;
    })
    .await;
}
