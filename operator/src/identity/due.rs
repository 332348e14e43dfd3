//! Renewal of certificates: when one is due. Pure.

use remoe_identity::CertifiedKey;
use remoe_proto::identity::{Credentials, Identity};
use std::fmt;
use std::time::{Duration, SystemTime};

/// A certificate as it is kept, each part as PEM.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct StoredCertificate {
    /// The certificate.
    pub certificate: Vec<u8>,
    /// Private key of the certificate.
    pub key: Vec<u8>,
    /// The authorities that its bearer believes.
    pub authorities: Vec<u8>,
}

impl StoredCertificate {
    /// Returns `pair` together with the `authorities` that its bearer believes.
    pub(crate) fn new(pair: CertifiedKey, authorities: &str) -> Self {
        Self {
            certificate: pair.certificate.into_bytes(),
            key: pair.key.into_bytes(),
            authorities: authorities.as_bytes().to_vec(),
        }
    }
}

/// Why a certificate is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reason {
    /// There is none.
    Missing,
    /// The bearer believes other authorities.
    Authorities,
    /// It cannot be used.
    Unusable(String),
    /// It belongs to another identity.
    Name(Identity),
    /// Half of its time is over, or another authority has signed it.
    Expires,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => write!(f, "missing"),
            Self::Authorities => write!(f, "trust bundle changed"),
            Self::Unusable(why) => write!(f, "unusable: {why}"),
            Self::Name(other) => write!(f, "issued to another identity: {other}"),
            Self::Expires => write!(f, "half of its lifetime passed, or the authority changed"),
        }
    }
}

/// Returns why a certificate must be issued in place of `held` for `wanted`, which is to believe `authorities`, where
/// certificates are valid for `life`. Absent if none is due.
pub(crate) fn due(
    held: Option<&StoredCertificate>,
    wanted: &Identity,
    authorities: &str,
    life: Duration,
    now: SystemTime,
) -> Option<Reason> {
    let Some(held) = held else { return Some(Reason::Missing) };
    if held.authorities != authorities.as_bytes() {
        return Some(Reason::Authorities);
    }
    match Credentials::from_pem(&held.certificate, &held.key, &held.authorities) {
        Err(error) => Some(Reason::Unusable(error.to_string())),
        Ok(known) if known.identity() != wanted => Some(Reason::Name(known.identity().clone())),
        Ok(known) => (!known.are_valid_at(now + life / 2)).then_some(Reason::Expires),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use remoe_identity::Authority;

    const LIFE: Duration = Duration::from_secs(24 * 3600);

    fn main(deployment: &str) -> Identity {
        Identity::Main { namespace: "ns".to_owned(), deployment: deployment.to_owned() }
    }

    #[test]
    fn certificate_is_renewed_at_half_of_its_lifetime() {
        let (authority, _) = Authority::create(30 * LIFE).unwrap();
        let root = authority.certificate();
        let held = StoredCertificate::new(authority.sign(&main("uid"), LIFE).unwrap(), root);
        let at = |later: Duration| due(Some(&held), &main("uid"), root, LIFE, SystemTime::now() + later);
        let minute = Duration::from_secs(60);
        for later in [Duration::ZERO, LIFE / 4, LIFE / 2 - minute] {
            assert_eq!(at(later), None, "{later:?}");
        }
        for later in [LIFE / 2 + minute, LIFE, 10 * LIFE] {
            assert_eq!(at(later), Some(Reason::Expires), "{later:?}");
        }
        // Another life is that of the next one.
        assert_eq!(due(Some(&held), &main("uid"), root, LIFE / 24, SystemTime::now()), None);
        assert_eq!(due(Some(&held), &main("uid"), root, 3 * LIFE, SystemTime::now()), Some(Reason::Expires));
    }

    #[test]
    fn altered_certificate_is_reissued() {
        let (authority, _) = Authority::create(30 * LIFE).unwrap();
        let (other, _) = Authority::create(30 * LIFE).unwrap();
        let root = authority.certificate();
        let sign = |authority: &Authority| authority.sign(&main("uid"), LIFE).unwrap();
        let good = StoredCertificate::new(sign(&authority), root);
        let why = |held: &StoredCertificate| due(Some(held), &main("uid"), root, LIFE, SystemTime::now());
        assert_eq!(why(&good), None);
        assert_eq!(due(None, &main("uid"), root, LIFE, SystemTime::now()), Some(Reason::Missing));
        assert_eq!(
            why(&StoredCertificate { authorities: Vec::new(), ..good.clone() }),
            Some(Reason::Authorities)
        );
        assert_eq!(
            why(&StoredCertificate::new(sign(&other), other.certificate())),
            Some(Reason::Authorities)
        );
        assert_eq!(
            why(&StoredCertificate::new(sign(&other), root)),
            Some(Reason::Expires),
            "another's signature"
        );
        let broken = StoredCertificate { certificate: b"x".to_vec(), ..good.clone() };
        assert!(matches!(why(&broken), Some(Reason::Unusable(_))));
        let torn = StoredCertificate { key: sign(&authority).key.into_bytes(), ..good.clone() };
        assert!(matches!(why(&torn), Some(Reason::Unusable(_))));
        let expected = Some(Reason::Name(main("uid")));
        assert_eq!(due(Some(&good), &main("new"), root, LIFE, SystemTime::now()), expected);
    }
}
