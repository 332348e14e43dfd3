//! An authority that signs the certificates by which processes know each other.
//!
//! A certificate says one thing, an [`Identity`], and is good for both ends of a connection. Its key is made
//! with it and never used for another one.

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType,
};
use remoe_proto::identity::{Credentials, Identity, IdentityError};
use std::time::{Duration, SystemTime};

/// How far a certificate reaches back: clocks of nodes differ.
const BACK: Duration = Duration::from_secs(300);
/// The name of every authority; its key tells it apart.
const NAME: &str = "Remoe";

/// Reason why nothing was signed.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The key or the certificate of the authority cannot be used, or signing failed.
    #[error("cannot sign a certificate: {0}")]
    Signing(#[from] rcgen::Error),
    /// The signed certificate, or the authority's own, cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// A certificate and its key, as PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertifiedKey {
    /// The certificate.
    pub certificate: String,
    /// The key.
    pub key: String,
}

/// An authority.
#[derive(Debug)]
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
}

impl Authority {
    /// A new one, whose certificate is good for `life`. Returned with what to keep of it.
    ///
    /// # Errors
    /// No key can be made.
    pub fn create(life: Duration) -> Result<(Self, CertifiedKey), AuthorityError> {
        let key = KeyPair::generate()?;
        let mut params = own_params();
        (params.not_before, params.not_after) = validity(life);
        let pair = CertifiedKey { certificate: params.self_signed(&key)?.pem(), key: key.serialize_pem() };
        Ok((Self { issuer: Issuer::new(own_params(), key), certificate: pair.certificate.clone() }, pair))
    }

    /// One that was created before. It signs with the key of `pair`; that its certificate is that key's
    /// shows when something is signed: see [`Self::sign`].
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

    /// A new key for `identity` with a certificate that is good for `life` from now.
    ///
    /// # Errors
    /// No key can be made.
    pub fn sign(&self, identity: &Identity, life: Duration) -> Result<CertifiedKey, AuthorityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = vec![SanType::URI(identity.to_string().try_into()?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        (params.not_before, params.not_after) = validity(life);
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(CertifiedKey { certificate: certificate.pem(), key: key.serialize_pem() })
    }

    /// As [`Self::sign`], as credentials that trust this authority only.
    ///
    /// # Errors
    /// Nothing can be signed, or the signed certificate is not trusted: the authority's certificate belongs to another
    /// key.
    pub fn credentials(&self, identity: &Identity, life: Duration) -> Result<Credentials, AuthorityError> {
        let pair = self.sign(identity, life)?;
        let (certificate, key) = (pair.certificate.as_bytes(), pair.key.as_bytes());
        let credentials = Credentials::from_pem(certificate, key, self.certificate.as_bytes())?;
        if !credentials.are_valid_at(SystemTime::now()) {
            let message = "the authority's own certificate expired, or belongs to another key";
            return Err(IdentityError::Unusable(message.to_owned()).into());
        }
        Ok(credentials)
    }
}

/// Returns the parameters that the authority's certificate and its signatures have in common.
fn own_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, NAME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

/// From a little before now to `life` after.
fn validity<T: From<SystemTime>>(life: Duration) -> (T, T) {
    let now = SystemTime::now();
    ((now - BACK).into(), (now + life).into())
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
    fn what_is_signed_says_who_it_is_for_as_long_as_it_was_asked_to() {
        let (_, pair) = Authority::create(30 * DAY).unwrap();
        // Kept and opened, as an operator that was restarted does.
        let authority = Authority::open(&pair).unwrap();
        let credentials = authority.credentials(&main(), DAY).unwrap();
        assert_eq!(*credentials.identity(), main());
        assert!(credentials.are_valid_in(Duration::ZERO) && credentials.are_valid_in(DAY / 2));
        assert!(!credentials.are_valid_in(DAY + Duration::from_secs(2)));
        assert!(!credentials.are_valid_at(SystemTime::now() - DAY));
    }

    #[test]
    fn what_another_authority_signs_is_not_valid() {
        let ((ours, _), (other, _)) = (Authority::create(DAY).unwrap(), Authority::create(DAY).unwrap());
        let pair = other.sign(&main(), DAY).unwrap();
        let mixed = |authority: &str| {
            Credentials::from_pem(pair.certificate.as_bytes(), pair.key.as_bytes(), authority.as_bytes())
        };
        assert!(!mixed(ours.certificate()).unwrap().are_valid_in(Duration::ZERO));
        assert!(mixed(other.certificate()).unwrap().are_valid_in(Duration::ZERO));
        let both = format!("{}{}", ours.certificate(), other.certificate());
        assert!(mixed(&both).unwrap().are_valid_in(Duration::ZERO), "while authorities change");
    }

    #[test]
    fn parts_that_do_not_go_together_are_refused() {
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
        assert!(torn.credentials(&main(), DAY).is_err(), "a certificate of one, the key of another");
    }
}
