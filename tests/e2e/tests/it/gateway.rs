//! Scale to zero and wake through the gateway of the installed chart.

use futures_util::future::join_all;
use remoe_e2e::scene::Scene;
use remoe_e2e::{audit, demo, gateways, release};
use remoe_test_support::http;
use serde_json::{Value, json};

/// One wake from zero gives fifty answers; then the deployment scales to zero again. Nothing is left after its
/// deletion.
#[tokio::test(flavor = "multi_thread")]
async fn fifty_requests_wake_a_deployment_once() {
    Scene::run("fifty_requests_wake_a_deployment_once", async |scene| {
        let cluster = &scene.cluster;
        let _release = release::shared(cluster).await;
        let start = audit::position(cluster);
        let more = json!({
            "servedName": "served",
            "scaling": {"min": 0, "idleWindow": "3s"},
        });
        let demo = demo::deploy(scene, &more).await;
        gateways::wait_until_asleep(scene, &demo).await;
        let gateway = gateways::address(&gateways::pods(cluster, 1).await[0]);
        let name = format!("{}/demo", scene.namespace);
        let listed: Value = serde_json::from_str(&http::get(gateway, "/v1/models").await.body).unwrap();
        let ours = listed["data"].as_array().unwrap().iter().find(|model| model["id"] == name.as_str());
        assert_eq!(ours.unwrap()["state"], "asleep");

        let answers = join_all((0..50).map(|_| gateways::ask(gateway, gateway, &name))).await;
        let mut shares = Vec::new();
        for answer in &answers {
            let (accounted, took) = (answer.accounted().as_secs_f64(), answer.took.as_secs_f64());
            // Fifty clients on a busy host add time that the gateway cannot know; a forgotten part of a wake would
            // add more.
            let usage = &answer.body["usage"];
            assert!(accounted <= took && accounted >= 0.8 * took, "{accounted} s of {took} s: {usage}");
            shares.push(accounted / took);
            assert_eq!(answer.body["choices"], answers[0].body["choices"]);
            assert_eq!(answer.body["model"], "served");
        }
        shares.sort_by(f64::total_cmp);
        eprintln!("of what clients saw {:.3} to {:.3} is told", shares[0], shares[49]);
        assert!(shares[25] >= 0.9, "{shares:?}");
        assert_eq!(gateways::demand(scene, "demo").await["spec"]["wakes"], 1);
        eprintln!("a wake for fifty: {}", answers[0].body["usage"]["remoe"]["timing"]);
        gateways::wait_until_asleep(scene, &demo).await;
        let counted = release::operator_metrics(cluster).await;
        for (series, least) in [("wakes_total", 1), ("sleeps_total", 2), ("wake_seconds_count", 1)] {
            let series = format!("remoe_operator_{series}");
            assert!(counted.value(&series) >= least, "{series}: {}", counted.value(&series));
        }
        demo.delete().await;
        demo.wait_until_gone(scene).await;
        let accounts = [release::ACCOUNT, release::GATEWAY_ACCOUNT];
        let asked = audit::entries_since(cluster, start).into_iter();
        let denied: Vec<_> = asked.filter(|each| accounts.contains(&each.user()) && each.denied()).collect();
        assert!(denied.is_empty(), "the chart's roles do not reach: {denied:?}");
    })
    .await;
}
