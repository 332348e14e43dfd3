//! Which sources and credentials the models of deployments may have.

use super::source::{ModelSource, SourceError};
use remoe_api::{ModelSpec, PlannedModel};
use remoe_hub::{Egress, Rule};

/// The server of `hf://` sources.
const HUB: &str = "https://huggingface.co";
/// The domain of buckets of Amazon. Their names have the region, which only the pod knows.
const AMAZON: &str = "amazonaws.com";

/// Sources and credentials that an administrator of the cluster allows pods that fetch.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sources {
    /// Hosts and addresses.
    pub egress: Egress,
    /// The role of a pod or its node may be used for `s3://`.
    pub ambient_credentials: bool,
}

/// A source that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SourceRefusal {
    /// It cannot be read.
    #[error("spec.model.source: {0}")]
    Invalid(#[from] SourceError),
    /// It is not among the allowed ones.
    #[error(
        "{field}: {problem}; allowed: {allowed}; use an allowed source, or have sources.policy or \
         sources.allowedRanges of the chart changed"
    )]
    NotAllowed {
        /// The field that names the host.
        field: &'static str,
        /// Why it is not allowed.
        problem: String,
        /// The rules.
        allowed: String,
    },
    /// Ambient credentials are not allowed.
    #[error(
        "spec.model.ambientCredentials: not allowed in this cluster; use credentialsSecretName, or have \
         sources.ambientCredentials of the chart set"
    )]
    AmbientCredentials,
}

impl SourceRefusal {
    /// Returns the reason of the condition.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Invalid(_) => "InvalidSpec",
            Self::NotAllowed { .. } | Self::AmbientCredentials => "SourceNotAllowed",
        }
    }
}

impl Sources {
    /// The sources that `rules` allow.
    pub(crate) fn new(rules: &[Rule], ambient_credentials: bool) -> Self {
        Self { egress: rules.iter().cloned().collect(), ambient_credentials }
    }

    /// Checks the model of a spec.
    ///
    /// # Errors
    /// It cannot be read, or it is not allowed.
    pub(crate) fn check_spec(&self, model: &ModelSpec) -> Result<(), SourceRefusal> {
        let source = ModelSource::parse(&model.source)?;
        self.check(&source, model.endpoint.as_deref(), model.ambient_credentials)
    }

    /// Checks the model of a plan.
    ///
    /// # Errors
    /// It cannot be read, or it is not allowed.
    pub(crate) fn check_plan(&self, model: &PlannedModel) -> Result<ModelSource, SourceRefusal> {
        let source = ModelSource::parse(&model.source)?;
        self.check(&source, model.endpoint.as_deref(), model.ambient_credentials)?;
        Ok(source)
    }

    /// Checks what is known of hosts without resolving names: pods check what names resolve to.
    fn check(
        &self,
        source: &ModelSource,
        endpoint: Option<&str>,
        ambient_credentials: bool,
    ) -> Result<(), SourceRefusal> {
        if ambient_credentials && !self.ambient_credentials {
            return Err(SourceRefusal::AmbientCredentials);
        }
        let refused = |field, problem| {
            Err(SourceRefusal::NotAllowed { field, problem, allowed: self.egress.to_string() })
        };
        let (field, url) = match (source, endpoint) {
            (ModelSource::Claim { .. }, _) => return Ok(()),
            (_, Some(endpoint)) => ("spec.model.endpoint", endpoint),
            (ModelSource::Hub { .. }, None) => ("spec.model.source", HUB),
            (ModelSource::Url { url }, None) if url.starts_with("s3://") => {
                if self.egress.allows_below(AMAZON) {
                    return Ok(());
                }
                return refused("spec.model.source", format!("no allowed host is below {AMAZON}"));
            }
            (ModelSource::Url { url }, None) => ("spec.model.source", url.as_str()),
        };
        match self.egress.check_text(url) {
            Ok(()) => Ok(()),
            Err(error) => refused(field, error.to_string()),
        }
    }
}
