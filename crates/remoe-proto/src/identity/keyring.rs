//! Keyring: the credentials of a process, which are reloaded when their files change.

use super::{Credentials, IdentityError};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// File name of the certificate, as in Secrets of the type `kubernetes.io/tls`.
pub const CERTIFICATE: &str = "tls.crt";
/// File name of the private key.
pub const KEY: &str = "tls.key";
/// File name of the trust bundle, the certificates of authorities.
pub const CERTIFICATES_OF_AUTHORITIES: &str = "ca.crt";

/// Least interval between reloads, which happen when a connection is made.
pub(super) const RELOAD_INTERVAL: Duration = Duration::from_millis(500);
/// Largest file in bytes, that of a Secret.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Contents of the certificate, the key and the trust bundle.
type Files = [Vec<u8>; 3];

/// Certificate and key by which a process authenticates. If changed files are invalid, the error is logged and the
/// previous credentials stay in use.
#[derive(Debug)]
pub struct Keyring {
    folder: Option<PathBuf>,
    state: Mutex<KeyringState>,
}

#[derive(Debug)]
struct KeyringState {
    current: Arc<Credentials>,
    loaded_files: Files,
    reloaded_at: Instant,
}

impl Keyring {
    /// Reads the keyring from `tls.crt`, `tls.key` and `ca.crt` in `folder`.
    ///
    /// # Errors
    /// A file cannot be read, or the files do not match.
    pub fn from_folder(folder: impl Into<PathBuf>) -> Result<Arc<Self>, IdentityError> {
        let folder = folder.into();
        let loaded_files = read(&folder)?;
        let current = Arc::new(parse(&loaded_files)?);
        let state = KeyringState { current, loaded_files, reloaded_at: Instant::now() };
        Ok(Arc::new(Self { folder: Some(folder), state: Mutex::new(state) }))
    }

    /// Returns a keyring with `credentials`, until [`Self::replace`] replaces them.
    #[must_use]
    pub fn with_credentials(credentials: Credentials) -> Arc<Self> {
        let state = KeyringState {
            current: Arc::new(credentials),
            loaded_files: Files::default(),
            reloaded_at: Instant::now(),
        };
        Arc::new(Self { folder: None, state: Mutex::new(state) })
    }

    /// Replaces the credentials.
    pub fn replace(&self, credentials: Credentials) {
        self.state().current = Arc::new(credentials);
    }

    /// Returns the present credentials. Reloads the files if the interval has passed: reading three small files takes
    /// microseconds, and the connection that needs them hundreds.
    #[must_use]
    pub fn current(&self) -> Arc<Credentials> {
        let mut state = self.state();
        if let Some(folder) = self.folder.as_ref().filter(|_| state.reloaded_at.elapsed() >= RELOAD_INTERVAL)
        {
            state.reloaded_at = Instant::now();
            state.reload(folder);
        }
        state.current.clone()
    }

    fn state(&self) -> MutexGuard<'_, KeyringState> {
        // Each field is replaced as a whole, so a panic elsewhere cannot have left one half-written.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KeyringState {
    fn reload(&mut self, folder: &Path) {
        // Ignores missing files: they may be about to be replaced.
        let Some(files) = read(folder).ok().filter(|files| *files != self.loaded_files) else { return };
        match parse(&files) {
            Ok(credentials) => {
                tracing::info!(identity = %credentials.identity(), "certificate reloaded");
                self.current = Arc::new(credentials);
            }
            Err(error) => {
                tracing::warn!(%error, folder = %folder.display(), "certificate reload failed: keeping the previous one");
            }
        }
        self.loaded_files = files;
    }
}

fn read(folder: &Path) -> Result<Files, IdentityError> {
    let file = |name: &str| read_file(folder, name);
    Ok([file(CERTIFICATE)?, file(KEY)?, file(CERTIFICATES_OF_AUTHORITIES)?])
}

/// Reads the file `name` of `folder`, up to its largest size.
pub(super) fn read_file(folder: &Path, name: &str) -> Result<Vec<u8>, IdentityError> {
    let path = folder.join(name);
    let mut bytes = Vec::new();
    let read = File::open(&path).and_then(|file| file.take(MAX_FILE_BYTES).read_to_end(&mut bytes));
    read.map(|_| bytes).map_err(|source| IdentityError::Read { path, source })
}

fn parse([certificate, key, authorities]: &Files) -> Result<Credentials, IdentityError> {
    Credentials::from_pem(certificate, key, authorities)
}
