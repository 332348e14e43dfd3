//! Decides when a certificate is due for renewal. Pure.

use remoe_identity::CertifiedKey;
use remoe_proto::identity::{Credentials, Identity};
use std::fmt;
use std::time::{Duration, SystemTime};

/// Stored certificate, all parts in PEM.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct StoredCertificate {
    /// Certificate.
    pub certificate: Vec<u8>,
    /// Private key of the certificate.
    pub key: Vec<u8>,
    /// Trust bundle: certificates of the authorities that the bearer trusts.
    pub trust_bundle: Vec<u8>,
}

impl StoredCertificate {
    /// Combines `pair` with the trust bundle `trust_bundle`.
    pub(crate) fn new(pair: CertifiedKey, trust_bundle: &str) -> Self {
        Self {
            certificate: pair.certificate.into_bytes(),
            key: pair.key.into_bytes(),
            trust_bundle: trust_bundle.as_bytes().to_vec(),
        }
    }
}

/// Reason to issue a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RenewalReason {
    /// No certificate exists.
    Missing,
    /// Trust bundle differs.
    TrustBundleChanged,
    /// Certificate cannot be parsed, or its key does not match.
    Unusable(String),
    /// Certificate names another identity.
    OtherIdentity(Identity),
    /// Half of the lifetime passed, or another authority signed the certificate.
    Expiring,
}

impl fmt::Display for RenewalReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => write!(f, "missing"),
            Self::TrustBundleChanged => write!(f, "trust bundle changed"),
            Self::Unusable(why) => write!(f, "unusable: {why}"),
            Self::OtherIdentity(other) => write!(f, "issued to another identity: {other}"),
            Self::Expiring => write!(f, "half of its lifetime passed, or the authority changed"),
        }
    }
}

/// Returns why `stored` must be replaced by a new certificate for `wanted` with the trust bundle `trust_bundle`.
/// Certificates are valid for `lifetime`. Absent if renewal is not due.
pub(crate) fn renewal_reason(
    stored: Option<&StoredCertificate>,
    wanted: &Identity,
    trust_bundle: &str,
    lifetime: Duration,
    now: SystemTime,
) -> Option<RenewalReason> {
    let Some(stored) = stored else { return Some(RenewalReason::Missing) };
    if stored.trust_bundle != trust_bundle.as_bytes() {
        return Some(RenewalReason::TrustBundleChanged);
    }
    match Credentials::from_pem(&stored.certificate, &stored.key, &stored.trust_bundle) {
        Err(error) => Some(RenewalReason::Unusable(error.to_string())),
        Ok(known) if known.identity() != wanted => {
            Some(RenewalReason::OtherIdentity(known.identity().clone()))
        }
        Ok(known) => (!known.are_valid_at(now + lifetime / 2)).then_some(RenewalReason::Expiring),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use remoe_identity::Authority;

    const LIFETIME: Duration = Duration::from_secs(24 * 3600);

    fn main(deployment: &str) -> Identity {
        Identity::Main { namespace: "ns".to_owned(), deployment: deployment.to_owned() }
    }

    #[test]
    fn certificate_is_renewed_at_half_of_its_lifetime() {
        let (authority, _) = Authority::create(30 * LIFETIME).unwrap();
        let root = authority.certificate();
        let stored = StoredCertificate::new(authority.sign(&main("uid"), LIFETIME).unwrap(), root);
        let at = |later: Duration| {
            renewal_reason(Some(&stored), &main("uid"), root, LIFETIME, SystemTime::now() + later)
        };
        let minute = Duration::from_secs(60);
        for later in [Duration::ZERO, LIFETIME / 4, LIFETIME / 2 - minute] {
            assert_eq!(at(later), None, "{later:?}");
        }
        for later in [LIFETIME / 2 + minute, LIFETIME, 10 * LIFETIME] {
            assert_eq!(at(later), Some(RenewalReason::Expiring), "{later:?}");
        }
        // A changed lifetime applies to the next certificate.
        assert_eq!(renewal_reason(Some(&stored), &main("uid"), root, LIFETIME / 24, SystemTime::now()), None);
        assert_eq!(
            renewal_reason(Some(&stored), &main("uid"), root, 3 * LIFETIME, SystemTime::now()),
            Some(RenewalReason::Expiring)
        );
    }

    #[test]
    fn altered_certificate_is_reissued() {
        let (authority, _) = Authority::create(30 * LIFETIME).unwrap();
        let (other, _) = Authority::create(30 * LIFETIME).unwrap();
        let root = authority.certificate();
        let sign = |authority: &Authority| authority.sign(&main("uid"), LIFETIME).unwrap();
        let good = StoredCertificate::new(sign(&authority), root);
        let why = |stored: &StoredCertificate| {
            renewal_reason(Some(stored), &main("uid"), root, LIFETIME, SystemTime::now())
        };
        assert_eq!(why(&good), None);
        assert_eq!(
            renewal_reason(None, &main("uid"), root, LIFETIME, SystemTime::now()),
            Some(RenewalReason::Missing)
        );
        assert_eq!(
            why(&StoredCertificate { trust_bundle: Vec::new(), ..good.clone() }),
            Some(RenewalReason::TrustBundleChanged)
        );
        assert_eq!(
            why(&StoredCertificate::new(sign(&other), other.certificate())),
            Some(RenewalReason::TrustBundleChanged)
        );
        assert_eq!(
            why(&StoredCertificate::new(sign(&other), root)),
            Some(RenewalReason::Expiring),
            "another's signature"
        );
        let broken = StoredCertificate { certificate: b"x".to_vec(), ..good.clone() };
        assert!(matches!(why(&broken), Some(RenewalReason::Unusable(_))));
        let torn = StoredCertificate { key: sign(&authority).key.into_bytes(), ..good.clone() };
        assert!(matches!(why(&torn), Some(RenewalReason::Unusable(_))));
        let expected = Some(RenewalReason::OtherIdentity(main("uid")));
        assert_eq!(renewal_reason(Some(&good), &main("new"), root, LIFETIME, SystemTime::now()), expected);
    }
}
