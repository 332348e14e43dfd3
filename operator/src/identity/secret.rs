//! Certificates as Secrets.

use super::StoredCertificate;
use crate::identity::SignerName;
use crate::names::{Component, MANAGER};
use crate::ownership::owned_meta;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::ObjectMeta;
use remoe_api::MoEDeployment;
use remoe_identity::CertifiedKey;
use remoe_proto::identity::{CERTIFICATE, CERTIFICATES_OF_AUTHORITIES, KEY};
use std::collections::BTreeMap;

/// Returns the name of the Secret that the pods of `part` of `deployment` mount; absent without a signer. Each signer
/// has a Secret of its own: the one that another signer has made, and may make again, does not get in its way.
pub(crate) fn secret_name(deployment: &str, part: Component, signer: SignerName) -> Option<String> {
    match signer {
        SignerName::Operator => Some(signed_name(deployment, part)),
        SignerName::CertManager => Some(issued_name(deployment, part)),
        SignerName::Unsigned => None,
    }
}

/// The one that the operator writes.
pub(super) fn signed_name(deployment: &str, part: Component) -> String {
    format!("{deployment}-{}-identity", part.name())
}

/// The one that cert-manager writes, and what it is asked for by.
pub(super) fn issued_name(deployment: &str, part: Component) -> String {
    format!("{deployment}-{}-certificate", part.name())
}

/// Reads the files of a Secret; missing ones are empty.
pub(crate) fn held(secret: &Secret) -> StoredCertificate {
    let file = |name: &str| {
        let bytes = secret.data.as_ref().and_then(|data| data.get(name));
        bytes.map_or_else(Vec::new, |ByteString(bytes)| bytes.clone())
    };
    StoredCertificate {
        certificate: file(CERTIFICATE),
        key: file(KEY),
        authorities: file(CERTIFICATES_OF_AUTHORITIES),
    }
}

/// The certificate and key of what is held.
pub(super) fn pair_of(held: &StoredCertificate) -> CertifiedKey {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    CertifiedKey { certificate: text(&held.certificate), key: text(&held.key) }
}

/// Returns the files as a Secret holds them.
pub(super) fn files(held: &StoredCertificate) -> BTreeMap<String, ByteString> {
    let files = [
        (CERTIFICATE, &held.certificate),
        (KEY, &held.key),
        (CERTIFICATES_OF_AUTHORITIES, &held.authorities),
    ];
    BTreeMap::from(files.map(|(file, bytes)| (file.to_owned(), ByteString(bytes.clone()))))
}

/// The Secret that the operator writes for `part` of `owner`, which goes with it.
pub(crate) fn secret_of(owner: &MoEDeployment, part: Component, held: &StoredCertificate) -> Secret {
    secret(owned_meta(owner, |deployment| signed_name(deployment, part)), files(held))
}

/// Returns a Secret of the operator's own namespace, without an owner.
pub(super) fn own_secret(name: &str, files: BTreeMap<String, ByteString>) -> Secret {
    let labels = [("app.kubernetes.io/part-of", "remoe"), ("app.kubernetes.io/managed-by", MANAGER)];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
    let metadata = ObjectMeta {
        name: Some(name.to_owned()),
        labels: Some(BTreeMap::from(labels)),
        ..ObjectMeta::default()
    };
    secret(metadata, files)
}

fn secret(metadata: ObjectMeta, files: BTreeMap<String, ByteString>) -> Secret {
    Secret { metadata, type_: Some("kubernetes.io/tls".to_owned()), data: Some(files), ..Secret::default() }
}
