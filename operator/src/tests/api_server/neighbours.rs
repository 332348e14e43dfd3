//! Deployments that never finish loading, or whose plans take long, do not delay others.

use crate::facts::ModelFacts;
use crate::ports::CONTROL_PORT;
use crate::testing::example::facts;
use crate::tests::api_server::stage::{
    Budget, Operator, POLL_INTERVAL, deploy_as, deploy_model, run_pods, run_pods_at,
};
use crate::tests::api_server::{Server, eventually, with_server};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams};
use remoe_api::{ConditionType, MoEDeployment, MoERecord};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::time::sleep;

/// Default number of concurrent reconciles.
const SILENT: usize = 8;
/// Deployments with slow plans.
const SLOW: usize = 8;
/// Main functions that accept connections and never answer, including those of the healed deployment.
const ADDRESS: &str = "127.79.0.1";
/// Time limit of healing. Waiting for one silent main function alone takes as long.
const HEALED: Duration = Duration::from_secs(2);

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
            sleep(POLL_INTERVAL).await;
            let list = records.list(&ListParams::default()).await.unwrap();
            list.items.iter().filter(|record| record.name_any().ends_with("-routing")).count() == names.len()
        })
        .await;
        for _ in 0..3 {
            let took = heal(&server, &names[SILENT]).await;
            println!("healed in {took:?} beside {SILENT} silent deployments");
            assert!(took < HEALED, "healed in {took:?}");
        }
        operator.kill().await;
    });
}

/// Deletes a main function of `deployment`. Returns the time until its replacement exists.
async fn heal(server: &Server, deployment: &str) -> Duration {
    let pods = server.api::<Pod>();
    let selector =
        ListParams::default().labels(&format!("remoe.dev/deployment={deployment},remoe.dev/function=main"));
    let before = pods.list(&selector).await.unwrap().items;
    let lost = before.first().unwrap();
    let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    pods.delete(&lost.name_any(), &at_once).await.unwrap();
    let begun = Instant::now();
    eventually("another pod in its place", async || {
        let now = pods.list(&selector).await.unwrap().items;
        now.len() == before.len() && now.iter().all(|pod| pod.uid() != lost.uid())
    })
    .await;
    begun.elapsed()
}

/// Model whose plan takes minutes.
fn huge() -> ModelFacts {
    let mut facts = facts();
    let model = &mut facts.inspection;
    (model.layers, model.experts, model.top_k) = (256, 512, 8);
    model.moe_layers = (0..model.layers).collect();
    model.non_expert_layer_bytes = vec![102_912; model.layers];
    facts
}

#[test]
fn slow_plans_of_eight_do_not_delay_healing_of_ninth_deployment() {
    with_server(async |server| {
        let operator = Operator::start(&server, Budget::unlimited()).await;
        deploy_as(&server, "other").await;
        let pods = server.api::<Pod>();
        let of_other = ListParams::default().labels("remoe.dev/deployment=other,remoe.dev/function=main");
        eventually("the main functions of the ninth", async || {
            run_pods(&server).await;
            sleep(POLL_INTERVAL).await;
            pods.list(&of_other).await.unwrap().items.len() == 2
        })
        .await;
        let names: Vec<String> = (0..SLOW).map(|number| format!("demo{number}")).collect();
        for name in &names {
            deploy_model(&server, name, &huge()).await;
        }
        let deployments = server.api::<MoEDeployment>();
        let planning = async || {
            let list = deployments.list(&ListParams::default()).await.unwrap().items;
            let statuses = list.iter().filter_map(|owner| owner.status.as_ref());
            let planned = statuses.filter_map(|status| status.condition(ConditionType::Planned));
            planned.filter(|condition| condition.reason == "Planning").count()
        };
        eventually("the planning of eight deployments", async || {
            sleep(POLL_INTERVAL).await;
            planning().await == SLOW
        })
        .await;
        for _ in 0..3 {
            let took = heal(&server, "other").await;
            println!("healed in {took:?} beside {} plans that are made", planning().await);
            assert!(took < HEALED, "healed in {took:?}");
        }
        assert_eq!(planning().await, SLOW, "no plan of these takes less than three healings");
        operator.kill().await;
    });
}
