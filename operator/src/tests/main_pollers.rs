//! Pollers of main functions: no reconcile waits for one, the next one finds its observation.

use crate::main_client::tests::largest_description;
use crate::main_client::{GenerationOutcome, RoutingOrder};
use crate::main_pollers::{MainObservation, MainPollers, PolledMain};
use crate::ports::CONTROL_PORT;
use crate::testing::example::deployment;
use crate::tests::api_server::routing_push::RecordingMain;
use remoe_proto::v1::{LayerPairs, MainDescription, Routing};
use remoe_proto::{MAX_DESCRIPTION, placement_digest};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;

fn polled_main(uid: &str, ip: &str, order: Option<u64>) -> PolledMain {
    let order = order.map(|number| {
        let routing = Routing { generation: number, ..Routing::default() };
        Arc::new(RoutingOrder { number, routing: Ok(routing) })
    });
    PolledMain { uid: uid.to_owned(), ip: ip.parse().unwrap(), order, starting: false, watched: None }
}

/// One of two main functions accepts connections and never answers. The other one is polled and gets its generation,
/// no reconcile waits, and ended pollers are dropped.
#[tokio::test]
async fn silent_main_function_delays_no_other() {
    let (silent, talking) = ("127.78.0.1", "127.78.0.2");
    let _accepts = TcpListener::bind((silent, CONTROL_PORT)).await.unwrap();
    let main = RecordingMain::at(talking).await;
    let owner = deployment(json!({}));
    let (main_pollers, mut reconcile_requests) = MainPollers::new();
    main_pollers.poll_only(
        &owner,
        vec![polled_main("a", silent, Some(3)), polled_main("b", talking, None)],
        None,
    );
    assert!(
        main_pollers
            .observations(&owner)
            .values()
            .all(|observation| *observation == MainObservation::default())
    );

    let looked_at = reconcile_requests.recv().await.unwrap();
    assert_eq!(looked_at.name, "demo");
    let observed = main_pollers.observations(&owner);
    assert_eq!((observed["a"].in_force, observed["b"].in_force), (None, Some(0)));

    main_pollers.poll_only(
        &owner,
        vec![polled_main("a", silent, Some(3)), polled_main("b", talking, Some(3))],
        None,
    );
    reconcile_requests.recv().await.unwrap();
    let placement = placement_digest(&Routing::default());
    let received = Some((3, GenerationOutcome::InForce { problems: Vec::new() }));
    let observation = main_pollers.observations(&owner)["b"].clone();
    assert_eq!(
        (observation.in_force, observation.placement, observation.last_outcome),
        (Some(3), placement, received)
    );
    // Compute time of its remote functions, by its own clock.
    let worked = observation.worked.unwrap();
    assert_eq!(worked.age, Duration::from_secs(9));
    assert_eq!(worked.computed, [("10.0.0.9:9001".to_owned(), Duration::from_millis(1500))].into());
    assert_eq!(main.received().len(), 1);
    // Reported once.
    assert_eq!(main_pollers.observations(&owner)["b"].last_outcome, None);

    main_pollers.poll_only(&owner, vec![polled_main("b", talking, Some(3))], None);
    assert_eq!(main_pollers.observations(&owner).len(), 1);
    main_pollers.end(&looked_at);
    assert!(main_pollers.observations(&owner).is_empty());
}

/// Two main functions close every connection. Only the starting one is polled at short intervals, not the one that
/// was ready before.
#[tokio::test]
async fn only_a_main_function_that_starts_is_asked_at_short_intervals() {
    let ips = ["127.78.0.3", "127.78.0.4"];
    let mut asked = Vec::new();
    for ip in ips {
        let listener = TcpListener::bind((ip, CONTROL_PORT)).await.unwrap();
        let (count, counted) = watch::channel(0);
        tokio::spawn(async move {
            while let Ok((refused, _)) = listener.accept().await {
                drop(refused);
                count.send_modify(|count| *count += 1);
            }
        });
        asked.push(counted);
    }
    let polled_mains = [true, false].into_iter().zip(ips);
    let polled_mains =
        polled_mains.map(|(starting, ip)| PolledMain { starting, ..polled_main(ip, ip, None) }).collect();
    let (main_pollers, _news) = MainPollers::new();
    main_pollers.poll_only(&deployment(json!({})), polled_mains, None);
    asked[1].wait_for(|count| *count > 0).await.unwrap();
    asked[0].wait_for(|count| *count >= 20).await.unwrap();
    let other = *asked[1].borrow();
    assert!(other < 10, "asked {other} times");
}

/// Three main functions: one returns the largest honest description, one a larger one, one an invalid placement. The
/// last two are rejected with a message for the user.
#[tokio::test]
async fn description_too_large_is_told_and_not_read() {
    let ips = ["127.78.0.5", "127.78.0.6", "127.78.0.7"];
    let pairs = LayerPairs { layer: 0, experts: Vec::new(), pairs: vec![u64::MAX; 200_000] };
    let huge = MainDescription { pairs: vec![pairs], ..MainDescription::default() };
    let wrong = MainDescription { placement: "g".repeat(1000), ..MainDescription::default() };
    for (ip, description) in ips.into_iter().zip([largest_description(), huge, wrong]) {
        RecordingMain::describing(ip, description).await;
    }
    let owner = deployment(json!({}));
    let (main_pollers, mut reconcile_requests) = MainPollers::new();
    let keep = || {
        let polled_mains = ips.map(|ip| polled_main(ip, ip, Some(3))).into();
        main_pollers.poll_only(&owner, polled_mains, None);
    };
    keep();
    let observed = loop {
        reconcile_requests.recv().await.unwrap();
        let observed = main_pollers.observations(&owner);
        if observed.values().all(|observation| *observation != MainObservation::default()) {
            break observed;
        }
    };
    assert_eq!(observed[ips[0]].in_force, Some(u64::MAX));
    assert_eq!(observed[ips[0]].worked.as_ref().map(|worked| worked.computed.len()), Some(8192));
    let expected = [format!("expected at most {MAX_DESCRIPTION} bytes"), "invalid `placement`".to_owned()];
    for (ip, expected) in ips[1..].iter().zip(expected) {
        let MainObservation { in_force, last_outcome: Some((3, GenerationOutcome::Failed(message))), .. } =
            &observed[*ip]
        else {
            panic!("{:?}", observed[*ip])
        };
        assert!(in_force.is_none() && message.contains(&expected), "{message}");
    }
}
