//! Connections: limits of their number, and of the time that each may keep the server waiting.
//!
//! `axum::serve` owns the sockets and has no deadlines. So [`deadlines`] keeps a second handle of each socket, and a
//! task that ends the connection when the client is too late: with the head of a request, or with reading its answer.
//! Ending a connection drops the answer, and so stops the engine's work on it. If all slots are in use, the
//! [`listener`] displaces the connection that has been idle for longest.

mod deadlines;
mod limits;
mod listener;
mod metrics;

pub use limits::ConnectionLimits;
pub use metrics::ConnectionMetrics;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::{ConnectInfo, Request};
use axum::http::Version;
use axum::response::Response;
use axum::serve::IncomingStream;
use bytes::Bytes;
use deadlines::{ConnectionDeadlines, RequestGuard};
use futures_util::future::BoxFuture;
use http_body::{Frame, SizeHint};
use listener::LimitedListener;
use remoe_proto::TlsHandshake;
use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower_service::Service;

/// Largest piece of an answer that is passed on at once, in bytes, so that reading a long answer shows as progress.
const MAX_PIECE_BYTES: usize = 64 << 10;

/// Serves `routes` on `listener` until `stop`, then completes the requests in flight. Clients must pass the
/// `handshake`; without one, all are served in plaintext. Each request has the client's address in its extensions, as
/// [`ConnectInfo`].
///
/// The future is boxed, so that it is compiled once here and not in every program and test.
///
/// # Errors
/// The server fails.
pub fn serve(
    listener: TcpListener,
    handshake: Option<TlsHandshake>,
    routes: Router,
    limits: ConnectionLimits,
    metrics: ConnectionMetrics,
    stop: CancellationToken,
) -> BoxFuture<'static, io::Result<()>> {
    let listener = LimitedListener::new(listener, handshake, limits, metrics);
    let server =
        axum::serve(listener, MakeConnection { routes }).with_graceful_shutdown(stop.cancelled_owned());
    Box::pin(async move { server.await })
}

/// Makes the service of each accepted connection.
struct MakeConnection {
    routes: Router,
}

impl Service<IncomingStream<'_, LimitedListener>> for MakeConnection {
    type Response = ConnectionService;
    type Error = Infallible;
    type Future = Ready<Result<ConnectionService, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, incoming: IncomingStream<'_, LimitedListener>) -> Self::Future {
        ready(Ok(ConnectionService {
            routes: self.routes.clone(),
            deadlines: incoming.io().deadlines().clone(),
            client: *incoming.remote_addr(),
        }))
    }
}

/// The service of one connection.
#[derive(Clone)]
struct ConnectionService {
    routes: Router,
    deadlines: Arc<ConnectionDeadlines>,
    client: SocketAddr,
}

impl Service<Request> for ConnectionService {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<Request>::poll_ready(&mut self.routes, context)
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        request.extensions_mut().insert(ConnectInfo(self.client));
        let guard = RequestGuard::begin(&self.deadlines, request.version() == Version::HTTP_2);
        let answer = self.routes.call(request);
        Box::pin(async move {
            let response = answer.await?;
            if response.body().is_end_stream() {
                return Ok(response);
            }
            Ok(response.map(|body| Body::new(PacedBody { body, rest: Bytes::new(), guard })))
        })
    }
}

/// Body of an answer, which tells the deadlines when the client must read. The server polls it for more once the
/// previous piece is written.
struct PacedBody {
    body: Body,
    /// Rest of the last frame.
    rest: Bytes,
    guard: RequestGuard,
}

impl HttpBody for PacedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Pending => {
                    self.guard.wait_for_server();
                    return Poll::Pending;
                }
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) => self.rest = bytes,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Poll::Ready(end) => return Poll::Ready(end),
            }
        }
        let piece = self.rest.len().min(MAX_PIECE_BYTES);
        let piece = self.rest.split_to(piece);
        self.guard.wait_for_client();
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn size_hint(&self) -> SizeHint {
        let (rest, mut hint) = (self.rest.len() as u64, self.body.size_hint());
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper.saturating_add(rest));
        }
        hint.set_lower(hint.lower().saturating_add(rest));
        hint
    }
}
