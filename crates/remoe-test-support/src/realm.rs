//! Identities for processes under test: an authority, and folders with certificates that it signed.

use crate::function::StartOptions;
use remoe_identity::{Authority, CertifiedKey};
use remoe_proto::identity::{
    CERTIFICATE, CERTIFICATES_OF_AUTHORITIES, Counterpart, Credentials, Identity, KEY, Keyring, Trust,
};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// Validity of certificates, longer than any test.
pub const LIFE: Duration = Duration::from_secs(3600);

/// Uid of the deployment under test.
pub const DEPLOYMENT: &str = "0a1b2c3d";

/// Returns the identity of the operator under test.
#[must_use]
pub fn operator() -> Identity {
    Identity::Operator { namespace: "remoe-system".to_owned() }
}

/// Returns the identity of the gateways of its release.
#[must_use]
pub fn gateway() -> Identity {
    Identity::Gateway { namespace: "remoe-system".to_owned() }
}

/// Returns the identity of main functions of `deployment`.
#[must_use]
pub fn main_of(deployment: &str) -> Identity {
    Identity::Main { namespace: "models".to_owned(), deployment: deployment.to_owned() }
}

/// Returns the identity of remote functions of `deployment`.
#[must_use]
pub fn remote_of(deployment: &str) -> Identity {
    Identity::Remote { namespace: "models".to_owned(), deployment: deployment.to_owned() }
}

/// Certificate authority for tests, with a folder of signed certificates.
pub struct TestAuthority {
    authority: Authority,
    folder: TempDir,
    written: AtomicUsize,
}

impl Default for TestAuthority {
    fn default() -> Self {
        let (authority, _) = Authority::create(LIFE).expect("an authority is created");
        let folder = tempfile::tempdir().expect("there is room for a folder");
        Self { authority, folder, written: AtomicUsize::new(0) }
    }
}

impl TestAuthority {
    /// Signs a certificate for `identity`.
    #[must_use]
    pub fn sign(&self, identity: &Identity, life: Duration) -> CertifiedKey {
        self.authority.sign(identity, life).expect("a certificate is signed")
    }

    /// Returns the certificate of the authority.
    #[must_use]
    pub fn certificate(&self) -> &str {
        self.authority.certificate()
    }

    /// Writes `pair` and `authorities` to the folder `name`. Replaces a previous folder atomically, as a kubelet
    /// does.
    pub fn write(&self, name: &str, pair: &CertifiedKey, authorities: &str) -> PathBuf {
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let data = self.folder.path().join(format!("{name}-{number}"));
        fs::create_dir(&data).expect("the folder is new");
        for (file, text) in
            [(CERTIFICATE, &*pair.certificate), (KEY, &*pair.key), (CERTIFICATES_OF_AUTHORITIES, authorities)]
        {
            fs::write(data.join(file), text).expect("a file is written");
        }
        let (next, link) = (data.with_extension("link"), self.folder.path().join(name));
        symlink(&data, &next).expect("a link is made");
        fs::rename(&next, &link).expect("the link is put in place");
        link
    }

    /// Returns the trust with which `own` connects to `peer`.
    #[must_use]
    pub fn trust(&self, own: &Identity, peer: &Identity) -> Trust {
        self.trust_for(own, peer, LIFE)
    }

    /// Returns the trust as [`Self::trust`] does, with a certificate that is valid for `life`.
    #[must_use]
    pub fn trust_for(&self, own: &Identity, peer: &Identity, life: Duration) -> Trust {
        let pair = self.sign(own, life);
        let root = self.certificate().as_bytes();
        let credentials = Credentials::from_pem(pair.certificate.as_bytes(), pair.key.as_bytes(), root);
        Trust {
            keyring: Keyring::with_credentials(credentials.expect("they go together")),
            peer: Counterpart::Named(peer.clone()),
        }
    }

    /// Adds the identity of the main function under test to `options`.
    #[must_use]
    pub fn main(&self, options: StartOptions) -> StartOptions {
        let folder = self.write("main", &self.sign(&main_of(DEPLOYMENT), LIFE), self.certificate());
        with_identity(options, &folder).with("--operator-identity", operator())
    }

    /// Adds the identity of a remote function under test to `options`.
    #[must_use]
    pub fn remote(&self, options: StartOptions) -> StartOptions {
        let folder = self.write("remote", &self.sign(&remote_of(DEPLOYMENT), LIFE), self.certificate());
        with_identity(options, &folder)
    }
}

/// Adds the identity in `folder` to `options`.
#[must_use]
pub fn with_identity(options: StartOptions, folder: &Path) -> StartOptions {
    options.with("--identity-dir", folder.display())
}
