//! Connections: how many there are, and how long each may keep the server waiting.
//!
//! `axum::serve` owns the sockets and knows no deadlines. Each connection has a second handle of its
//! socket in its [`line`], and a task that ends it when it is the client's turn for too long: to bring a
//! request (its whole head), or to take what it was sent. Ending a connection drops the answer that it
//! was given, and so the engine's work on it. Where all places are taken, the [`listener`] lets the
//! connection go that has been without a request for longest.

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

/// Most of an answer that is handed over at once, so that taking a long one shows as progress.
const PIECE: usize = 64 << 10;

/// Serves `routes` on `listener` until `stop`, to clients that pass the `handshake`; without one to all, without TLS.
/// Requests that are there by then are answered. Each request has the address of its client in its extensions, as
/// [`ConnectInfo`].
///
/// The future is boxed, so that a server is compiled here and not once more in every program and test that has one.
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
    let server = axum::serve(listener, Connections { routes }).with_graceful_shutdown(stop.cancelled_owned());
    Box::pin(async move { server.await })
}

/// Gives every accepted connection its service.
struct Connections {
    routes: Router,
}

impl Service<IncomingStream<'_, LimitedListener>> for Connections {
    type Response = Connection;
    type Error = Infallible;
    type Future = Ready<Result<Connection, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, incoming: IncomingStream<'_, LimitedListener>) -> Self::Future {
        ready(Ok(Connection {
            routes: self.routes.clone(),
            line: incoming.io().line().clone(),
            client: *incoming.remote_addr(),
        }))
    }
}

/// The service of one connection.
#[derive(Clone)]
struct Connection {
    routes: Router,
    line: Arc<ConnectionDeadlines>,
    client: SocketAddr,
}

impl Service<Request> for Connection {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<Request>::poll_ready(&mut self.routes, context)
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        request.extensions_mut().insert(ConnectInfo(self.client));
        let turn = RequestGuard::begin(&self.line, request.version() == Version::HTTP_2);
        let answer = self.routes.call(request);
        Box::pin(async move {
            let response = answer.await?;
            if response.body().is_end_stream() {
                return Ok(response);
            }
            Ok(response.map(|body| Body::new(Handover { body, rest: Bytes::new(), turn })))
        })
    }
}

/// The body of an answer. It is asked for more once what it gave before is on its way.
struct Handover {
    body: Body,
    rest: Bytes,
    turn: RequestGuard,
}

impl HttpBody for Handover {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Pending => {
                    self.turn.works();
                    return Poll::Pending;
                }
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) => self.rest = bytes,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Poll::Ready(end) => return Poll::Ready(end),
            }
        }
        let piece = self.rest.len().min(PIECE);
        let piece = self.rest.split_to(piece);
        self.turn.hands_over();
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
