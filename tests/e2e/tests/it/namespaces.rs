//! Release for selected namespaces of a cluster.

use futures_util::future::join;
use remoe_e2e::deployment::Deployment;
use remoe_e2e::scene::Scene;
use remoe_e2e::{demo, gateways, release, tool};
use remoe_test_support::http;
use serde_json::{Value, json};

/// The operator and the gateway serve both listed namespaces and have no rights in a third one.
#[tokio::test(flavor = "multi_thread")]
async fn two_namespaces_are_served_and_no_other() {
    const TEST: &str = "two_namespaces_are_served_and_no_other";
    let of_three = async |one: &Scene, two: &Scene, other: &Scene| {
        let cluster = &one.cluster;
        let mut installed = release::exclusive(cluster, 1).await;
        let list = format!("watchNamespaces={{{},{}}}", one.namespace, two.namespace);
        installed.install(cluster, &["replicas=1", &list, "identity.allNamespaces=false"]).await;
        let kubectl = cluster.tool("kubectl");
        let may = async |account: &str, verb: &str, scene: &Scene| {
            let asked =
                ["auth", "can-i", verb, "moedemands.remoe.dev", "--as", account, "-n", &scene.namespace];
            tool::attempt(&kubectl, &cluster.kubeconfig, &asked).await.is_ok()
        };
        for (account, verb) in [(release::ACCOUNT, "create"), (release::GATEWAY_ACCOUNT, "watch")] {
            for (scene, is_served) in [(one, true), (two, true), (other, false)] {
                assert_eq!(
                    may(account, verb, scene).await,
                    is_served,
                    "{account} {verb} {}",
                    scene.namespace
                );
            }
        }
        // The deployment in the unlisted namespace exists first.
        let unseen = Deployment::apply(other, "demo", &demo::spec(&json!({}))).await;
        let asleep = json!({"scaling": {"min": 0, "idleWindow": "3s"}});
        let served = join(demo::deploy(one, &json!({})), demo::deploy(two, &asleep)).await;
        gateways::wait_until_asleep(two, &served.1).await;
        let gateway = gateways::address(&gateways::pods(cluster, 1).await[0]);
        let name = |scene: &Scene| format!("{}/demo", scene.namespace);
        for scene in [one, two] {
            let answer = gateways::ask(gateway, gateway, &name(scene)).await;
            assert!(answer.body["choices"][0].is_object(), "{}", answer.body);
        }
        let listed: Value = serde_json::from_str(&http::get(gateway, "/v1/models").await.body).unwrap();
        let listed = listed["data"].as_array().unwrap().iter().filter_map(|model| model["id"].as_str());
        let listed: Vec<&str> = listed.collect();
        assert!(listed.contains(&name(one).as_str()) && listed.contains(&name(two).as_str()), "{listed:?}");
        assert!(!listed.contains(&name(other).as_str()), "{listed:?}");
        assert_eq!(unseen.status().await, Value::Null);
        for (scene, demo) in [(one, served.0), (two, served.1)] {
            demo.delete().await;
            demo.wait_until_gone(scene).await;
        }
    };
    Scene::run(TEST, async |one| {
        Scene::run(TEST, async |two| Scene::run(TEST, async |other| of_three(one, two, other).await).await)
            .await;
    })
    .await;
}
