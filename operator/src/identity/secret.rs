//! Stores certificates in Secrets.

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

/// Returns the name of the Secret that the pods of `component` of `deployment` mount; absent without a signer. Each
/// signer has its own Secret, so that two signers never overwrite each other.
pub(crate) fn secret_name(deployment: &str, component: Component, signer: SignerName) -> Option<String> {
    match signer {
        SignerName::Operator => Some(signed_name(deployment, component)),
        SignerName::CertManager => Some(issued_name(deployment, component)),
        SignerName::Unsigned => None,
    }
}

/// Returns the name of the Secret that the operator writes.
pub(super) fn signed_name(deployment: &str, component: Component) -> String {
    format!("{deployment}-{}-identity", component.name())
}

/// Returns the name of the Secret that cert-manager writes; also the name of its Certificate.
pub(super) fn issued_name(deployment: &str, component: Component) -> String {
    format!("{deployment}-{}-certificate", component.name())
}

/// Reads the certificate from a Secret; missing files are empty.
pub(crate) fn stored_certificate(secret: &Secret) -> StoredCertificate {
    let file = |name: &str| {
        let bytes = secret.data.as_ref().and_then(|data| data.get(name));
        bytes.map_or_else(Vec::new, |ByteString(bytes)| bytes.clone())
    };
    StoredCertificate {
        certificate: file(CERTIFICATE),
        key: file(KEY),
        trust_bundle: file(CERTIFICATES_OF_AUTHORITIES),
    }
}

/// Returns the certificate and key of `stored`.
pub(super) fn pair_of(stored_certificate: &StoredCertificate) -> CertifiedKey {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    CertifiedKey { certificate: text(&stored_certificate.certificate), key: text(&stored_certificate.key) }
}

/// Returns the data of the Secret of `stored`.
pub(super) fn files(stored_certificate: &StoredCertificate) -> BTreeMap<String, ByteString> {
    let files = [
        (CERTIFICATE, &stored_certificate.certificate),
        (KEY, &stored_certificate.key),
        (CERTIFICATES_OF_AUTHORITIES, &stored_certificate.trust_bundle),
    ];
    BTreeMap::from(files.map(|(file, bytes)| (file.to_owned(), ByteString(bytes.clone()))))
}

/// Returns the Secret of `component` of `owner` that the operator writes. It is owned by the deployment.
pub(crate) fn secret_of(
    owner: &MoEDeployment,
    component: Component,
    stored_certificate: &StoredCertificate,
) -> Secret {
    secret(owned_meta(owner, |deployment| signed_name(deployment, component)), files(stored_certificate))
}

/// Returns a Secret in the operator's own namespace, without an owner reference.
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
