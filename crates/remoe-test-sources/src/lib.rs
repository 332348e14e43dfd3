//! Small servers that speak as the Hugging Face hub, S3 and web servers do, over the files of a folder.
//! They count what they send, and can be made to fail in the ways that networks and servers do.
//!
//! Only what fetching a model needs is there. For tests: nothing here returns errors but
//! [`std::io::Error`] at the start.

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

/// A server that ends when this is dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    serving: JoinHandle<()>,
}

impl Server {
    async fn start(listen: SocketAddr, router: Router) -> io::Result<Self> {
        let listener = TcpListener::bind(listen).await?;
        let address = listener.local_addr()?;
        let serving = tokio::spawn(async move {
            // It serves until it is aborted.
            let _ended = axum::serve(listener, router).await;
        });
        Ok(Self { address, serving })
    }

    /// Where it listens, as the start of URLs.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}
