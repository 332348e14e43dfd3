//! TLS for clients that show no certificate: the certificate of a server, read again when its files change.

use super::credentials::server_without_clients;
use super::keyring::{CERTIFICATE, KEY, LOOK, read_file};
use super::{IdentityError, MaybeTlsStream, Protocol};
use rustls::ServerConfig;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsAcceptor, TlsStream};

/// Contents of the files of a certificate and its key.
type Files = [Vec<u8>; 2];

/// A certificate that a server shows to all clients, by TLS 1.3. If newer files cannot be used, that is logged, and the
/// certificate before stays in use.
#[derive(Debug)]
pub struct PublicCertificate {
    folder: PathBuf,
    state: Mutex<CertificateState>,
}

#[derive(Debug)]
struct CertificateState {
    current: Arc<ServerConfig>,
    seen: Files,
    looked: Instant,
}

impl PublicCertificate {
    /// Reads `tls.crt` and `tls.key` of `folder`.
    ///
    /// # Errors
    /// A file cannot be read, or they do not go together.
    pub fn of_folder(folder: impl Into<PathBuf>) -> Result<Arc<Self>, IdentityError> {
        let folder = folder.into();
        let seen = read(&folder)?;
        let current = parse(&seen)?;
        Ok(Arc::new(Self {
            folder,
            state: Mutex::new(CertificateState { current, seen, looked: Instant::now() }),
        }))
    }

    /// Makes the TLS handshake of `stream`, which was accepted. Reads the files again if that was not done of late.
    ///
    /// # Errors
    /// The handshake fails.
    pub(crate) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> io::Result<MaybeTlsStream<S>> {
        let stream = TlsAcceptor::from(self.current()).accept(stream).await?;
        Ok(MaybeTlsStream::Tls(Box::new(TlsStream::Server(stream))))
    }

    fn current(&self) -> Arc<ServerConfig> {
        // Each field is replaced as a whole.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.looked.elapsed() >= LOOK {
            state.looked = Instant::now();
            state.look(&self.folder);
        }
        state.current.clone()
    }
}

impl CertificateState {
    fn look(&mut self, folder: &Path) {
        // Files that are not there for a moment are being replaced.
        let Some(files) = read(folder).ok().filter(|files| *files != self.seen) else { return };
        match parse(&files) {
            Ok(current) => {
                tracing::info!(folder = %folder.display(), "server certificate reloaded");
                self.current = current;
            }
            Err(error) => {
                tracing::warn!(%error, folder = %folder.display(), "server certificate reload failed: keeping the previous one");
            }
        }
        self.seen = files;
    }
}

fn read(folder: &Path) -> Result<Files, IdentityError> {
    Ok([read_file(folder, CERTIFICATE)?, read_file(folder, KEY)?])
}

fn parse([certificate, key]: &Files) -> Result<Arc<ServerConfig>, IdentityError> {
    let mut config = server_without_clients(certificate, key)?;
    config.alpn_protocols = vec![Protocol::Http.name().to_vec()];
    Ok(Arc::new(config))
}
