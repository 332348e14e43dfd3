//! Asking functions whether they are well.

use crate::control::{self, DescribingClient};
use crate::launcher::FunctionId;
use remoe_process::Role;
use remoe_proto::v1::DescribeMainRequest;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

/// A probe that is not answered within this time was not answered.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Between probes of a function that is ready.
const READY_INTERVAL: Duration = Duration::from_millis(500);
/// Between probes of a function that is not: its readiness is noticed soon, soonest when it has just begun.
const FIRST_INTERVAL: Duration = Duration::from_millis(5);
const UNREADY_INTERVAL: Duration = Duration::from_millis(50);

/// One answer.
pub(crate) struct ProbeResult {
    pub(crate) id: FunctionId,
    pub(crate) ready: bool,
    /// The generation that a main function has in force; 0: none.
    pub(crate) generation: u64,
}

/// Probes the function at `address` until the receiver of `answers` is gone. Probes without an answer are not reported.
pub(crate) async fn probe(
    id: FunctionId,
    role: Role,
    address: SocketAddr,
    answers: mpsc::Sender<ProbeResult>,
) {
    let Ok(channel) = control::channel(address) else { return };
    let mut unready = FIRST_INTERVAL;
    loop {
        let answer = timeout(PROBE_TIMEOUT, ask(role, channel.clone())).await.ok().flatten();
        if let Some((ready, generation)) = answer {
            let id = id.clone();
            if answers.send(ProbeResult { id, ready, generation }).await.is_err() {
                return;
            }
        }
        let ready = answer.is_some_and(|(ready, _)| ready);
        sleep(if ready { READY_INTERVAL } else { unready }).await;
        unready = (unready * 2).min(UNREADY_INTERVAL);
    }
}

/// Returns the readiness of the function and its generation; `None` if it does not answer.
async fn ask(role: Role, channel: Channel) -> Option<(bool, u64)> {
    match role {
        // A main function that answers at all can be given a routing, which makes it ready.
        Role::Main => {
            let mut client = DescribingClient::new(channel);
            let answer = client.describe(DescribeMainRequest::default()).await.ok()?;
            Some((true, answer.generation))
        }
        Role::Remote => {
            let request = HealthCheckRequest { service: "readiness".to_owned() };
            let answer = HealthClient::new(channel).check(request).await.ok()?;
            Some((answer.into_inner().status == i32::from(ServingStatus::Serving), 0))
        }
    }
}
