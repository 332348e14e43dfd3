//! The certificates by which the functions of a deployment and the operator know each other.
//!
//! An authority, whose key lies in one Secret beside the operator, signs a certificate for the main functions
//! of each deployment and one for its remote ones. They lie in two Secrets beside the pods that mount them, so
//! that no function can play another part. The gateways of the release have one in a Secret beside the operator. The
//! Secrets alone decide when they are renewed ([`due`], pure); nothing is remembered.

mod authority;
mod certificate;
mod due;
mod gateways;
mod secret;

pub(crate) use due::{StoredCertificate, due};
pub(crate) use gateways::{GATEWAY_IDENTITY, knows_gateways};
pub(crate) use secret::{held, secret_name, secret_of};

use super::api::{CallError, NamespaceApi};
use super::deployment_policy::DeploymentPolicy;
use super::digest::short_hash;
use super::names::Component;
use super::ownership::{is_owned_by, name_taken};
use super::status_issue::StatusIssue;
use authority::authority;
use certificate::keep_certificate;
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

/// Longest time between two checks of the certificate of the gateways: another writer may have removed it.
const LOOK: Duration = Duration::from_secs(60);
/// And after one that failed: gateways that start may wait for it.
const AGAIN: Duration = Duration::from_secs(5);

/// The parts of a deployment that have a certificate each.
const PARTS: [Component; 2] = [Component::Main, Component::RemoteExpert];

/// Why the operator cannot tell who is who.
#[derive(Debug, thiserror::Error)]
pub(super) enum IdentityFailure {
    /// The API.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The authority.
    #[error(
        "cannot use the authority Secret: {error}; delete it to create a new authority (docs/operations.md)"
    )]
    Authority {
        /// Fault of the authority.
        error: AuthorityError,
    },
    /// The operator's own certificate.
    #[error("cannot use the operator's certificate: {0}")]
    Own(#[from] IdentityError),
}

/// Signer of certificates, with its settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Signer {
    /// No certificates: functions accept every caller.
    Unsigned,
    /// The operator itself.
    Operator,
    /// An issuer of cert-manager; the operator's own certificate lies in this folder.
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

/// How the certificates of a deployment stand.
pub(super) struct CertificateSummary {
    /// Faults that a user must mend.
    pub(super) issues: Vec<StatusIssue>,
    /// Set if main functions that start now find their certificates, or need none.
    pub(super) mains: bool,
    /// When to look again at the latest.
    pub(super) requeue_after: Duration,
}

impl CertificateSummary {
    /// Returns the state of a deployment without certificates, and without pods that would need them.
    fn none() -> Self {
        Self { issues: Vec::new(), mains: false, requeue_after: Duration::MAX }
    }
}

/// Certificates of a deployment, and those by which the operator speaks with it.
pub(super) struct CertificationOutcome {
    /// Certificates of its functions. A failure keeps nothing from healing: most pods have theirs.
    pub(super) certified: Result<CertificateSummary, IdentityFailure>,
    /// Credentials of the operator; none without a signer.
    pub(super) trust: Result<Option<Trust>, IdentityFailure>,
}

impl CertificationOutcome {
    /// Returns whether main functions that start now find their certificates, or need none.
    pub(super) fn has_mains(&self) -> bool {
        self.certified.as_ref().is_ok_and(|certified| certified.mains)
    }

    /// Returns the faults that a user must mend.
    pub(super) fn issues(&self) -> impl Iterator<Item = StatusIssue> {
        self.certified.iter().flat_map(|certified| certified.issues.clone())
    }
}

/// How one certificate stands.
#[derive(Debug, Clone, PartialEq, Eq)]
enum CertificateState {
    /// Pods find it.
    There,
    /// Another component is to make it.
    Coming,
    /// A person must mend something first.
    Refused(StatusIssue),
}

/// Identities and authority of the operator and its gateways.
pub(super) struct Identities {
    signer: Signer,
    /// How long certificates are good for.
    life: Duration,
    /// Identity of the operator.
    own: Identity,
    /// Identity of the gateways of its release.
    gateway: Identity,
    /// The Secret of its authority.
    secret: String,
    /// The one of the certificate of the gateways.
    gateway_secret: String,
    /// The API of the operator's own namespace.
    api: NamespaceApi,
    authority: OnceCell<Authority>,
    keyring: OnceCell<Arc<Keyring>>,
}

