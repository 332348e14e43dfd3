//! Authenticated connections: verify the identity of the other end.

use super::credentials::identity_of;
use super::{Identity, IdentityError, Keyring, MaybeTlsStream};
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

/// Timeout of a handshake.
pub(crate) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// Protocol within a connection. Both ends must expect the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// gRPC, over HTTP/2.
    Grpc,
    /// HTTP/1.1.
    Http,
}

impl Protocol {
    /// Returns the ALPN name.
    pub(super) fn name(self) -> &'static [u8] {
        match self {
            Self::Grpc => b"h2",
            Self::Http => b"http/1.1",
        }
    }
}

/// Identity that the other end of a connection must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Counterpart {
    /// A fixed identity.
    Named(Identity),
    /// A main function of the same deployment; this process is a remote function.
    OwnMain,
    /// A remote function of the same deployment; this process is a main function.
    OwnRemote,
}

impl Counterpart {
    /// Returns the identity of the counterpart of a process with the identity `own`.
    ///
    /// # Errors
    /// A process with the identity `own` has no such counterpart.
    fn identity_for(&self, own: &Identity) -> Result<Identity, IdentityError> {
        match (self, own) {
            (Self::Named(identity), _) => Some(identity.clone()),
            (Self::OwnMain, Identity::Remote { .. }) => own.main(),
            (Self::OwnRemote, Identity::Main { .. }) => own.remote(),
            (Self::OwnMain | Self::OwnRemote, _) => None,
        }
        .ok_or_else(|| IdentityError::Role {
            found: own.to_string(),
            needed: if *self == Self::OwnMain { "a remote function" } else { "a main function" },
        })
    }
}

/// Certificate that a process presents, and identity that the other end must have. Both are read for every
/// connection, because certificates are rotated while processes run.
#[derive(Debug, Clone)]
pub struct Trust {
    /// Own certificate and key.
    pub keyring: Arc<Keyring>,
    /// Identity that the other end must have.
    pub peer: Counterpart,
}

impl Trust {
    /// Returns the trust of a main function's control port, with the certificate in `folder`: only `operator` may
    /// connect.
    ///
    /// # Errors
    /// The certificate is invalid, or not that of a main function.
    pub fn for_control(folder: &Path, operator: Identity) -> Result<Self, IdentityError> {
        let keyring = Keyring::from_folder(folder)?;
        Counterpart::OwnRemote.identity_for(keyring.current().identity())?;
        Ok(Self { keyring, peer: Counterpart::Named(operator) })
    }

    /// Returns the trust of this main function for connections to the remote functions of its deployment.
    #[must_use]
    pub fn to_remote(&self) -> Self {
        Self { keyring: self.keyring.clone(), peer: Counterpart::OwnRemote }
    }

    /// Returns the trust of this main function's HTTP port: only `gateway` may connect.
    #[must_use]
    pub fn for_http(&self, gateway: Identity) -> Self {
        Self { keyring: self.keyring.clone(), peer: Counterpart::Named(gateway) }
    }

    /// Returns the trust of a remote function's port, with the certificate in `folder`: only main functions of its
    /// deployment may connect.
    ///
    /// # Errors
    /// The certificate is invalid, or not that of a remote function.
    pub fn for_experts(folder: &Path) -> Result<Self, IdentityError> {
        let keyring = Keyring::from_folder(folder)?;
        Counterpart::OwnMain.identity_for(keyring.current().identity())?;
        Ok(Self { keyring, peer: Counterpart::OwnMain })
    }

    /// Performs the client's TLS handshake for gRPC over `stream` and checks the identity of the other end.
    ///
    /// # Errors
    /// The handshake fails or times out, or the other end has another identity.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> io::Result<MaybeTlsStream<S>> {
        self.connect_for(Protocol::Grpc, stream).await
    }

    /// Performs the client's handshake for `protocol`, as [`Self::connect`] does for gRPC.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub async fn connect_for<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        protocol: Protocol,
        stream: S,
    ) -> io::Result<MaybeTlsStream<S>> {
        let current = self.keyring.current();
        let needed = self.peer.identity_for(current.identity()).map_err(io::Error::other)?;
        let connector = TlsConnector::from(current.client(protocol));
        // A placeholder: the identity in the certificate is compared below.
        let name = ServerName::try_from("remoe").map_err(io::Error::other)?;
        let stream = timeout(HANDSHAKE_LIMIT, connector.connect(name, stream)).await??;
        let found = peer_identity(stream.get_ref().1.peer_certificates()).map_err(io::Error::other)?;
        if found == needed {
            return Ok(MaybeTlsStream::Tls(Box::new(TlsStream::Client(stream))));
        }
        let message = format!("identity mismatch: expected {needed}, got {found}");
        Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
    }

    /// Performs the server's TLS handshake over an accepted stream. Returns the actual and the required identity of
    /// the other end.
    ///
    /// # Errors
    /// The handshake fails, the other end has no valid identity, or this process has no such counterpart.
    pub(crate) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        protocol: Protocol,
        stream: S,
    ) -> io::Result<(MaybeTlsStream<S>, PeerIdentities)> {
        let current = self.keyring.current();
        let needed = self.peer.identity_for(current.identity()).map_err(io::Error::other)?;
        let acceptor = TlsAcceptor::from(current.server(protocol));
        let stream = acceptor.accept(stream).await?;
        let found = peer_identity(stream.get_ref().1.peer_certificates()).map_err(io::Error::other)?;
        Ok((MaybeTlsStream::Tls(Box::new(TlsStream::Server(stream))), PeerIdentities { found, needed }))
    }
}

/// Identities of the other end of an accepted connection.
pub(crate) struct PeerIdentities {
    /// Actual identity.
    pub(crate) found: Identity,
    /// Required identity.
    pub(crate) needed: Identity,
}

fn peer_identity(certificates: Option<&[CertificateDer<'_>]>) -> Result<Identity, IdentityError> {
    let first = certificates.and_then(<[_]>::first);
    first.map_or(Err(IdentityError::Names { count: 0 }), identity_of)
}

/// Connector of tonic channels: TCP without delay for small messages, and TLS if there is a [`Trust`].
#[derive(Debug, Clone, Default)]
pub struct Connector {
    trust: Option<Trust>,
}

impl Connector {
    /// Creates a connector to the peer that `trust` names. Without trust, connects to any peer without TLS.
    #[must_use]
    pub fn new(trust: Option<Trust>) -> Self {
        Self { trust }
    }
}

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<MaybeTlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let trust = self.trust.clone();
        Box::pin(async move {
            let authority = uri.authority().map(|authority| authority.as_str());
            let missing_host =
                || io::Error::new(io::ErrorKind::InvalidInput, format!("missing host in {uri}"));
            let stream = TcpStream::connect(authority.ok_or_else(missing_host)?).await?;
            stream.set_nodelay(true)?;
            let connection = match trust {
                None => MaybeTlsStream::Plain(stream),
                Some(trust) => trust.connect(stream).await?,
            };
            Ok(TokioIo::new(connection))
        })
    }
}
