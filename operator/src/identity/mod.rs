//! Certificates for mutual TLS between the functions of a deployment, the operator and the gateways.
//!
//! A certificate authority signs one certificate for the main functions of a deployment and one for its remote-expert
//! functions. Each lies in its own Secret in the namespace of the pods, so that a function of one role cannot pose as
//! the other. The authority's key and the certificate of the gateways lie in Secrets in the operator's namespace.
//! Renewal depends only on the content of the Secrets ([`renewal`], pure).

mod authority;
mod certificate;
mod gateways;
mod renewal;
mod secret;

pub(crate) use gateways::{GATEWAY_IDENTITY, knows_gateways};
pub(crate) use renewal::{StoredCertificate, renewal_reason};
pub(crate) use secret::{secret_name, secret_of, stored_certificate};

use super::api::{CallError, NamespaceApi};
use super::deployment_policy::DeploymentPolicy;
use super::digest::short_hash;
use super::names::Component;
use super::ownership::{is_owned_by, name_taken};
use super::status_issue::StatusIssue;
use authority::load_or_create_authority;
use certificate::apply_certificate;
use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use prometheus::IntCounterVec;
use remoe_api::{IDENTITY_ROTATED_AT, MoEDeployment};
use remoe_identity::{Authority, AuthorityError};
use remoe_proto::identity::{Counterpart, Identity, IdentityError, Keyring, Trust};
use secret::{files, own_secret, signed_name};
use std::future::pending;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::OnceCell;
use tokio::time::sleep;

pub(crate) use certificate::{IssuerRef, certificate};

/// Longest interval between two checks of the gateway certificate. Another writer may have deleted it.
const GATEWAY_CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// Interval after a failed check. Starting gateways may wait for the certificate.
const GATEWAY_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Components of a deployment that have their own certificate.
const CERTIFIED_COMPONENTS: [Component; 2] = [Component::Main, Component::RemoteExpert];

/// Failure to issue or read certificates.
#[derive(Debug, thiserror::Error)]
pub(super) enum IdentityFailure {
    /// API call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// Authority cannot be used.
    #[error(
        "cannot use the authority Secret: {error}; delete it to create a new authority (docs/operations.md)"
    )]
    Authority {
        /// Cause.
        error: AuthorityError,
    },
    /// Operator's own certificate cannot be used.
    #[error("cannot use the operator's certificate: {0}")]
    OwnCertificate(#[from] IdentityError),
}

/// Signer of certificates, with its settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Signer {
    /// No certificates: functions accept every caller.
    Unsigned,
    /// Operator, with its own certificate authority.
    Operator,
    /// Issuer of cert-manager, with the folder that holds the operator's own certificate.
    CertManager(IssuerRef, PathBuf),
}

/// Signer of certificates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SignerName {
    /// The operator, with an authority of its own.
    Operator,
    /// An issuer of cert-manager.
    CertManager,
    /// No certificates.
    #[value(name = "none", alias = "nobody")]
    Unsigned,
}

/// State of the certificates of one deployment.
pub(super) struct CertificateSummary {
    /// Faults that a user must mend.
    pub(super) issues: Vec<StatusIssue>,
    /// Set if a main function that starts now finds its certificate, or needs none.
    pub(super) main_certificate_ready: bool,
    /// Longest time until the next check.
    pub(super) requeue_after: Duration,
}

impl CertificateSummary {
    /// Returns the state of a deployment that has no certificates and may not start pods.
    fn none() -> Self {
        Self { issues: Vec::new(), main_certificate_ready: false, requeue_after: Duration::MAX }
    }
}

/// Outcome of one certificate check.
pub(super) struct CertificationOutcome {
    /// Certificates of the deployment's functions. After a failure the reconcile continues: most pods have their
    /// certificates already.
    pub(super) certificates: Result<CertificateSummary, IdentityFailure>,
    /// Credentials of the operator for calls to main functions; none without a signer.
    pub(super) trust: Result<Option<Trust>, IdentityFailure>,
}

impl CertificationOutcome {
    /// Returns whether a main function that starts now finds its certificate, or needs none.
    pub(super) fn main_certificate_ready(&self) -> bool {
        self.certificates.as_ref().is_ok_and(|certificates| certificates.main_certificate_ready)
    }

    /// Returns the faults that a user must mend.
    pub(super) fn issues(&self) -> impl Iterator<Item = StatusIssue> {
        self.certificates.iter().flat_map(|certificates| certificates.issues.clone())
    }
}

/// State of one certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
enum CertificateState {
    /// The Secret exists, or none is needed.
    Present,
    /// Another component (cert-manager or the garbage collector) must act first.
    Pending,
    /// A user must act first.
    ActionRequired(StatusIssue),
}