impl Identities {
    /// Returns the identities for the operator of `release` in `namespace`; its writes are counted in `writes`.
    /// Releases of one namespace have an authority each: the functions of one do not trust the operator of the other.
    pub(super) fn new(
        signer: Signer,
        life: Duration,
        (namespace, release): (&str, &str),
        client: kube::Client,
        writes: IntCounterVec,
    ) -> Self {
        Self {
            signer,
            life,
            own: operator(namespace),
            gateway: gateway(namespace),
            secret: format!("{release}-authority"),
            gateway_secret: format!("{release}-gateway-identity"),
            api: NamespaceApi::new(client, namespace, writes),
            authority: OnceCell::new(),
            keyring: OnceCell::new(),
        }
    }

    /// Returns the credentials that the operator shows to the main functions of `owner`, and the identity that they
    /// must have. Absent without a signer.
    ///
    /// # Errors
    /// The API cannot be reached, or there is no certificate to show.
    async fn trust(&self, owner: &MoEDeployment) -> Result<Option<Trust>, IdentityFailure> {
        let keyring = match &self.signer {
            Signer::Unsigned => return Ok(None),
            Signer::Operator => self.signed_here().await?,
            Signer::CertManager(_, folder) => {
                let read = async || Keyring::of_folder(folder);
                self.keyring.get_or_try_init(read).await?.clone()
            }
        };
        Ok(Some(Trust { keyring, peer: Counterpart::Named(identity_of(owner, Component::Main)) }))
    }

    async fn authority(&self) -> Result<&Authority, IdentityFailure> {
        self.authority.get_or_try_init(|| authority(&self.api, &self.secret)).await
    }

    /// Returns the operator's own certificate, renewed when half of its time is over.
    async fn signed_here(&self) -> Result<Arc<Keyring>, IdentityFailure> {
        let authority = self.authority().await?;
        let sign = || {
            let signed = authority.credentials(&self.own, self.life);
            signed.map_err(|error| IdentityFailure::Authority { error })
        };
        let first = async || sign().map(Keyring::holding);
        let keyring = self.keyring.get_or_try_init(first).await?;
        if !keyring.current().are_valid_in(self.life / 2) {
            keyring.hold(sign()?);
        }
        Ok(keyring.clone())
    }

    /// Renews the certificates of the functions of `owner` where they are due, before any pod waits for one and before one
    /// that serves expires. A deployment that never ran and asks for something that is not `policy` gets none.
    pub(super) async fn certify(
        &self,
        api: &NamespaceApi,
        owner: &MoEDeployment,
        policy: &DeploymentPolicy,
    ) -> CertificationOutcome {
        let never_ran = owner.status.as_ref().is_none_or(|status| status.plan.is_none());
        let certified = match never_ran && policy.refusal(owner).is_some() {
            true => Ok(CertificateSummary::none()),
            false => self.keep(api, owner).await,
        };
        CertificationOutcome { certified, trust: self.trust(owner).await }
    }

    /// Sees to it that the functions of `owner` have certificates, and will have for long enough.
    ///
    /// # Errors
    /// A call that came to nothing, or no certificate can be made.
    async fn keep(
        &self,
        api: &NamespaceApi,
        owner: &MoEDeployment,
    ) -> Result<CertificateSummary, IdentityFailure> {
        let mut issues = Vec::new();
        let mut mains = true;
        let kept = join_all(PARTS.map(|part| self.keep_part(api, owner, part))).await;
        for (part, kept) in PARTS.into_iter().zip(kept) {
            let kept = match kept {
                Err(IdentityFailure::Call(error)) if error.code() == 403 && !error.namespace_ends() => {
                    CertificateState::Refused(not_permitted(owner, &error))
                }
                // Another writer set a field that cannot be changed.
                Err(IdentityFailure::Call(error)) if error.code() == 422 => {
                    CertificateState::Refused(not_changed(owner, part, &error))
                }
                kept => kept?,
            };
            mains &= part != Component::Main || kept == CertificateState::There;
            if let CertificateState::Refused(issue) = kept {
                issues.push(issue);
            }
        }
        Ok(CertificateSummary { issues, mains, requeue_after: self.life / 4 })
    }

