//! Deployments that never finish loading, or whose plans take minutes, cost others nothing.

use crate::api::{ConditionType, MoEDeployment, MoERecord};
use crate::build::CONTROL_PORT;
use crate::facts::ModelFacts;
use crate::testing::example::facts;
use crate::tests::api_server::stage::{Budget, LOOK, Operator, deploy_as, deploy_model, run_pods_at};
use crate::tests::api_server::{Server, eventually, with_server};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::time::sleep;

/// As many as the operator works on at the same time by default.
const SILENT: usize = 8;
/// Main functions that accept and never answer; all of them, the healed deployment's too.
const ADDRESS: &str = "127.79.0.1";
/// What healing may take. Each silent main function alone would be waited for as long.
const HEALED: Duration = Duration::from_secs(2);

/// Layers and experts of a model whose plan takes longer than the test.
const HUGE: (usize, usize) = (600, 512);

/// A model with so many layers and experts.
fn huge() -> ModelFacts {
    let mut facts = facts();
    let (layers, experts) = HUGE;
    let model = &mut facts.inspection;
    let layer_bytes = model.non_expert_layer_bytes[0];
    (model.layers, model.moe_layers, model.experts) = (layers, (0..layers).collect(), experts);
    model.non_expert_layer_bytes = vec![layer_bytes; layers];
    facts
}

/// Names of the deployments that are being planned for the first time.
async fn planning(server: &Server) -> Vec<String> {
    let list = server.api::<MoEDeployment>().list(&ListParams::default()).await.unwrap();
    let is_planning = |owner: &MoEDeployment| {
        let planned = owner.status.as_ref().and_then(|status| status.condition(ConditionType::Planned));
        planned.is_some_and(|planned| planned.reason == "Planning")
    };
    list.items.iter().filter(|owner| is_planning(owner)).map(ResourceExt::name_any).collect()
}

#[test]
fn eight_slow_plans_do_not_delay_a_ninth_deployment() {
    with_server(async |server| {
        let healed = "healed";
        deploy_as(&server, healed).await;
        let operator = Operator::start(&server, Budget::unlimited()).await;
        let pods = server.api::<Pod>();
        let selector =
            ListParams::default().labels(&format!("remoe.dev/deployment={healed},remoe.dev/function=main"));
        eventually("main functions", async || {
            run_pods_at(&server, |_| ADDRESS.to_owned()).await;
            pods.list(&selector).await.unwrap().items.len() == 2
        })
        .await;
        let spec = json!({"remoteExperts": {"mode": "Always"}});
        for number in 0..SILENT {
            deploy_model(&server, &format!("slow{number}"), &spec, &huge()).await;
        }
        eventually("eight searches", async || planning(&server).await.len() == SILENT).await;
        for _ in 0..3 {
            let took = heal(&pods, &selector).await;
            println!("healed in {took:?} beside {SILENT} slow plans");
            assert!(took < HEALED, "healed in {took:?}");
        }
        assert_eq!(planning(&server).await.len(), SILENT, "all of them are still being planned");
        operator.kill().await;
    });
}

/// Deletes a main function and waits for another in its place. Returns the time that it took.
async fn heal(pods: &Api<Pod>, selector: &ListParams) -> Duration {
    let before = pods.list(selector).await.unwrap().items;
    let lost = before.first().unwrap();
    let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    pods.delete(&lost.name_any(), &at_once).await.unwrap();
    let begun = Instant::now();
    eventually("another pod in its place", async || {
        let now = pods.list(selector).await.unwrap().items;
        now.len() == before.len() && now.iter().all(|pod| pod.uid() != lost.uid())
    })
    .await;
    begun.elapsed()
}

#[test]
fn eight_silent_deployments_do_not_delay_a_ninth() {
    with_server(async |server| {
        let _accepts = TcpListener::bind((ADDRESS, CONTROL_PORT)).await.unwrap();
        let names: Vec<String> = (0..=SILENT).map(|number| format!("demo{number}")).collect();
        for name in &names {
            deploy_as(&server, name).await;
        }
        let operator = Operator::start(&server, Budget::unlimited()).await;
        let records = server.api::<MoERecord>();
        eventually("the routing of all of them", async || {
            run_pods_at(&server, |_| ADDRESS.to_owned()).await;
            sleep(LOOK).await;
            let list = records.list(&ListParams::default()).await.unwrap();
            list.items.iter().filter(|record| record.name_any().ends_with("-routing")).count() == names.len()
        })
        .await;
        let healed = &names[SILENT];
        let pods = server.api::<Pod>();
        let selector =
            ListParams::default().labels(&format!("remoe.dev/deployment={healed},remoe.dev/function=main"));
        for _ in 0..3 {
            let took = heal(&pods, &selector).await;
            println!("healed in {took:?} beside {SILENT} silent deployments");
            assert!(took < HEALED, "healed in {took:?}");
        }
        operator.kill().await;
    });
}
