//! Speaking to functions over gRPC.

use remoe_wire::v1::main_model_client::MainModelClient;
use remoe_wire::v1::{Routing, RoutingAck};
use remoe_wire::{ErrorCode, MAX_CONTROL_MESSAGE, STREAM_WINDOW, ServiceError};
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

/// Has the main function at `address` put `routing` in force, within `deadline`.
///
/// # Errors
/// It refuses, cannot be reached, or takes too long.
pub async fn set_routing(
    address: SocketAddr,
    routing: Routing,
    deadline: Duration,
) -> Result<RoutingAck, ServiceError> {
    let mut client = main_client(address)?;
    match timeout(deadline, client.set_routing(routing)).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_elapsed) => Err(ServiceError::new(
            ErrorCode::DeadlineExceeded,
            format!("the routing was not in force within {deadline:?}"),
        )),
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
pub(crate) async fn describe(
    address: SocketAddr,
    deadline: Duration,
) -> Result<remoe_wire::v1::MainDescription, ServiceError> {
    let mut client = main_client(address)?;
    match timeout(deadline, client.describe(remoe_wire::v1::DescribeMainRequest {})).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_elapsed) => {
            Err(ServiceError::new(ErrorCode::DeadlineExceeded, format!("no description within {deadline:?}")))
        }
    }
}
