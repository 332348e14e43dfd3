//! The authority, kept in a Secret that only the operator reads.

use super::IdentityFailure;
use super::secret::{held, own_secret, pair_of};
use crate::api::NamespaceApi;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use remoe_identity::{Authority, CertifiedKey};
use remoe_proto::identity::{CERTIFICATE, KEY};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long its certificate is good for: ten years. A new authority is made by deleting the Secret.
const LIFE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// The authority that is kept in the Secret `name` of the operator's own namespace, or a new one, which is kept before
/// anything is signed.
///
/// # Errors
/// A call came to nothing, or what is kept cannot be used.
pub(super) async fn authority(api: &NamespaceApi, name: &str) -> Result<Authority, IdentityFailure> {
    let unusable = |error| IdentityFailure::Authority { error };
    let open = |secret: &Secret| Authority::open(&pair_of(&held(secret))).map_err(unusable);
    if let Some(secret) = api.get::<Secret>(name).await? {
        return open(&secret);
    }
    let (authority, pair) = Authority::create(LIFE).map_err(unusable)?;
    match api.create(&secret(name, pair)).await {
        Ok(_) => {
            tracing::info!(secret = name, "certificate authority created");
            Ok(authority)
        }
        // Another operator was first.
        Err(error) if error.code() == 409 => match api.get::<Secret>(name).await? {
            Some(secret) => open(&secret),
            None => Err(error.into()),
        },
        Err(error) => Err(error.into()),
    }
}

fn secret(name: &str, pair: CertifiedKey) -> Secret {
    let files = [(CERTIFICATE, pair.certificate), (KEY, pair.key)];
    let files = files.map(|(file, text)| (file.to_owned(), ByteString(text.into_bytes())));
    own_secret(name, BTreeMap::from(files))
}
