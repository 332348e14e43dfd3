//! Certificates for a remote function under measurement and for who asks it.

use crate::error::{ErrorContext, Result};
use remoe_identity::Authority;
use remoe_proto::identity::{
    CERTIFICATE, CERTIFICATES_OF_AUTHORITIES, Counterpart, Credentials, Identity, KEY, Keyring, Trust,
};
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

/// Longer than any run.
const LIFE: Duration = Duration::from_secs(24 * 3600);

/// Certificates of both ends.
#[derive(Debug)]
pub(crate) struct Certificates {
    remote: TempDir,
    trust: Trust,
}

impl Certificates {
    /// New ones, of an authority that is forgotten at once.
    pub(crate) fn new() -> Result<Self> {
        let making = || "making certificates";
        let identity =
            |function: fn(String, String) -> Identity| function("bench".to_owned(), "0".to_owned());
        let main = identity(|namespace, deployment| Identity::Main { namespace, deployment });
        let remote = identity(|namespace, deployment| Identity::Remote { namespace, deployment });
        let (authority, _) = Authority::create(LIFE).doing(making)?;
        let root = authority.certificate();
        let (of_main, of_remote) =
            (authority.sign(&main, LIFE).doing(making)?, authority.sign(&remote, LIFE).doing(making)?);
        let folder = tempfile::tempdir().doing(making)?;
        for (file, text) in [
            (CERTIFICATE, of_remote.certificate.as_str()),
            (KEY, &of_remote.key),
            (CERTIFICATES_OF_AUTHORITIES, root),
        ] {
            std::fs::write(folder.path().join(file), text).doing(making)?;
        }
        let (certificate, key) = (of_main.certificate.as_bytes(), of_main.key.as_bytes());
        let credentials = Credentials::from_pem(certificate, key, root.as_bytes()).doing(making)?;
        let trust =
            Trust { keyring: Keyring::with_credentials(credentials), peer: Counterpart::Named(remote) };
        Ok(Self { remote: folder, trust })
    }

    /// The folder of the remote function.
    pub(crate) fn of_remote(&self) -> &Path {
        self.remote.path()
    }

    /// Returns the main function's certificate, and the identity that its peer must have.
    pub(crate) fn trust(&self) -> Trust {
        self.trust.clone()
    }
}
