//! Certificate authority that signs the certificates by which processes identify each other.
//!
//! A certificate states one [`Identity`] and is valid for both ends of a connection. Each certificate has a new key.

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType,
};
use remoe_proto::identity::{Credentials, Identity, IdentityError};
use std::time::{Duration, SystemTime};

/// Time before now from which a certificate is valid, because the clocks of nodes differ.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(300);
/// Common name of every authority. Authorities differ by their keys.
const COMMON_NAME: &str = "Remoe";

/// Reason why no certificate was signed.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The key or the certificate of the authority cannot be used, or signing failed.
    #[error("cannot sign a certificate: {0}")]
    Signing(#[from] rcgen::Error),
    /// The signed certificate, or the authority's own, cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// Certificate and its private key, as PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertifiedKey {
    /// Certificate as PEM.
    pub certificate: String,
    /// Private key as PEM.
    pub key: String,
}

/// Certificate authority.
#[derive(Debug)]
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
}

impl Authority {
    /// Creates an authority whose own certificate is valid for `validity_time`. Returns it with its certificate and
    /// key, from which [`Self::open`] makes it again.
    ///
    /// # Errors
    /// The key or the certificate cannot be made.
    pub fn create(validity_time: Duration) -> Result<(Self, CertifiedKey), AuthorityError> {
        let key = KeyPair::generate()?;
        let mut params = own_params();
        (params.not_before, params.not_after) = validity(validity_time);
        let pair = CertifiedKey { certificate: params.self_signed(&key)?.pem(), key: key.serialize_pem() };
        Ok((Self { issuer: Issuer::new(own_params(), key), certificate: pair.certificate.clone() }, pair))
    }

    /// Opens an authority that was created before. A certificate that does not belong to the key is noticed only by
    /// [`Self::credentials`].
    ///
    /// # Errors
    /// The key cannot be read.
    pub fn open(pair: &CertifiedKey) -> Result<Self, AuthorityError> {
        let key = KeyPair::from_pem(&pair.key)?;
        Ok(Self { issuer: Issuer::new(own_params(), key), certificate: pair.certificate.clone() })
    }

    /// Returns its certificate, as PEM, for the trust bundles of processes that trust it.
    #[must_use]
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// Makes a new key and a certificate for `identity` that is valid for `validity_time` from now.
    ///
    /// # Errors
    /// The key or the certificate cannot be made.
    pub fn sign(&self, identity: &Identity, validity_time: Duration) -> Result<CertifiedKey, AuthorityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = vec![SanType::URI(identity.to_string().try_into()?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        (params.not_before, params.not_after) = validity(validity_time);
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(CertifiedKey { certificate: certificate.pem(), key: key.serialize_pem() })
    }

    /// Signs as [`Self::sign`]. Returns credentials that trust this authority only.
    ///
    /// # Errors
    /// Signing failed, or the authority's certificate has expired or belongs to another key.
    pub fn credentials(
        &self,
        identity: &Identity,
        validity_time: Duration,
    ) -> Result<Credentials, AuthorityError> {
        let pair = self.sign(identity, validity_time)?;
        let (certificate, key) = (pair.certificate.as_bytes(), pair.key.as_bytes());
        let credentials = Credentials::from_pem(certificate, key, self.certificate.as_bytes())?;
        if !credentials.are_valid_at(SystemTime::now()) {
            let message = "the authority's own certificate expired, or belongs to another key";
            return Err(IdentityError::Unusable(message.to_owned()).into());
        }
        Ok(credentials)
    }
}

/// Returns the parameters of the authority's certificate, which its signatures need as well.
fn own_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, COMMON_NAME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

/// Returns the start and the end of the validity.
fn validity<T: From<SystemTime>>(validity_time: Duration) -> (T, T) {
    let now = SystemTime::now();
    ((now - CLOCK_TOLERANCE).into(), (now + validity_time).into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn main() -> Identity {
        Identity::Main { namespace: "ns".to_owned(), deployment: "uid".to_owned() }
    }

    #[test]
    fn signed_certificate_has_its_identity_and_validity_time() {
        let (_, pair) = Authority::create(30 * DAY).unwrap();
        // Opened again, as a restarted operator does.
        let authority = Authority::open(&pair).unwrap();
        let credentials = authority.credentials(&main(), DAY).unwrap();
        assert_eq!(*credentials.identity(), main());
        assert!(credentials.are_valid_in(Duration::ZERO) && credentials.are_valid_in(DAY / 2));
        assert!(!credentials.are_valid_in(DAY + Duration::from_secs(2)));
        assert!(!credentials.are_valid_at(SystemTime::now() - DAY));
    }

    #[test]
    fn certificate_of_another_authority_is_not_valid() {
        let ((ours, _), (other, _)) = (Authority::create(DAY).unwrap(), Authority::create(DAY).unwrap());
        let pair = other.sign(&main(), DAY).unwrap();
        let mixed = |authority: &str| {
            Credentials::from_pem(pair.certificate.as_bytes(), pair.key.as_bytes(), authority.as_bytes())
        };
        assert!(!mixed(ours.certificate()).unwrap().are_valid_in(Duration::ZERO));
        assert!(mixed(other.certificate()).unwrap().are_valid_in(Duration::ZERO));
        let both = format!("{}{}", ours.certificate(), other.certificate());
        assert!(mixed(&both).unwrap().are_valid_in(Duration::ZERO), "during a rotation of authorities");
    }

    #[test]
    fn certificate_and_key_that_do_not_match_are_refused() {
        let (authority, kept) = Authority::create(DAY).unwrap();
        let (one, other) = (authority.sign(&main(), DAY).unwrap(), authority.sign(&main(), DAY).unwrap());
        let read = |certificate: &str, key: &str, authorities: &str| {
            Credentials::from_pem(certificate.as_bytes(), key.as_bytes(), authorities.as_bytes())
        };
        let refused = |certificate: &str, key: &str, authorities: &str| {
            read(certificate, key, authorities).err().map(|error| error.to_string()).unwrap()
        };
        let root = authority.certificate();
        assert!(read(&one.certificate, &one.key, root).is_ok());
        assert!(
            refused(&one.certificate, &other.key, root).contains("cannot use the certificate"),
            "another's key"
        );
        assert!(refused("", &one.key, root).contains("missing certificate"));
        assert!(refused(&one.certificate, "", root).contains("cannot parse the key as PEM"));
        assert!(refused(&one.certificate, &one.key, "").contains("missing authority"));
        assert!(refused(&kept.certificate, &kept.key, root).contains("got 0"));
        let (_, second) = Authority::create(DAY).unwrap();
        let torn = Authority::open(&CertifiedKey { certificate: kept.certificate, key: second.key }).unwrap();
        assert!(
            torn.credentials(&main(), DAY).is_err(),
            "the certificate of one authority and the key of another"
        );
    }
}
