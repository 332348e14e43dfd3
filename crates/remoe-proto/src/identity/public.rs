//! Server certificate for TLS with clients without certificates, reloaded when its files change.

use super::credentials::server_without_clients;
use super::keyring::{CERTIFICATE, KEY, RELOAD_INTERVAL, read_file};
use super::{IdentityError, MaybeTlsStream, Protocol};
use rustls::ServerConfig;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsAcceptor, TlsStream};

/// Contents of the certificate and the key.
type Files = [Vec<u8>; 2];

/// Certificate that a server presents to all clients, with TLS 1.3. If changed files are invalid, the error is logged
/// and the previous certificate stays in use.
#[derive(Debug)]
pub struct PublicCertificate {
    folder: PathBuf,
    state: Mutex<CertificateState>,
}

#[derive(Debug)]
struct CertificateState {
    current: Arc<ServerConfig>,
    loaded_files: Files,
    reloaded_at: Instant,
}

impl PublicCertificate {
    /// Reads `tls.crt` and `tls.key` in `folder`.
    ///
    /// # Errors
    /// A file cannot be read, or the files do not match.
    pub fn from_folder(folder: impl Into<PathBuf>) -> Result<Arc<Self>, IdentityError> {
        let folder = folder.into();
        let loaded_files = read(&folder)?;
        let current = parse(&loaded_files)?;
        Ok(Arc::new(Self {
            folder,
            state: Mutex::new(CertificateState { current, loaded_files, reloaded_at: Instant::now() }),
        }))
    }

    /// Performs the server's TLS handshake over an accepted `stream`. Reloads the files if the interval has passed.
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
        // A panic cannot leave a field half written.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.reloaded_at.elapsed() >= RELOAD_INTERVAL {
            state.reloaded_at = Instant::now();
            state.reload(&self.folder);
        }
        state.current.clone()
    }
}

impl CertificateState {
    fn reload(&mut self, folder: &Path) {
        // Ignores missing files: they may be about to be replaced.
        let Some(files) = read(folder).ok().filter(|files| *files != self.loaded_files) else { return };
        match parse(&files) {
            Ok(current) => {
                tracing::info!(folder = %folder.display(), "server certificate reloaded");
                self.current = current;
            }
            Err(error) => {
                tracing::warn!(%error, folder = %folder.display(), "server certificate reload failed: keeping the previous one");
            }
        }
        self.loaded_files = files;
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
