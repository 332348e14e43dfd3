//! Deployments that never finish loading cost others nothing.

use crate::api::MoERecord;
use crate::build::CONTROL_PORT;
use crate::tests::api_server::stage::{Budget, LOOK, Operator, deploy_as, run_pods_at};
use crate::tests::api_server::{eventually, with_server};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::time::sleep;

/// As many as the operator works on at the same time by default.
const SILENT: usize = 8;
/// Main functions that accept and never answer; all of them, the healed deployment's too.
const ADDRESS: &str = "127.79.0.1";
/// What healing may take. Each silent main function alone would be waited for as long.
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
            let took = begun.elapsed();
            println!("healed in {took:?} beside {SILENT} silent deployments");
            assert!(took < HEALED, "healed in {took:?}");
        }
        operator.kill().await;
    });
}