/// Identities and authority of the operator and its gateways.
pub(super) struct Identities {
    signer: Signer,
    /// Lifetime of issued certificates.
    lifetime: Duration,
    /// Identity of the operator.
    own_identity: Identity,
    /// Identity of the gateways of the same release.
    gateway_identity: Identity,
    /// Name of the Secret of the authority.
    authority_secret: String,
    /// Name of the Secret of the gateway certificate.
    gateway_secret: String,
    /// API client of the operator's own namespace.
    api: NamespaceApi,
    authority: OnceCell<Authority>,
    keyring: OnceCell<Arc<Keyring>>,
}

impl Identities {
    /// Creates the identities for the operator of `release` in `namespace`. Releases of one namespace have separate
    /// authorities: functions of one release do not trust the operator of another. Writes are counted in `writes`.
    pub(super) fn new(
        signer: Signer,
        lifetime: Duration,
        (namespace, release): (&str, &str),
        client: kube::Client,
        writes: IntCounterVec,
    ) -> Self {
        Self {
            signer,
            lifetime,
            own_identity: operator_identity(namespace),
            gateway_identity: gateway_identity(namespace),
            authority_secret: format!("{release}-authority"),
            gateway_secret: format!("{release}-gateway-identity"),
            api: NamespaceApi::new(client, namespace, writes),
            authority: OnceCell::new(),
            keyring: OnceCell::new(),
        }
    }

    /// Returns the operator's credentials for calls to main functions of `owner`, with the identity that the peer
    /// must have. Absent without a signer.
    ///
    /// # Errors
    /// The API cannot be reached, or the operator has no certificate.
    async fn trust(&self, owner: &MoEDeployment) -> Result<Option<Trust>, IdentityFailure> {
        let keyring = match &self.signer {
            Signer::Unsigned => return Ok(None),
            Signer::Operator => self.own_keyring().await?,
            Signer::CertManager(_, folder) => {
                let read = async || Keyring::from_folder(folder);
                self.keyring.get_or_try_init(read).await?.clone()
            }
        };
        Ok(Some(Trust { keyring, peer: Counterpart::Named(identity_of(owner, Component::Main)) }))
    }

    async fn authority(&self) -> Result<&Authority, IdentityFailure> {
        self.authority.get_or_try_init(|| load_or_create_authority(&self.api, &self.authority_secret)).await
    }

    /// Returns the operator's own certificate, renewed after half of its lifetime.
    async fn own_keyring(&self) -> Result<Arc<Keyring>, IdentityFailure> {
        let authority = self.authority().await?;
        let sign = || {
            let signed = authority.credentials(&self.own_identity, self.lifetime);
            signed.map_err(|error| IdentityFailure::Authority { error })
        };
        let first = async || sign().map(Keyring::with_credentials);
        let keyring = self.keyring.get_or_try_init(first).await?;
        if !keyring.current().are_valid_in(self.lifetime / 2) {
            keyring.replace(sign()?);
        }
        Ok(keyring.clone())
    }

    /// Renews the certificates of the functions of `owner` that are due. New deployments get their certificates
    /// before their pods start; running ones get them before the old ones expire. A deployment that never ran and
    /// violates `policy` gets none.
    pub(super) async fn ensure_all(
        &self,
        api: &NamespaceApi,
        owner: &MoEDeployment,
        policy: &DeploymentPolicy,
    ) -> CertificationOutcome {
        let never_ran = owner.status.as_ref().is_none_or(|status| status.plan.is_none());
        let certificates = match never_ran && policy.refusal(owner).is_some() {
            true => Ok(CertificateSummary::none()),
            false => self.ensure_certificates(api, owner).await,
        };
        CertificationOutcome { certificates, trust: self.trust(owner).await }
    }

    /// Issues or renews the certificates of both components of `owner`.
    ///
    /// # Errors
    /// An API call failed, or a certificate cannot be issued.
    async fn ensure_certificates(
        &self,
        api: &NamespaceApi,
        owner: &MoEDeployment,
    ) -> Result<CertificateSummary, IdentityFailure> {
        let mut issues = Vec::new();
        let mut main_certificate_ready = true;
        let state =
            join_all(CERTIFIED_COMPONENTS.map(|component| self.ensure_certificate(api, owner, component)))
                .await;
        for (component, state) in CERTIFIED_COMPONENTS.into_iter().zip(state) {
            let state = match state {
                Err(IdentityFailure::Call(error))
                    if error.code() == 403 && !error.namespace_is_terminating() =>
                {
                    CertificateState::ActionRequired(not_permitted(owner, &error))
                }
                // Another writer set an immutable field.
                Err(IdentityFailure::Call(error)) if error.code() == 422 => {
                    CertificateState::ActionRequired(immutable_field(owner, component, &error))
                }
                state => state?,
            };
            main_certificate_ready &= component != Component::Main || state == CertificateState::Present;
            if let CertificateState::ActionRequired(issue) = state {
                issues.push(issue);
            }
        }
        Ok(CertificateSummary { issues, main_certificate_ready, requeue_after: self.lifetime / 4 })
    }

