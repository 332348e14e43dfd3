//! Addresses of main functions, as the operator states them.

use http::Uri;
use remoe_api::MainFunction;
use remoe_proto::identity::Identity;
use std::net::SocketAddr;

/// Returns the address of `main` and the identity that it must prove, if any. Returns `None` if either is invalid;
/// such a function is never called.
pub(crate) fn address_and_identity(main: &MainFunction) -> Option<(SocketAddr, Option<Identity>)> {
    let identity = main.identity.as_deref().map(str::parse).transpose().ok()?;
    Some((main.address.parse().ok()?, identity))
}

/// Returns the URI of `path` at `main`.
pub(crate) fn uri(main: &MainFunction, path: &str) -> Option<Uri> {
    let (address, identity) = address_and_identity(main)?;
    remoe_gateway_core::function_uri(address, identity.as_ref(), path).ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn unreadable_identity_is_not_treated_as_plaintext() {
        let uri = |identity: Option<&str>| {
            let (uid, pod) = ("u".to_owned(), "p".to_owned());
            let (address, identity) = ("10.0.0.1:8000".to_owned(), identity.map(str::to_owned));
            uri(&MainFunction { uid, pod, address, identity, room: 1 }, "/health")
        };
        assert_eq!(uri(None).unwrap(), "http://10.0.0.1:8000/health");
        let named = uri(Some("spiffe://remoe/models/uid/main")).unwrap();
        assert_eq!((named.scheme_str(), named.host()), (Some("https"), Some("10.0.0.1")));
        assert!(named.authority().unwrap().as_str().contains("uid"));
        for name in ["", "main", "spiffe://other/models/uid/main"] {
            assert_eq!(uri(Some(name)), None, "{name}");
        }
    }
}
