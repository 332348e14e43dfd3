//! Servers of a gateway: for clients, and for scrapers of metrics.

use crate::gateway::Gateway;
use crate::model::Model;
use crate::router::{metrics_routes, own_metrics_routes, routes};
use axum::Router;
use futures_util::future::BoxFuture;
use remoe_http::{ConnectionLimits, ConnectionMetrics};
use std::io;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

impl Gateway {
    /// Serves clients on `listener` until `stop`, and answers the requests that are there by then. Meanwhile keeps the time of
    /// the models that it has at the call; those that replace them keep their own.
    ///
    /// The future is boxed, as [`remoe_http::serve`]'s.
    ///
    /// # Errors
    /// The server fails.
    pub fn serve(
        self: Arc<Self>,
        listener: TcpListener,
        stop: CancellationToken,
    ) -> BoxFuture<'static, io::Result<()>> {
        // Not in the future: by its first poll they may have been replaced, and would be held as long as it lives.
        let models = self.models();
        Box::pin(self.serve_and_keep_time(models, listener, stop))
    }

    async fn serve_and_keep_time(
        self: Arc<Self>,
        models: Arc<[Arc<Model>]>,
        listener: TcpListener,
        stop: CancellationToken,
    ) -> io::Result<()> {
        let clocks = models.iter().cloned().map(|model| async move { model.keep_time().await });
        let clocks = futures_util::future::join_all(clocks);
        let (limits, metrics) = (self.options().connections, self.metrics().connections.clone());
        let handshake = self.options().handshake.clone();
        let served = remoe_http::serve(listener, handshake, routes(self.clone()), limits, metrics, stop);
        tokio::select! {
            served = served => served,
            // They never end; without models there is nothing to keep.
            _ = clocks, if !models.is_empty() => Ok(()),
        }
    }

    /// Serves `/metrics` alone on `listener` until `stop`: its own and those of functions, without a key.
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

    /// Serves its own `/metrics` alone on `listener` until `stop`. Functions show theirs at addresses of their own.
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

/// Serves `pages` of metrics on an address of their own.
async fn serve_pages(listener: TcpListener, pages: Router, stop: CancellationToken) -> io::Result<()> {
    let metrics = ConnectionMetrics::new().map_err(io::Error::other)?;
    remoe_http::serve(listener, None, pages, ConnectionLimits::PROBES, metrics, stop).await
}
