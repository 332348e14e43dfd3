//! Certificate resources of cert-manager.

use super::CertificateState;
use super::secret::issued_name;
use crate::api::{CallError, NamespaceApi};
use crate::drift::is_up_to_date;
use crate::names::Component;
use crate::ownership::{is_owned_by, name_taken, owned_meta};
use kube::{CustomResource, ResourceExt};
use remoe_api::MoEDeployment;
use remoe_proto::identity::Identity;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Spec of a requested certificate. cert-manager fills in the fields that are absent here.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "cert-manager.io",
    version = "v1",
    kind = "Certificate",
    namespaced,
    schema = "disabled",
    status = "CertificateStatus",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CertificateSpec {
    secret_name: String,
    /// Duration in Go's notation.
    duration: String,
    renew_before: String,
    uris: Vec<String>,
    usages: Vec<String>,
    private_key: PrivateKey,
    issuer_ref: IssuerRef,
}

/// Status as cert-manager writes it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct CertificateStatus {
    #[serde(default)]
    conditions: Vec<CertificateCondition>,
}

/// Condition of a Certificate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct CertificateCondition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

impl Certificate {
    /// Returns whether cert-manager has written the Secret.
    fn is_ready(&self) -> bool {
        let conditions = self.status.iter().flat_map(|status| &status.conditions);
        conditions.into_iter().any(|condition| condition.kind == "Ready" && condition.status == "True")
    }
}

/// Parameters of the private key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PrivateKey {
    algorithm: String,
    size: u32,
    encoding: String,
    rotation_policy: String,
}

/// Issuer of certificates: an Issuer or a ClusterIssuer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IssuerRef {
    pub name: String,
    /// `Issuer` or `ClusterIssuer`.
    pub kind: String,
}

/// Returns the Certificate of `component` of `owner`, by which cert-manager writes the Secret that the pods mount. It
/// is owned by the deployment.
pub(crate) fn certificate(
    owner: &MoEDeployment,
    component: Component,
    identity: &Identity,
    issuer: &IssuerRef,
    lifetime: Duration,
) -> Certificate {
    let secret_name = issued_name(&owner.name_any(), component);
    let owned = |text: &str| text.to_owned();
    Certificate {
        metadata: owned_meta(owner, |_| secret_name.clone()),
        spec: CertificateSpec {
            secret_name,
            duration: format!("{}s", lifetime.as_secs()),
            renew_before: format!("{}s", lifetime.as_secs() / 2),
            uris: vec![identity.to_string()],
            usages: ["digital signature", "client auth", "server auth"].map(owned).into(),
            private_key: PrivateKey {
                algorithm: owned("ECDSA"),
                size: 256,
                encoding: owned("PKCS8"),
                rotation_policy: owned("Always"),
            },
            issuer_ref: issuer.clone(),
        },
        status: None,
    }
}

/// Applies a Certificate of `owner`, unless it belongs to another owner.
///
/// # Errors
/// An API call failed.
pub(super) async fn apply_certificate(
    api: &NamespaceApi,
    owner: &MoEDeployment,
    wanted: &Certificate,
) -> Result<CertificateState, CallError> {
    if let Some(live) = api.get::<Certificate>(&wanted.name_any()).await? {
        if !is_owned_by(&live, &owner.uid().unwrap_or_default()) {
            return Ok(CertificateState::ActionRequired(name_taken(wanted)));
        }
        if is_up_to_date(&live, wanted) {
            return Ok(if live.is_ready() { CertificateState::Present } else { CertificateState::Pending });
        }
    }
    api.apply(wanted).await.map(|_| CertificateState::Pending)
}
