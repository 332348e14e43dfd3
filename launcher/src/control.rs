//! Speaking to functions over gRPC.

use remoe_wire::v1::main_model_client::MainModelClient;
use remoe_wire::v1::{DescribeMainRequest, Routing, RoutingAck};
use remoe_wire::{ErrorCode, MAX_CONTROL_MESSAGE, STREAM_WINDOW, ServiceError, largest_generation};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A channel to a function. It connects when it is used, and again when the connection is lost.
///
/// # Errors
/// The address cannot be written as a URI.
pub fn channel(address: SocketAddr) -> Result<Channel, ServiceError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| ServiceError::new(ErrorCode::Internal, error.to_string()))?;
    Ok(endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(STREAM_WINDOW)
        .connect_lazy())
}

/// A client of the main function at `address`.
///
/// # Errors
/// The address cannot be written as a URI.
pub fn main_client(address: SocketAddr) -> Result<MainModelClient<Channel>, ServiceError> {
    Ok(MainModelClient::new(channel(address)?).max_decoding_message_size(MAX_CONTROL_MESSAGE))
}

/// Has the main function at `address` put `routing` in force, within `deadline`. The answer names the
/// generation that is in force then, which is another one's where it is later. A number that the main
/// function is too far behind of is reached in steps of the same placement.
///
/// # Errors
/// It refuses, cannot be reached, or takes too long.
pub async fn set_routing(
    address: SocketAddr,
    routing: Routing,
    deadline: Duration,
) -> Result<RoutingAck, ServiceError> {
    let client = main_client(address)?;
    timeout(deadline, advance(client, routing)).await.unwrap_or_else(|_elapsed| {
        Err(ServiceError::new(
            ErrorCode::DeadlineExceeded,
            format!("the routing was not in force within {deadline:?}"),
        ))
    })
}

async fn advance(mut client: MainModelClient<Channel>, routing: Routing) -> Result<RoutingAck, ServiceError> {
    let mut in_force = 0;
    if routing.generation > largest_generation(in_force) {
        in_force = client.describe(DescribeMainRequest {}).await?.into_inner().generation;
    }
    loop {
        let generation = routing.generation.min(largest_generation(in_force));
        let step = Routing { generation, ..routing.clone() };
        let ack = client.set_routing(step).await?.into_inner();
        if generation == routing.generation || ack.generation <= in_force {
            return Ok(ack);
        }
        in_force = ack.generation;
    }
}

/// How many requests the main function at `address` runs or keeps waiting, within `deadline`.
///
/// # Errors
/// It cannot be reached, or takes too long.
pub async fn requests_in_flight(address: SocketAddr, deadline: Duration) -> Result<u32, ServiceError> {
    Ok(describe(address, deadline).await?.in_flight)
}

/// What the main function at `address` is and has in force, within `deadline`.
///
/// # Errors
/// It cannot be reached, or takes too long.
pub async fn describe(
    address: SocketAddr,
    deadline: Duration,
) -> Result<remoe_wire::v1::MainDescription, ServiceError> {
    let mut client = main_client(address)?;
    match timeout(deadline, client.describe(DescribeMainRequest {})).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_elapsed) => {
            Err(ServiceError::new(ErrorCode::DeadlineExceeded, format!("no description within {deadline:?}")))
        }
    }
}