    async fn keep_part(
        &self,
        api: &NamespaceApi,
        owner: &MoEDeployment,
        part: Component,
    ) -> Result<CertificateState, IdentityFailure> {
        match &self.signer {
            Signer::Unsigned => Ok(CertificateState::There),
            Signer::Operator => self.keep_secret(api, owner, part).await,
            Signer::CertManager(issuer, _) => {
                let wanted = certificate(owner, part, &identity_of(owner, part), issuer, self.life);
                keep_certificate(api, owner, &wanted).await.map_err(IdentityFailure::from)
            }
        }
    }

    async fn keep_secret(
        &self,
        api: &NamespaceApi,
        owner: &MoEDeployment,
        part: Component,
    ) -> Result<CertificateState, IdentityFailure> {
        let authority = self.authority().await?;
        let (name, identity) = (signed_name(&owner.name_any(), part), identity_of(owner, part));
        let live = api.get::<Secret>(&name).await?;
        let uid = owner.uid().unwrap_or_default();
        if live.as_ref().is_some_and(|live| !is_owned_by(live, &uid)) {
            return Ok(live
                .as_ref()
                .map_or(CertificateState::Coming, |live| CertificateState::Refused(name_taken(live))));
        }
        if let Some(held) = self.renewed(authority, live.as_ref(), &identity)? {
            api.apply(&secret_of(owner, part, &held)).await?;
        }
        Ok(CertificateState::There)
    }

    /// Returns the new content of the Secret of `identity`, of which `live` is the present one. Absent if that stays.
    fn renewed(
        &self,
        authority: &Authority,
        live: Option<&Secret>,
        identity: &Identity,
    ) -> Result<Option<StoredCertificate>, IdentityFailure> {
        let (there, authorities) = (live.map(held), authority.certificate());
        let Some(reason) = due(there.as_ref(), identity, authorities, self.life, SystemTime::now()) else {
            return Ok(None);
        };
        let pair = authority.sign(identity, self.life);
        let pair = pair.map_err(|error| IdentityFailure::Authority { error })?;
        tracing::info!(%identity, %reason, "certificate issued");
        Ok(Some(StoredCertificate::new(pair, authorities)))
    }

    /// Sees to it for ever that the gateways of the release have a certificate, and will have for long enough. Where
    /// cert-manager signs, the chart asks it for theirs.
    pub(super) async fn keep_gateways(&self) {
        if self.signer != Signer::Operator {
            return pending().await;
        }
        loop {
            let pause = match self.keep_gateway().await {
                Ok(()) => LOOK.min(self.life / 4),
                Err(error) => {
                    tracing::warn!(%error, secret = self.gateway_secret, "cannot issue the gateway certificate");
                    AGAIN
                }
            };
            sleep(pause).await;
        }
    }

    async fn keep_gateway(&self) -> Result<(), IdentityFailure> {
        let authority = self.authority().await?;
        let live = self.api.get::<Secret>(&self.gateway_secret).await?;
        if let Some(held) = self.renewed(authority, live.as_ref(), &self.gateway)? {
            self.api.apply(&own_secret(&self.gateway_secret, files(&held))).await?;
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

fn not_changed(owner: &MoEDeployment, part: Component, error: &CallError) -> StatusIssue {
    let message = format!(
        "cannot renew the certificate in {}: {error}; delete that object, the operator recreates it",
        signed_name(&owner.name_any(), part)
    );
    StatusIssue::new("IdentityNotWritten", message)
}

/// The operator of the release in `namespace`.
pub(crate) fn operator(namespace: &str) -> Identity {
    Identity::Operator { namespace: namespace.to_owned() }
}

/// The gateways of the release in `namespace`.
pub(crate) fn gateway(namespace: &str) -> Identity {
    Identity::Gateway { namespace: namespace.to_owned() }
}

/// The functions of `owner` that play `part`. After a rotation their name is another one, so that peers refuse
/// certificates of before.
pub(crate) fn identity_of(owner: &MoEDeployment, part: Component) -> Identity {
    let (namespace, uid) = (owner.namespace().unwrap_or_default(), owner.uid().unwrap_or_default());
    let deployment = match owner.annotations().get(IDENTITY_ROTATED_AT) {
        Some(at) if !at.is_empty() => format!("{uid}.{}", short_hash(at.as_bytes())),
        _ => uid,
    };
    match part {
        Component::RemoteExpert => Identity::Remote { namespace, deployment },
        Component::Main | Component::Inspector | Component::Profiler => {
            Identity::Main { namespace, deployment }
        }
    }
}
