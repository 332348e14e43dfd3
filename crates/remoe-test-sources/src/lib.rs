//! Test servers with the APIs of the Hugging Face hub, S3 and web servers, for the files of a folder. They count the
//! bytes that they send, and inject faults of networks and servers.
//!
//! They implement only the requests that fetch a model. Only starting them returns errors.

mod content;
mod faults;
mod hub;
mod ranges;
mod s3;
mod signature;
mod web;

pub use content::{Content, TransferCount};
pub use faults::Faults;
pub use hub::{Hub, HubOptions};
pub use s3::{S3, S3Options};
pub use web::Web;

use axum::Router;
use std::io;
use std::net::SocketAddr;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Running server. Dropping it stops the server.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Server {
    async fn start(listen: SocketAddr, router: Router) -> io::Result<Self> {
        let listener = TcpListener::bind(listen).await?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(async move {
            // Serves until the task is aborted.
            let _ended = axum::serve(listener, router).await;
        });
        Ok(Self { address, task })
    }

    /// Returns the URL of the server, without a path.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}
