//! Pods that are deleted, killed or paused: the deployment recovers.

use crate::deployments::remote;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams};
use remoe_e2e::deployment::{CompletionStream, Deployment, chat};
use remoe_e2e::scene::Scene;
use remoe_e2e::{claim, pods, release};
use remoe_test_support::deadline::{LONG, until};
use remoe_test_support::process::signal;
use rustix::process::Signal;

const PROMPT: &str = "Read Genesis 1:1.";

/// Returns a pod's name without its unique suffix: its role and place.
fn place(pod: &Pod) -> String {
    let name = pod.name_any();
    name.rsplit_once('-').map_or(name.clone(), |(place, _)| place.to_owned())
}

async fn functions(scene: &Scene) -> Vec<Pod> {
    let mut pods = pods::list(scene, pods::FUNCTIONS).await;
    pods.sort_by_key(place);
    pods
}

/// Waits until each place has one ready pod, and `fits` holds for the one at `place_of`.
async fn healed(scene: &Scene, demo: &Deployment, before: &[Pod], hurt: &Pod, fits: impl Fn(&Pod) -> bool) {
    let places: Vec<String> = before.iter().map(place).collect();
    until(LONG, &format!("{} to be whole again", hurt.name_any()), async || {
        let now = functions(scene).await;
        let same = now.iter().map(place).eq(places.iter().cloned());
        let filled = now.iter().filter(|pod| place(pod) == place(hurt)).all(&fits);
        (same && filled && now.iter().all(pods::is_ready)).then_some(())
    })
    .await;
    demo.wait_until_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn functions_that_are_lost_come_back() {
    Scene::run("functions_that_are_lost_come_back", async |scene| {
        let _operator = release::shared(&scene.cluster).await;
        claim::with_demo_model(scene, "models").await;
        let demo = Deployment::apply(scene, "demo", &remote()).await;
        demo.wait_until_settled().await;
        let expected = chat(demo.client_addresses(scene).await[0], "demo", PROMPT).await;
        let api = scene.api::<Pod>();
        for hurt in functions(scene).await {
            let before = functions(scene).await;
            signal(pods::process_id(&hurt).expect("a ready function has a process"), Signal::KILL);
            healed(scene, &demo, &before, &hurt, |pod| {
                pod.uid() != hurt.uid() || pods::restart_count(pod) > pods::restart_count(&hurt)
            })
            .await;
        }
        for hurt in functions(scene).await {
            let before = functions(scene).await;
            api.delete(&hurt.name_any(), &DeleteParams::default()).await.unwrap();
            healed(scene, &demo, &before, &hurt, |pod| pod.uid() != hurt.uid()).await;
        }
        // A paused process is ended by its node and restarted.
        let before = functions(scene).await;
        let hurt = before.iter().find(|pod| !place(pod).starts_with("demo-main-")).unwrap();
        signal(pods::process_id(hurt).unwrap(), Signal::STOP);
        let again =
            |pod: &Pod| pod.uid() != hurt.uid() || pods::restart_count(pod) > pods::restart_count(hurt);
        healed(scene, &demo, &before, hurt, again).await;
        let answer = chat(demo.client_addresses(scene).await[0], "demo", PROMPT).await;
        assert_eq!(answer["choices"], expected["choices"]);
    })
    .await;
}

/// Clients of a main function do not notice failures of remote functions or of the operator.
#[tokio::test(flavor = "multi_thread")]
async fn stream_survives_failures_of_its_functions() {
    Scene::run("stream_survives_failures_of_its_functions", async |scene| {
        let _operator = release::shared(&scene.cluster).await;
        claim::with_demo_model(scene, "models").await;
        let demo = Deployment::apply(scene, "demo", &remote()).await;
        demo.wait_until_settled().await;
        let address = demo.client_addresses(scene).await[0];
        let undisturbed = CompletionStream::start(address, "demo", PROMPT).await.finish().await;
        let mut stream = CompletionStream::start(address, "demo", PROMPT).await;
        stream.next().await.expect("a first token");
        let remote = functions(scene).await.into_iter().filter(|pod| !place(pod).starts_with("demo-main-"));
        for (number, pod) in remote.enumerate() {
            match number % 3 {
                0 => signal(pods::process_id(&pod).expect("it runs"), Signal::KILL),
                1 => signal(pods::process_id(&pod).expect("it runs"), Signal::STOP),
                _ => {
                    let api = scene.api::<Pod>();
                    api.delete(&pod.name_any(), &DeleteParams::default()).await.unwrap();
                }
            }
            stream.next().await.expect("a further token");
        }
        let operators = Api::<Pod>::namespaced(scene.cluster.client.clone(), release::NAMESPACE);
        let selector = ListParams::default().labels("app.kubernetes.io/component=operator");
        let running = operators.list(&selector).await.unwrap().items;
        assert!(!running.is_empty(), "an operator runs");
        for operator in &running {
            signal(pods::process_id(operator).expect("a running operator has a process"), Signal::KILL);
        }
        assert_eq!(stream.finish().await, undisturbed);
        // It was killed and restarted.
        for operator in &running {
            let started_again = async || {
                let now = operators.get_opt(&operator.name_any()).await.unwrap();
                now.is_none_or(|now| pods::restart_count(&now) > pods::restart_count(operator)).then_some(())
            };
            until(LONG, "another start of the operator", started_again).await;
        }
        demo.wait_until_settled().await;
    })
    .await;
}