    async fn ensure_certificate(
        &self,
        api: &NamespaceApi,
        owner: &MoEDeployment,
        component: Component,
    ) -> Result<CertificateState, IdentityFailure> {
        match &self.signer {
            Signer::Unsigned => Ok(CertificateState::Present),
            Signer::Operator => self.ensure_secret(api, owner, component).await,
            Signer::CertManager(issuer, _) => {
                let wanted =
                    certificate(owner, component, &identity_of(owner, component), issuer, self.lifetime);
                apply_certificate(api, owner, &wanted).await.map_err(IdentityFailure::from)
            }
        }
    }

    async fn ensure_secret(
        &self,
        api: &NamespaceApi,
        owner: &MoEDeployment,
        component: Component,
    ) -> Result<CertificateState, IdentityFailure> {
        let authority = self.authority().await?;
        let (name, identity) = (signed_name(&owner.name_any(), component), identity_of(owner, component));
        let live = api.get::<Secret>(&name).await?;
        let uid = owner.uid().unwrap_or_default();
        if live.as_ref().is_some_and(|live| !is_owned_by(live, &uid)) {
            return Ok(live.as_ref().map_or(CertificateState::Pending, |live| {
                CertificateState::ActionRequired(name_taken(live))
            }));
        }
        if let Some(stored_certificate) = self.renewed(authority, live.as_ref(), &identity)? {
            api.apply(&secret_of(owner, component, &stored_certificate)).await?;
        }
        Ok(CertificateState::Present)
    }

    /// Returns the new content of the Secret of `identity`; absent if the current content in `live` stays.
    fn renewed(
        &self,
        authority: &Authority,
        live: Option<&Secret>,
        identity: &Identity,
    ) -> Result<Option<StoredCertificate>, IdentityFailure> {
        let (stored, authorities) = (live.map(stored_certificate), authority.certificate());
        let Some(reason) =
            renewal_reason(stored.as_ref(), identity, authorities, self.lifetime, SystemTime::now())
        else {
            return Ok(None);
        };
        let pair = authority.sign(identity, self.lifetime);
        let pair = pair.map_err(|error| IdentityFailure::Authority { error })?;
        tracing::info!(%identity, %reason, "certificate issued");
        Ok(Some(StoredCertificate::new(pair, authorities)))
    }

    /// Keeps the certificate of the release's gateways valid; never returns. With cert-manager the chart requests
    /// that certificate instead.
    pub(super) async fn keep_gateway_certificate(&self) {
        if self.signer != Signer::Operator {
            return pending().await;
        }
        loop {
            let pause = match self.ensure_gateway_certificate().await {
                Ok(()) => GATEWAY_CHECK_INTERVAL.min(self.lifetime / 4),
                Err(error) => {
                    tracing::warn!(%error, secret = self.gateway_secret, "cannot issue the gateway certificate");
                    GATEWAY_RETRY_INTERVAL
                }
            };
            sleep(pause).await;
        }
    }

    async fn ensure_gateway_certificate(&self) -> Result<(), IdentityFailure> {
        let authority = self.authority().await?;
        let live = self.api.get::<Secret>(&self.gateway_secret).await?;
        if let Some(stored_certificate) = self.renewed(authority, live.as_ref(), &self.gateway_identity)? {
            self.api.apply(&own_secret(&self.gateway_secret, files(&stored_certificate))).await?;
        }
        Ok(())
    }
}

fn not_permitted(owner: &MoEDeployment, error: &CallError) -> StatusIssue {
    let namespace = owner.namespace().unwrap_or_default();
    let message = format!(
        "cannot issue certificates: {error}; add {namespace} to identity.namespaces of the operator's chart, or to \
         watchNamespaces if that is set"
    );
    StatusIssue::new("IdentityNotPermitted", message)
}

fn immutable_field(owner: &MoEDeployment, component: Component, error: &CallError) -> StatusIssue {
    let message = format!(
        "cannot renew the certificate in {}: {error}; delete that object, the operator recreates it",
        signed_name(&owner.name_any(), component)
    );
    StatusIssue::new("IdentityNotWritten", message)
}

/// Returns the identity of the operator in `namespace`.
pub(crate) fn operator_identity(namespace: &str) -> Identity {
    Identity::Operator { namespace: namespace.to_owned() }
}

/// Returns the identity of the gateways in `namespace`.
pub(crate) fn gateway_identity(namespace: &str) -> Identity {
    Identity::Gateway { namespace: namespace.to_owned() }
}

/// Returns the identity of the functions of `owner` in `component`. A rotation changes it, so that peers reject
/// certificates issued before.
pub(crate) fn identity_of(owner: &MoEDeployment, component: Component) -> Identity {
    let (namespace, uid) = (owner.namespace().unwrap_or_default(), owner.uid().unwrap_or_default());
    let deployment = match owner.annotations().get(IDENTITY_ROTATED_AT) {
        Some(at) if !at.is_empty() => format!("{uid}.{}", short_hash(at.as_bytes())),
        _ => uid,
    };
    match component {
        Component::RemoteExpert => Identity::Remote { namespace, deployment },
        Component::Main | Component::Inspector | Component::Profiler => {
            Identity::Main { namespace, deployment }
        }
    }
}
