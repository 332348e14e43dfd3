//! TCP connector that counts the bytes handed to the operating system.
//!
//! The engine starts its local kernels when the remote messages have left. gRPC libraries do not report that; the socket
//! does.

use hyper_util::rt::TokioIo;
use remoe_proto::identity::{MaybeTlsStream, Trust};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tonic::transport::Uri;

/// Connects by TCP without delaying small messages, and by TLS if there is a [`Trust`].
#[derive(Clone)]
pub(crate) struct CountingConnector {
    written: Arc<AtomicU64>,
    trust: Option<Trust>,
}

impl CountingConnector {
    /// Creates a connector that adds every byte that a connection writes to `written`, including TLS overhead.
    pub(crate) fn new(written: Arc<AtomicU64>, trust: Option<Trust>) -> Self {
        Self { written, trust }
    }
}

impl tower_service::Service<Uri> for CountingConnector {
    type Response = TokioIo<MaybeTlsStream<CountingStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, io::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let (written, trust) = (self.written.clone(), self.trust.clone());
        Box::pin(async move {
            let authority = uri.authority().map(|authority| authority.as_str()).ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidInput, format!("missing host in {uri}"))
            })?;
            let stream = TcpStream::connect(authority).await?;
            stream.set_nodelay(true)?;
            let stream = CountingStream { stream, written };
            let connection = match trust {
                None => MaybeTlsStream::Plain(stream),
                Some(trust) => trust.connect(stream).await?,
            };
            Ok(TokioIo::new(connection))
        })
    }
}

/// TCP stream that counts its writes.
pub(crate) struct CountingStream {
    stream: TcpStream,
    written: Arc<AtomicU64>,
}

impl CountingStream {
    fn count(&self, outcome: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = outcome {
            self.written.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        outcome
    }
}

impl AsyncRead for CountingStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for CountingStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.count(outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(context, buffers);
        self.count(outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
