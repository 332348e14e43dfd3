//! Making connections whose other end is who it has to be.

use super::credentials::identity_of;
use super::{Identity, IdentityError, Keyring, Line};
use hyper_util::rt::TokioIo;
use rustls::pki_types::{CertificateDer, ServerName};
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};
use tonic::transport::Uri;

/// A handshake that takes longer comes to nothing.
pub(crate) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// What a process shows, and who the other end has to be.
#[derive(Debug, Clone)]
pub struct Trust {
    /// What is shown.
    pub keyring: Arc<Keyring>,
    /// Who the other end has to be.
    pub peer: Identity,
}

impl Trust {
    /// A main function's for its control port, with the certificate in `folder`: it takes orders from
    /// `operator`.
    ///
    /// # Errors
    /// The certificate cannot be used, or is no main function's.
    pub fn of_control(folder: &Path, operator: Identity) -> Result<Self, IdentityError> {
        let keyring = Keyring::of_folder(folder)?;
        match keyring.current().identity() {
            Identity::Main { .. } => {}
            found => return Err(role(found, "main function's")),
        }
        Ok(Self { keyring, peer: operator })
    }

    /// The same process's for its connections to the remote functions of its deployment.
    ///
    /// # Errors
    /// The certificate is no function's.
    pub fn to_remote(&self) -> Result<Self, IdentityError> {
        let current = self.keyring.current();
        let peer = current.identity().remote().ok_or_else(|| role(current.identity(), "function's"))?;
        Ok(Self { keyring: self.keyring.clone(), peer })
    }

    /// A remote function's for its port, with the certificate in `folder`: it answers to the main functions
    /// of its deployment.
    ///
    /// # Errors
    /// The certificate cannot be used, or is no remote function's.
    pub fn of_experts(folder: &Path) -> Result<Self, IdentityError> {
        let keyring = Keyring::of_folder(folder)?;
        let current = keyring.current();
        match (current.identity(), current.identity().main()) {
            (Identity::Remote { .. }, Some(peer)) => Ok(Self { keyring, peer }),
            (found, _) => Err(role(found, "remote function's")),
        }
    }

    /// Makes `stream`, which was connected, one whose other end is who it has to be.
    ///
    /// # Errors
    /// The handshake fails or takes too long, or the other end is somebody else.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> io::Result<Line<S>> {
        let connector = TlsConnector::from(self.keyring.current().client.clone());
        // Only the form needs a name here: the one in the certificate is looked at below.
        let name = ServerName::try_from("remoe").map_err(io::Error::other)?;
        let stream = timeout(HANDSHAKE_LIMIT, connector.connect(name, stream)).await??;
        let found = peer(stream.get_ref().1.peer_certificates()).map_err(io::Error::other)?;
        if found == self.peer {
            return Ok(Line::Tls(Box::new(TlsStream::Client(stream))));
        }
        let message = format!("{found} answers there, {} is needed", self.peer);
        Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
    }

    /// The same for a stream that was accepted; returns who is at its other end, whoever that is.
    ///
    /// # Errors
    /// The handshake fails, or the other end has no name of ours.
    pub(crate) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> io::Result<(Line<S>, Identity)> {
        let acceptor = TlsAcceptor::from(self.keyring.current().server.clone());
        let stream = acceptor.accept(stream).await?;
        let found = peer(stream.get_ref().1.peer_certificates()).map_err(io::Error::other)?;
        Ok((Line::Tls(Box::new(TlsStream::Server(stream))), found))
    }
}

fn peer(certificates: Option<&[CertificateDer<'_>]>) -> Result<Identity, IdentityError> {
    let first = certificates.and_then(<[_]>::first);
    first.map_or(Err(IdentityError::Names { count: 0 }), identity_of)
}

fn role(found: &Identity, needed: &'static str) -> IdentityError {
    IdentityError::Role { found: found.to_string(), needed }
}

/// Connects by TCP, without delay for small messages, and by TLS where there is a [`Trust`]: for tonic's
/// channels.
#[derive(Debug, Clone, Default)]
pub struct Connector {
    trust: Option<Trust>,
}

impl Connector {
    /// Connects to the peer that `trust` names; to anybody without.
    #[must_use]
    pub fn new(trust: Option<Trust>) -> Self {
        Self { trust }
    }
}

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<Line<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let trust = self.trust.clone();
        Box::pin(async move {
            let authority = uri.authority().map(|authority| authority.as_str());
            let nowhere = || io::Error::new(io::ErrorKind::InvalidInput, format!("{uri} names no host"));
            let stream = TcpStream::connect(authority.ok_or_else(nowhere)?).await?;
            stream.set_nodelay(true)?;
            let line = match trust {
                None => Line::Plain(stream),
                Some(trust) => trust.connect(stream).await?,
            };
            Ok(TokioIo::new(line))
        })
    }
}
