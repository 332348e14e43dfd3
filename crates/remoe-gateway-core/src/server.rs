//! HTTP servers of a gateway: for clients, and for scrapers of metrics.

use crate::gateway::Gateway;
use crate::model::Model;
use crate::router::{client_routes, metrics_routes, own_metrics_routes};
use axum::Router;
use futures_util::future::BoxFuture;
use remoe_http::{ConnectionLimits, ConnectionMetrics};
use std::io;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

impl Gateway {
    /// Serves clients on `listener` until `stop`, then completes the requests in flight. Meanwhile runs the deadlines
    /// of the models that the gateway has now; callers that replace models run those of the new ones.
    ///
    /// The future is boxed, as that of [`remoe_http::serve`].
    ///
    /// # Errors
    /// The server fails.
    pub fn serve(
        self: Arc<Self>,
        listener: TcpListener,
        stop: CancellationToken,
    ) -> BoxFuture<'static, io::Result<()>> {
        // Read before the first poll: models that replace these must not be held as long as the future lives.
        let models = self.models();
        Box::pin(self.serve_and_run_deadlines(models, listener, stop))
    }

    async fn serve_and_run_deadlines(
        self: Arc<Self>,
        models: Arc<[Arc<Model>]>,
        listener: TcpListener,
        stop: CancellationToken,
    ) -> io::Result<()> {
        let deadlines = models.iter().cloned().map(|model| async move { model.run_deadlines().await });
        let deadlines = futures_util::future::join_all(deadlines);
        let (limits, metrics) = (self.options().connections, self.metrics().connections.clone());
        let handshake = self.options().handshake.clone();
        let served =
            remoe_http::serve(listener, handshake, client_routes(self.clone()), limits, metrics, stop);
        tokio::select! {
            served = served => served,
            // Never completes; without models `join_all` would complete at once.
            _ = deadlines, if !models.is_empty() => Ok(()),
        }
    }

    /// Serves only `/metrics` on `listener` until `stop`: the gateway's own metrics and those of functions. Needs no
    /// key.
    ///
    /// # Errors
    /// The server fails.
    pub fn serve_metrics(
        self: Arc<Self>,
        listener: TcpListener,
        stop: CancellationToken,
    ) -> BoxFuture<'static, io::Result<()>> {
        Box::pin(serve_pages(listener, metrics_routes(self), stop))
    }

    /// Serves only the gateway's own `/metrics` on `listener` until `stop`. Functions expose theirs at their own
    /// addresses.
    ///
    /// # Errors
    /// The server fails.
    pub fn serve_own_metrics(
        self: Arc<Self>,
        listener: TcpListener,
        stop: CancellationToken,
    ) -> BoxFuture<'static, io::Result<()>> {
        Box::pin(serve_pages(listener, own_metrics_routes(self), stop))
    }
}

/// Serves `routes` of metrics at their own address.
async fn serve_pages(listener: TcpListener, routes: Router, stop: CancellationToken) -> io::Result<()> {
    let metrics = ConnectionMetrics::new().map_err(io::Error::other)?;
    remoe_http::serve(listener, None, routes, ConnectionLimits::PROBES, metrics, stop).await
}
