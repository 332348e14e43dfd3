//! Tower layer of the intake, around a server's services.

use super::body::{MessageReader, MeteredBody};
use super::{Intake, PeerInfo, RequestReader};
use futures_util::future::{Either, Ready, ready};
use http::{Request, Response};
use std::task::{Context, Poll};
use tonic::Status;
use tonic::body::Body;
use tower::Service;

/// Service that limits the requests to `S` by its [`Intake`].
#[derive(Clone)]
pub struct IntakeService<S> {
    intake: Intake,
    inner: S,
}

impl<S> IntakeService<S> {
    pub(super) fn new(intake: Intake, inner: S) -> Self {
        Self { intake, inner }
    }
}

impl<S> Service<Request<Body>> for IntakeService<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Either<Ready<Result<Response<Body>, S::Error>>, S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (mut head, body) = request.into_parts();
        let refused = |status: Status| Either::Left(ready(Ok(status.into_http())));
        let Some(PeerInfo(peer)) = head.extensions.get::<PeerInfo>().cloned() else {
            return refused(Status::internal("unknown connection"));
        };
        if !peer.is_allowed() {
            return refused(Status::permission_denied("permission denied: identity not allowed here"));
        }
        if !self.intake.open_stream(&peer) {
            return refused(Status::resource_exhausted("too many open streams; retry later"));
        }
        let inbound = RequestReader::new(MessageReader::new(body, self.intake.clone(), peer));
        head.extensions.insert(inbound.clone());
        let request = Request::from_parts(head, Body::new(MeteredBody(inbound)));
        Either::Right(self.inner.call(request))
    }
}
