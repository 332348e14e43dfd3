//! Deployments that come and go beside another tenant's.

use crate::main_pollers::{MainPollers, PolledMain};
use crate::testing::example::deployment;
use crate::tests::api_server::routing_push::RecordingMain;
use kube::runtime::reflector::ObjectRef;
use remoe_test_support::hostile::{Cases, chart_limit, has_grown_little, resident};
use serde_json::json;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};

/// Timeout of every wait.
const LONG: Duration = Duration::from_secs(30);

fn polled_main(uid: String, ip: IpAddr) -> PolledMain {
    PolledMain { uid, ip, order: None, starting: true, watched: None }
}

#[tokio::test]
async fn created_and_deleted_deployments_leave_no_task() {
    let cases = Cases::new("deployments that come and go", 300);
    let neighbour = deployment(json!({}));
    let ip = "127.78.0.8";
    let _main = RecordingMain::at(ip).await;
    let (main_pollers, mut reconcile_requests) = MainPollers::new();
    let keep =
        || main_pollers.poll_only(&neighbour, vec![polled_main("honest".into(), ip.parse().unwrap())], None);
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let (before, bytes) = (tasks(), resident());
    for number in 0..cases.count() {
        let mut dice = cases.choices(number);
        let mut owner = deployment(json!({}));
        // Some reuse an earlier name.
        owner.metadata.name = Some(format!("hostile-{}", dice.below(cases.count())));
        owner.metadata.uid = Some(format!("uid-{number}"));
        let pods = (0..dice.below(200)).map(|pod| {
            // Nothing listens there.
            let ip = Ipv4Addr::new(127, 79, dice.draw() as u8, dice.draw() as u8);
            polled_main(format!("{number}-{pod}"), ip.into())
        });
        main_pollers.poll_only(&owner, pods.collect(), None);
        if number % 16 == 0 {
            keep();
            sleep(Duration::from_millis(1)).await;
        }
        main_pollers.end(&ObjectRef::from_obj(&owner));
        assert!(main_pollers.observations(&owner).is_empty());
    }
    keep();
    let observed_in_force = async {
        while main_pollers.observations(&neighbour)["honest"].in_force.is_none() {
            reconcile_requests.recv().await.unwrap();
        }
    };
    timeout(LONG, observed_in_force).await.expect("another tenant's main function is heard");
    main_pollers.end(&ObjectRef::from_obj(&neighbour));
    let ended = async {
        while tasks() > before {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, ended).await.expect("tasks of deleted deployments end");
    has_grown_little(bytes, chart_limit("resources"));
}
