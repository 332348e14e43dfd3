//! Credentials: a certificate with its key and the trusted authorities, as TLS configurations.

use super::{Identity, IdentityError, Protocol};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CipherSuite, ClientConfig, DigitallySignedStruct, Error, RootCertStore, ServerConfig, SignatureScheme,
};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};
use webpki::{EndEntityCert, KeyUsage};

/// Cryptography of all connections. AES-128-GCM is first: the fastest on processors with AES instructions.
static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
    let mut provider = ring::default_provider();
    provider.cipher_suites.retain(|suite| {
        let allowed = [CipherSuite::TLS13_AES_128_GCM_SHA256, CipherSuite::TLS13_CHACHA20_POLY1305_SHA256];
        allowed.contains(&suite.suite())
    });
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
});

/// Identity of a process and the authorities that it trusts.
#[derive(Debug)]
pub struct Credentials {
    identity: Identity,
    certificate: CertificateDer<'static>,
    authorities: Arc<RootCertStore>,
    server: PerProtocol<ServerConfig>,
    client: PerProtocol<ClientConfig>,
}

/// TLS configuration for each protocol.
#[derive(Debug)]
struct PerProtocol<C> {
    grpc: Arc<C>,
    http: Arc<C>,
}

impl<C: Clone> PerProtocol<C> {
    /// Creates a copy of `config` for each protocol, with that protocol alone in its ALPN `list`.
    fn new(config: C, list: impl Fn(&mut C) -> &mut Vec<Vec<u8>>) -> Self {
        let configured = |protocol: Protocol| {
            let mut config = config.clone();
            *list(&mut config) = vec![protocol.name().to_vec()];
            Arc::new(config)
        };
        Self { grpc: configured(Protocol::Grpc), http: configured(Protocol::Http) }
    }

    fn get(&self, protocol: Protocol) -> Arc<C> {
        match protocol {
            Protocol::Grpc => self.grpc.clone(),
            Protocol::Http => self.http.clone(),
        }
    }
}

impl Credentials {
    /// Parses a certificate with its intermediates, its key and the certificates of authorities from PEM.
    ///
    /// # Errors
    /// One of them is invalid, the key does not match, or the certificate has no identity.
    pub fn from_pem(certificate: &[u8], key: &[u8], authorities: &[u8]) -> Result<Self, IdentityError> {
        let chain = certificates("the certificate", certificate)?;
        let first = chain.first().cloned().ok_or_else(|| unusable(&"missing certificate"))?;
        let key = private_key(key)?;
        let identity = identity_of(&first)?;
        let mut roots = RootCertStore::empty();
        for authority in certificates("the list of authorities", authorities)? {
            roots.add(authority).map_err(|error| unusable(&error))?;
        }
        if roots.is_empty() {
            return Err(unusable(&"missing authority in the trust bundle"));
        }
        let authorities = Arc::new(roots);
        let clients = WebPkiClientVerifier::builder_with_provider(authorities.clone(), PROVIDER.clone());
        let clients = clients.build().map_err(|error| unusable(&error))?;
        let server = server(chain.clone(), key.clone_key(), clients)?;
        let client = client(chain, key, authorities.clone())?;
        Ok(Self {
            server: PerProtocol::new(server, |config| &mut config.alpn_protocols),
            client: PerProtocol::new(client, |config| &mut config.alpn_protocols),
            identity,
            certificate: first,
            authorities,
        })
    }

    /// Returns the identity of the process.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Returns the server configuration for `protocol`.
    pub(super) fn server(&self, protocol: Protocol) -> Arc<ServerConfig> {
        self.server.get(protocol)
    }

    /// Returns the client configuration for `protocol`.
    pub(super) fn client(&self, protocol: Protocol) -> Arc<ClientConfig> {
        self.client.get(protocol)
    }

    /// Returns true if the certificate is valid at `time` and signed by one of the authorities.
    #[must_use]
    pub fn are_valid_at(&self, time: SystemTime) -> bool {
        let Ok(since) = time.duration_since(SystemTime::UNIX_EPOCH) else { return false };
        let algorithms = PROVIDER.signature_verification_algorithms.all;
        let end = EndEntityCert::try_from(&self.certificate);
        end.is_ok_and(|end| {
            let (roots, time) = (&self.authorities.roots, UnixTime::since_unix_epoch(since));
            end.verify_for_usage(algorithms, roots, &[], time, KeyUsage::client_auth(), None, None).is_ok()
        })
    }

    /// Returns true if the certificate is valid `later` from now, as [`Self::are_valid_at`] checks.
    #[must_use]
    pub fn are_valid_in(&self, later: Duration) -> bool {
        SystemTime::now().checked_add(later).is_some_and(|time| self.are_valid_at(time))
    }
}

fn server(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    clients: Arc<dyn ClientCertVerifier>,
) -> Result<ServerConfig, IdentityError> {
    let mut config = ServerConfig::builder_with_provider(PROVIDER.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| unusable(&error))?
        .with_client_cert_verifier(clients)
        .with_single_cert(chain, key)
        .map_err(|error| unusable(&error))?;
    // Disables resumption: resumed sessions are not verified again.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Returns the server configuration with this certificate and key, from PEM, for clients without certificates.
///
/// # Errors
/// One of them is invalid, or the key does not match.
pub(super) fn server_without_clients(certificate: &[u8], key: &[u8]) -> Result<ServerConfig, IdentityError> {
    let chain = certificates("the certificate", certificate)?;
    if chain.is_empty() {
        return Err(unusable(&"missing certificate"));
    }
    ServerConfig::builder_with_provider(PROVIDER.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| unusable(&error))?
        .with_no_client_auth()
        .with_single_cert(chain, private_key(key)?)
        .map_err(|error| unusable(&error))
}

fn private_key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, IdentityError> {
    PrivateKeyDer::from_pem_slice(pem)
        .map_err(|error| IdentityError::Pem { what: "the key", reason: error.to_string() })
}

fn client(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    authorities: Arc<RootCertStore>,
) -> Result<ClientConfig, IdentityError> {
    let mut config = ClientConfig::builder_with_provider(PROVIDER.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| unusable(&error))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AuthorityVerifier(authorities)))
        .with_client_auth_cert(chain, key)
        .map_err(|error| unusable(&error))?;
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    Ok(config)
}

/// Returns the identity in a certificate.
///
/// # Errors
/// The certificate is invalid, or does not have exactly one identity.
pub(super) fn identity_of(certificate: &CertificateDer<'_>) -> Result<Identity, IdentityError> {
    let end = EndEntityCert::try_from(certificate).map_err(|error| unusable(&error))?;
    let names: Vec<&str> = end.valid_uri_names().collect();
    match *names {
        [name] => name.parse(),
        _ => Err(IdentityError::Names { count: names.len() }),
    }
}

fn certificates(what: &'static str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    read.map_err(|error| IdentityError::Pem { what, reason: error.to_string() })
}

fn unusable(error: &dyn ToString) -> IdentityError {
    IdentityError::Unusable(error.to_string())
}

/// Verifier that accepts servers with a valid certificate of an authority, whatever their address. The caller checks
/// their identity after the handshake.
#[derive(Debug)]
struct AuthorityVerifier(Arc<RootCertStore>);

impl ServerCertVerifier for AuthorityVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let algorithms = PROVIDER.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&certificate, &self.0, intermediates, now, algorithms)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &PROVIDER.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &PROVIDER.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        PROVIDER.signature_verification_algorithms.supported_schemes()
    }
}
