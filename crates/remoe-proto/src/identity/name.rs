//! Identities of processes as names in certificates.

use super::IdentityError;
use std::fmt;
use std::str::FromStr;

/// Prefix of every identity.
const PREFIX: &str = "spiffe://remoe/";
/// Largest part of a name, in bytes: namespaces and uids are shorter.
const PART_BYTES: usize = 128;

/// Identity of a process: the only URI of this form among the names of its certificate.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Identity {
    /// The operator of a release: `spiffe://remoe/NAMESPACE/operator`.
    Operator {
        /// Namespace of the release.
        namespace: String,
    },
    /// The gateways of a release: `spiffe://remoe/NAMESPACE/gateway`.
    Gateway {
        /// Namespace of the release.
        namespace: String,
    },
    /// A main function: `spiffe://remoe/NAMESPACE/DEPLOYMENT/main`.
    Main {
        /// Namespace of the deployment.
        namespace: String,
        /// Uid of the deployment.
        deployment: String,
    },
    /// A remote-expert function: `spiffe://remoe/NAMESPACE/DEPLOYMENT/remote`.
    Remote {
        /// Namespace of the deployment.
        namespace: String,
        /// Uid of the deployment.
        deployment: String,
    },
}

impl Identity {
    /// Returns the identity of the main functions of the same deployment; `None` for operators and gateways, which
    /// belong to no deployment.
    #[must_use]
    pub fn main(&self) -> Option<Self> {
        let (namespace, deployment) = self.deployment()?;
        Some(Self::Main { namespace: namespace.to_owned(), deployment: deployment.to_owned() })
    }

    /// Returns the identity of the remote-expert functions of the same deployment. `None` for operators and gateways.
    #[must_use]
    pub fn remote(&self) -> Option<Self> {
        let (namespace, deployment) = self.deployment()?;
        Some(Self::Remote { namespace: namespace.to_owned(), deployment: deployment.to_owned() })
    }

    fn deployment(&self) -> Option<(&str, &str)> {
        match self {
            Self::Operator { .. } | Self::Gateway { .. } => None,
            Self::Main { namespace, deployment } | Self::Remote { namespace, deployment } => {
                Some((namespace, deployment))
            }
        }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operator { namespace } => write!(f, "{PREFIX}{namespace}/operator"),
            Self::Gateway { namespace } => write!(f, "{PREFIX}{namespace}/gateway"),
            Self::Main { namespace, deployment } => write!(f, "{PREFIX}{namespace}/{deployment}/main"),
            Self::Remote { namespace, deployment } => write!(f, "{PREFIX}{namespace}/{deployment}/remote"),
        }
    }
}

impl FromStr for Identity {
    type Err = IdentityError;

    fn from_str(uri: &str) -> Result<Self, IdentityError> {
        let invalid = || IdentityError::Name { found: uri.chars().take(2 * PART_BYTES).collect() };
        let path = uri.strip_prefix(PREFIX).ok_or_else(invalid)?;
        let is_part = |part: &str| {
            let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
            (1..=PART_BYTES).contains(&part.len()) && part.bytes().all(allowed)
        };
        let parts: Vec<&str> = path.splitn(4, '/').collect();
        if !parts.iter().all(|part| is_part(part)) {
            return Err(invalid());
        }
        match *parts {
            [namespace, "operator"] => Ok(Self::Operator { namespace: namespace.to_owned() }),
            [namespace, "gateway"] => Ok(Self::Gateway { namespace: namespace.to_owned() }),
            [namespace, deployment, "main"] => {
                Ok(Self::Main { namespace: namespace.to_owned(), deployment: deployment.to_owned() })
            }
            [namespace, deployment, "remote"] => {
                Ok(Self::Remote { namespace: namespace.to_owned(), deployment: deployment.to_owned() })
            }
            _ => Err(invalid()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn displayed_identity_parses_back() {
        for uri in [
            "spiffe://remoe/ns/operator",
            "spiffe://remoe/ns/gateway",
            "spiffe://remoe/ns/uid-1/main",
            "spiffe://remoe/ns/u/remote",
        ] {
            assert_eq!(
                uri.parse::<Identity>().map(|identity| identity.to_string()).as_deref().ok(),
                Some(uri)
            );
        }
    }

    #[test]
    fn identities_have_exactly_one_text_form() {
        let long = format!("spiffe://remoe/{}/operator", "n".repeat(PART_BYTES + 1));
        for uri in [
            "",
            "spiffe://remoe/",
            "spiffe://remoe/operator",
            "spiffe://remoe//operator",
            "spiffe://remoe/ns/operator/",
            "spiffe://remoe/ns/uid/operator",
            "spiffe://remoe/ns/uid/gateway",
            "spiffe://remoe/ns/uid/main/x",
            "spiffe://remoe/ns/uid/Main",
            "spiffe://remoe/n%73/uid/main",
            "spiffe://other/ns/uid/main",
            "SPIFFE://remoe/ns/uid/main",
            &long,
        ] {
            assert!(matches!(uri.parse::<Identity>(), Err(IdentityError::Name { .. })), "{uri}");
        }
    }

    #[test]
    fn identity_gives_the_counterpart_of_its_deployment() {
        let main = Identity::Main { namespace: "ns".to_owned(), deployment: "uid".to_owned() };
        let remote = main.remote();
        assert_eq!(remote.as_ref().and_then(Identity::main), Some(main));
        assert_eq!(remote.map(|it| it.to_string()).as_deref(), Some("spiffe://remoe/ns/uid/remote"));
        assert_eq!(Identity::Operator { namespace: "ns".to_owned() }.main(), None);
    }
}
