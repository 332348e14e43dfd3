//! gRPC clients of functions.

use prost::Message;
use remoe_proto::identity::{Connector, Trust};
use remoe_proto::v1::main_model_client::MainModelClient;
use remoe_proto::v1::{DescribeMainRequest, MainDescription, Routing, RoutingAck};
use remoe_proto::{
    ErrorCode, LimitedCodec, LimitedMessage, MAX_CONTROL_MESSAGE, MAX_DESCRIPTION, STREAM_WINDOW,
    ServiceError, largest_generation,
};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::timeout;
use tonic::Status;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};

/// Address of a function, and the identity that it must have.
#[derive(Debug, Clone)]
pub struct Callee {
    /// Address of the function.
    pub address: SocketAddr,
    /// Identity that it must have, and the certificate to present. Absent for any peer, without TLS.
    pub trust: Option<Trust>,
}

impl From<SocketAddr> for Callee {
    fn from(address: SocketAddr) -> Self {
        Self { address, trust: None }
    }
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval of polling a function.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Returns a channel to a function, which connects lazily and reconnects.
///
/// # Errors
/// The address is no valid URI.
pub fn channel(to: impl Into<Callee>) -> Result<Channel, ServiceError> {
    channel_of(to.into(), STREAM_WINDOW)
}

/// Returns a [`channel`] whose HTTP/2 receive window is `window` bytes.
fn channel_of(to: Callee, window: u32) -> Result<Channel, ServiceError> {
    let Callee { address, trust } = to;
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| ServiceError::new(ErrorCode::Internal, error.to_string()))?;
    Ok(endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .initial_stream_window_size(window)
        .initial_connection_window_size(window)
        .connect_with_connector_lazy(Connector::new(trust)))
}

/// Returns a client of a main function for inspections. It decodes answers of up to [`MAX_CONTROL_MESSAGE`].
///
/// # Errors
/// The address is no valid URI.
pub fn main_client(to: impl Into<Callee>) -> Result<MainModelClient<Channel>, ServiceError> {
    Ok(MainModelClient::new(channel(to)?).max_decoding_message_size(MAX_CONTROL_MESSAGE))
}

/// Client for `Describe` and `SetRouting`. It decodes answers of up to [`MAX_DESCRIPTION`], and counts their elements
/// before it decodes them, because the operator's tenants choose the images of main functions.
pub(crate) struct DescribingClient(Grpc<Channel>);

impl DescribingClient {
    pub(crate) fn new(channel: Channel) -> Self {
        Self(Grpc::new(channel).max_decoding_message_size(MAX_DESCRIPTION))
    }

    fn of(to: impl Into<Callee>) -> Result<Self, ServiceError> {
        Ok(Self::new(channel_of(to.into(), MAX_DESCRIPTION as u32)?))
    }

    pub(crate) async fn describe(
        &mut self,
        request: DescribeMainRequest,
    ) -> Result<MainDescription, ServiceError> {
        self.call(request, "/remoe.v1.MainModel/Describe").await
    }

    async fn set_routing(&mut self, routing: Routing) -> Result<RoutingAck, ServiceError> {
        self.call(routing, "/remoe.v1.MainModel/SetRouting").await
    }

    async fn call<T: Message + 'static, U: LimitedMessage>(
        &mut self,
        request: T,
        method: &'static str,
    ) -> Result<U, ServiceError> {
        let closed = |error: tonic::transport::Error| Status::unavailable(error.to_string());
        self.0.ready().await.map_err(|error| to_service_error(closed(error)))?;
        let (request, method) = (tonic::Request::new(request), PathAndQuery::from_static(method));
        let answer = self.0.unary(request, method, LimitedCodec::default()).await;
        Ok(answer.map_err(to_service_error)?.into_inner())
    }
}

