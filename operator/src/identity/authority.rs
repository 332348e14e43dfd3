//! Certificate authority, stored in a Secret that only the operator reads.

use super::IdentityFailure;
use super::secret::{own_secret, pair_of, stored_certificate};
use crate::api::NamespaceApi;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use remoe_identity::{Authority, CertifiedKey};
use remoe_proto::identity::{CERTIFICATE, KEY};
use std::collections::BTreeMap;
use std::time::Duration;

/// Lifetime of the authority's certificate: ten years. Deleting the Secret creates a new authority.
const AUTHORITY_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Returns the authority stored in the Secret `name` of the operator's namespace. If there is none, creates it, and
/// stores it before it signs anything.
///
/// # Errors
/// An API call failed, or the stored authority cannot be used.
pub(super) async fn load_or_create_authority(
    api: &NamespaceApi,
    name: &str,
) -> Result<Authority, IdentityFailure> {
    let unusable = |error| IdentityFailure::Authority { error };
    let open = |secret: &Secret| Authority::open(&pair_of(&stored_certificate(secret))).map_err(unusable);
    if let Some(secret) = api.get::<Secret>(name).await? {
        return open(&secret);
    }
    let (authority, pair) = Authority::create(AUTHORITY_LIFETIME).map_err(unusable)?;
    match api.create(&authority_secret(name, pair)).await {
        Ok(_) => {
            tracing::info!(secret = name, "certificate authority created");
            Ok(authority)
        }
        // Another operator created it first.
        Err(error) if error.code() == 409 => match api.get::<Secret>(name).await? {
            Some(secret) => open(&secret),
            None => Err(error.into()),
        },
        Err(error) => Err(error.into()),
    }
}

fn authority_secret(name: &str, pair: CertifiedKey) -> Secret {
    let files = [(CERTIFICATE, pair.certificate), (KEY, pair.key)];
    let files = files.map(|(file, text)| (file.to_owned(), ByteString(text.into_bytes())));
    own_secret(name, BTreeMap::from(files))
}
