//! Making connections whose other end is who it has to be.

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

/// A handshake that takes longer comes to nothing.
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
    /// Returns its name in handshakes.
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
    /// This identity.
    Named(Identity),
    /// A main function of the deployment whose remote function shows its certificate.
    OwnMain,
    /// A remote function of the deployment whose main function shows its certificate.
    OwnRemote,
}

impl Counterpart {
    /// Returns the identity of the counterpart of a process that shows the identity `shown`.
    ///
    /// # Errors
    /// A process with that identity has no such counterpart.
    fn of(&self, shown: &Identity) -> Result<Identity, IdentityError> {
        match (self, shown) {
            (Self::Named(identity), _) => Some(identity.clone()),
            (Self::OwnMain, Identity::Remote { .. }) => shown.main(),
            (Self::OwnRemote, Identity::Main { .. }) => shown.remote(),
            (Self::OwnMain | Self::OwnRemote, _) => None,
        }
        .ok_or_else(|| IdentityError::Role {
            found: shown.to_string(),
            needed: if *self == Self::OwnMain { "a remote function" } else { "a main function" },
        })
    }
}

/// Certificate that a process shows, and identity that the other end must have. Both are looked up for every
/// connection: certificates are renewed while processes run.
#[derive(Debug, Clone)]
pub struct Trust {
    /// Certificate and key that are shown.
    pub keyring: Arc<Keyring>,
    /// Identity that the other end must have.
    pub peer: Counterpart,
}

impl Trust {
    /// Returns the trust of a main function for its control port, with the certificate in `folder`: it takes orders
    /// from `operator`.
    ///
    /// # Errors
    /// The certificate cannot be used, or is no main function's.
    pub fn of_control(folder: &Path, operator: Identity) -> Result<Self, IdentityError> {
        let keyring = Keyring::of_folder(folder)?;
        Counterpart::OwnRemote.of(keyring.current().identity())?;
        Ok(Self { keyring, peer: Counterpart::Named(operator) })
    }

    /// Returns the trust of the same process for its connections to the remote functions of its deployment.
    #[must_use]
    pub fn to_remote(&self) -> Self {
        Self { keyring: self.keyring.clone(), peer: Counterpart::OwnRemote }
    }

    /// Returns the trust of the same process for its HTTP port: it takes requests from `gateway`.
    #[must_use]
    pub fn of_http(&self, gateway: Identity) -> Self {
        Self { keyring: self.keyring.clone(), peer: Counterpart::Named(gateway) }
    }

    /// Returns the trust of a remote function for its port, with the certificate in `folder`: it answers to the main
    /// functions of its deployment.
    ///
    /// # Errors
    /// The certificate cannot be used, or is no remote function's.
    pub fn of_experts(folder: &Path) -> Result<Self, IdentityError> {
        let keyring = Keyring::of_folder(folder)?;
        Counterpart::OwnMain.of(keyring.current().identity())?;
        Ok(Self { keyring, peer: Counterpart::OwnMain })
    }

    /// Makes a gRPC connection of the connected `stream` after checking the identity of the other end.
    ///
    /// # Errors
    /// The handshake fails or takes too long, or the other end has another identity.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> io::Result<MaybeTlsStream<S>> {
        self.connect_for(Protocol::Grpc, stream).await
    }

    /// As [`Self::connect`], for `protocol`.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub async fn connect_for<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        protocol: Protocol,
        stream: S,
    ) -> io::Result<MaybeTlsStream<S>> {
        let current = self.keyring.current();
        let needed = self.peer.of(current.identity()).map_err(io::Error::other)?;
        let connector = TlsConnector::from(current.client(protocol));
        // Only the form needs a name here: the one in the certificate is compared below.
        let name = ServerName::try_from("remoe").map_err(io::Error::other)?;
        let stream = timeout(HANDSHAKE_LIMIT, connector.connect(name, stream)).await??;
        let found = peer(stream.get_ref().1.peer_certificates()).map_err(io::Error::other)?;
        if found == needed {
            return Ok(MaybeTlsStream::Tls(Box::new(TlsStream::Client(stream))));
        }
        let message = format!("identity mismatch: expected {needed}, got {found}");
        Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
    }

    /// As [`Self::connect_for`], for a stream that was accepted. Returns the identity that the other end has, and the
    /// one that it must have.
    ///
    /// # Errors
    /// The handshake fails, the other end has no valid identity, or this process has no such counterpart.
    pub(crate) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        protocol: Protocol,
        stream: S,
    ) -> io::Result<(MaybeTlsStream<S>, PeerIdentities)> {
        let current = self.keyring.current();
        let needed = self.peer.of(current.identity()).map_err(io::Error::other)?;
        let acceptor = TlsAcceptor::from(current.server(protocol));
        let stream = acceptor.accept(stream).await?;
        let found = peer(stream.get_ref().1.peer_certificates()).map_err(io::Error::other)?;
        Ok((MaybeTlsStream::Tls(Box::new(TlsStream::Server(stream))), PeerIdentities { found, needed }))
    }
}

/// Identities of the other end of an accepted connection.
pub(crate) struct PeerIdentities {
    /// Identity that it has.
    pub(crate) found: Identity,
    /// Identity that it must have.
    pub(crate) needed: Identity,
}

fn peer(certificates: Option<&[CertificateDer<'_>]>) -> Result<Identity, IdentityError> {
    let first = certificates.and_then(<[_]>::first);
    first.map_or(Err(IdentityError::Names { count: 0 }), identity_of)
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
            let nowhere = || io::Error::new(io::ErrorKind::InvalidInput, format!("missing host in {uri}"));
            let stream = TcpStream::connect(authority.ok_or_else(nowhere)?).await?;
            stream.set_nodelay(true)?;
            let line = match trust {
                None => MaybeTlsStream::Plain(stream),
                Some(trust) => trust.connect(stream).await?,
            };
            Ok(TokioIo::new(line))
        })
    }
}
