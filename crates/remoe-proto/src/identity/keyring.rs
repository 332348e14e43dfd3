//! The credentials that a process uses, read again when their files change.

use super::{Credentials, IdentityError};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The file of the certificate, as in Secrets of the type `kubernetes.io/tls`.
pub const CERTIFICATE: &str = "tls.crt";
/// The file of its key.
pub const KEY: &str = "tls.key";
/// The file of the authorities' certificates.
pub const CERTIFICATES_OF_AUTHORITIES: &str = "ca.crt";

/// Files are looked at again when a connection is made, this long after the last time.
pub(super) const LOOK: Duration = Duration::from_millis(500);
/// Largest file in bytes; a Secret is no larger.
const FILE_BYTES: u64 = 1 << 20;

/// Contents of the three files.
type Files = [Vec<u8>; 3];

/// Certificate and key with which a process proves its identity. If newer files are faulty, the fault is logged and the
/// previous ones stay in use.
#[derive(Debug)]
pub struct Keyring {
    folder: Option<PathBuf>,
    state: Mutex<KeyringState>,
}

#[derive(Debug)]
struct KeyringState {
    current: Arc<Credentials>,
    seen: Files,
    looked: Instant,
}

impl Keyring {
    /// Reads the keyring from `tls.crt`, `tls.key` and `ca.crt` in `folder`.
    ///
    /// # Errors
    /// A file cannot be read, or they do not go together.
    pub fn of_folder(folder: impl Into<PathBuf>) -> Result<Arc<Self>, IdentityError> {
        let folder = folder.into();
        let seen = read(&folder)?;
        let current = Arc::new(parse(&seen)?);
        let state = KeyringState { current, seen, looked: Instant::now() };
        Ok(Arc::new(Self { folder: Some(folder), state: Mutex::new(state) }))
    }

    /// Returns a keyring with `credentials`, until others are [held](Self::hold).
    #[must_use]
    pub fn holding(credentials: Credentials) -> Arc<Self> {
        let state =
            KeyringState { current: Arc::new(credentials), seen: Files::default(), looked: Instant::now() };
        Arc::new(Self { folder: None, state: Mutex::new(state) })
    }

    /// Uses `credentials` from now on.
    pub fn hold(&self, credentials: Credentials) {
        self.state().current = Arc::new(credentials);
    }

    /// Returns the credentials in use now. To read three small files again takes microseconds: it is done where a
    /// connection is made, which takes hundreds.
    #[must_use]
    pub fn current(&self) -> Arc<Credentials> {
        let mut state = self.state();
        if let Some(folder) = self.folder.as_ref().filter(|_| state.looked.elapsed() >= LOOK) {
            state.looked = Instant::now();
            state.look(folder);
        }
        state.current.clone()
    }

    fn state(&self) -> MutexGuard<'_, KeyringState> {
        // Each field is replaced as a whole, so a panic elsewhere cannot have left one half-written.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KeyringState {
    fn look(&mut self, folder: &Path) {
        // Files that are not there for a moment are being replaced.
        let Some(files) = read(folder).ok().filter(|files| *files != self.seen) else { return };
        match parse(&files) {
            Ok(credentials) => {
                tracing::info!(identity = %credentials.identity(), "certificate reloaded");
                self.current = Arc::new(credentials);
            }
            Err(error) => {
                tracing::warn!(%error, folder = %folder.display(), "certificate reload failed: keeping the previous one");
            }
        }
        self.seen = files;
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
    let read = File::open(&path).and_then(|file| file.take(FILE_BYTES).read_to_end(&mut bytes));
    read.map(|_| bytes).map_err(|source| IdentityError::Read { path, source })
}

fn parse([certificate, key, authorities]: &Files) -> Result<Credentials, IdentityError> {
    Credentials::from_pem(certificate, key, authorities)
}