/// Converts `status` to an error. If the answer was too large, the error names a remedy.
fn to_service_error(status: tonic::Status) -> ServiceError {
    // Only the local codec uses this code; main functions do not.
    if status.code() != tonic::Code::OutOfRange {
        return status.into();
    }
    // A retry would fail again.
    ServiceError::new(
        ErrorCode::InvalidArgument,
        format!(
            "cannot read the answer of the main function: expected at most {MAX_DESCRIPTION} bytes and as many elements \
             as models have ({}); run an image of this release",
            status.message()
        ),
    )
}

/// Puts `routing` in force in the main function `to`, within `deadline`. The answer names the generation in force,
/// which may be a later one. If the main function is too far behind, advances in several steps of the same placement.
///
/// # Errors
/// The main function refuses, cannot be reached, or takes too long.
pub async fn set_routing(
    to: impl Into<Callee>,
    routing: Routing,
    deadline: Duration,
) -> Result<RoutingAck, ServiceError> {
    let client = DescribingClient::of(to)?;
    timeout(deadline, advance(client, routing)).await.unwrap_or_else(|_elapsed| {
        Err(ServiceError::new(
            ErrorCode::DeadlineExceeded,
            format!("placement not in force within {deadline:?}"),
        ))
    })
}

async fn advance(mut client: DescribingClient, routing: Routing) -> Result<RoutingAck, ServiceError> {
    let mut in_force = 0;
    if routing.generation > largest_generation(in_force) {
        in_force = client.describe(DescribeMainRequest::default()).await?.generation;
    }
    loop {
        let generation = routing.generation.min(largest_generation(in_force));
        let step = Routing { generation, ..routing.clone() };
        let ack = client.set_routing(step).await?;
        if generation == routing.generation || ack.generation <= in_force {
            return Ok(ack);
        }
        in_force = ack.generation;
    }
}

/// Returns the number of running and queued requests of the main function `of`, within `deadline`.
///
/// # Errors
/// The main function cannot be reached, or takes too long.
pub async fn requests_in_flight(of: impl Into<Callee>, deadline: Duration) -> Result<u32, ServiceError> {
    Ok(describe(of, deadline).await?.in_flight)
}

/// Returns the description of the main function `of`, within `deadline`.
///
/// # Errors
/// The main function cannot be reached, or takes too long.
pub async fn describe(of: impl Into<Callee>, deadline: Duration) -> Result<MainDescription, ServiceError> {
    describe_with(of, DescribeMainRequest::default(), deadline).await
}

/// Waits until the main function `of` has read all of its local experts and what follows them, within `deadline`.
///
/// # Errors
/// The main function cannot be reached, or takes too long.
pub async fn all_experts_read(of: impl Into<Callee>, deadline: Duration) -> Result<(), ServiceError> {
    let of = of.into();
    let wait = async {
        while describe(of.clone(), deadline).await?.arriving > 0 {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    };
    timeout(deadline, wait).await.unwrap_or_else(|_elapsed| {
        Err(ServiceError::new(
            ErrorCode::DeadlineExceeded,
            format!("local experts not loaded within {deadline:?}"),
        ))
    })
}

/// Returns the description with usage counts of remote experts, within `deadline`.
///
/// # Errors
/// The main function cannot be reached, or takes too long.
pub async fn describe_uses(
    of: impl Into<Callee>,
    deadline: Duration,
) -> Result<MainDescription, ServiceError> {
    describe_with(of, DescribeMainRequest { pairs: true }, deadline).await
}

async fn describe_with(
    of: impl Into<Callee>,
    request: DescribeMainRequest,
    deadline: Duration,
) -> Result<MainDescription, ServiceError> {
    let mut client = DescribingClient::of(of)?;
    match timeout(deadline, client.describe(request)).await {
        Ok(answer) => answer,
        Err(_elapsed) => Err(ServiceError::new(
            ErrorCode::DeadlineExceeded,
            format!("no description from the function within {deadline:?}"),
        )),
    }
}
