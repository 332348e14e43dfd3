//! Health probes of functions.

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

/// Timeout of a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval of probes of a ready function.
const READY_INTERVAL: Duration = Duration::from_millis(500);
/// Initial and maximum interval of probes of an unready function, so that its readiness is noticed soon.
const FIRST_INTERVAL: Duration = Duration::from_millis(5);
const UNREADY_INTERVAL: Duration = Duration::from_millis(50);

/// Answer to a probe.
pub(crate) struct ProbeResult {
    pub(crate) id: FunctionId,
    pub(crate) ready: bool,
    /// Generation that a main function has in force; 0 if none.
    pub(crate) generation: u64,
}

/// Probes the function at `address` until the receiver of `answers` is dropped. Unanswered probes are not reported.
pub(crate) async fn probe(
    id: FunctionId,
    role: Role,
    address: SocketAddr,
    answers: mpsc::Sender<ProbeResult>,
) {
    let Ok(channel) = control::channel(address) else { return };
    let mut unready_interval = FIRST_INTERVAL;
    loop {
        let answer = timeout(PROBE_TIMEOUT, probe_once(role, channel.clone())).await.ok().flatten();
        if let Some((ready, generation)) = answer {
            let id = id.clone();
            if answers.send(ProbeResult { id, ready, generation }).await.is_err() {
                return;
            }
        }
        let ready = answer.is_some_and(|(ready, _)| ready);
        sleep(if ready { READY_INTERVAL } else { unready_interval }).await;
        unready_interval = (unready_interval * 2).min(UNREADY_INTERVAL);
    }
}

/// Returns the readiness of the function and its generation; `None` if it does not answer.
async fn probe_once(role: Role, channel: Channel) -> Option<(bool, u64)> {
    match role {
        // A main function that answers can receive a routing, which makes it ready.
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
