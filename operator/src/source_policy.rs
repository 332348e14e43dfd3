//! Policy on sources and credentials of models.

use super::source::{ModelSource, SourceError};
use remoe_api::{ModelSpec, PlannedModel};
use remoe_hub::{Egress, EgressRule};

/// Server of `hf://` sources.
const HUB_URL: &str = "https://huggingface.co";
/// Domain of Amazon's buckets. Their host names include the region, which only the pod knows.
const AMAZON_DOMAIN: &str = "amazonaws.com";

/// Sources and credentials that a cluster administrator allows for pods that fetch weights.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SourcePolicy {
    /// Allowed hosts and addresses.
    pub egress: Egress,
    /// Set if `s3://` sources may use the role of the pod or its node.
    pub ambient_credentials: bool,
}

/// Refused source.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SourceRefusal {
    /// The source is invalid.
    #[error("spec.model.source: {0}")]
    Invalid(#[from] SourceError),
    /// The host is not allowed.
    #[error(
        "{field}: {problem}; allowed: {allowed}; use an allowed source, or have sources.allowed or \
         sources.allowedRanges of the chart changed"
    )]
    NotAllowed {
        /// Field that names the host.
        field: &'static str,
        /// Reason of the refusal.
        problem: String,
        /// Allowed hosts.
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

impl SourcePolicy {
    /// Creates the policy for `rules`.
    pub(crate) fn new(rules: &[EgressRule], ambient_credentials: bool) -> Self {
        Self { egress: rules.iter().cloned().collect(), ambient_credentials }
    }

    /// Checks the model of a spec.
    ///
    /// # Errors
    /// The source is invalid or not allowed.
    pub(crate) fn check_spec(&self, model: &ModelSpec) -> Result<(), SourceRefusal> {
        let source = ModelSource::parse(&model.source)?;
        self.check(&source, model.endpoint.as_deref(), model.ambient_credentials)
    }

    /// Checks the model of a plan.
    ///
    /// # Errors
    /// The source is invalid or not allowed.
    pub(crate) fn check_plan(&self, model: &PlannedModel) -> Result<ModelSource, SourceRefusal> {
        let source = ModelSource::parse(&model.source)?;
        self.check(&source, model.endpoint.as_deref(), model.ambient_credentials)?;
        Ok(source)
    }

    /// Checks host names without resolving them; pods check the resolved addresses.
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
            (ModelSource::Hub { .. }, None) => ("spec.model.source", HUB_URL),
            (ModelSource::Url { url }, None) if url.starts_with("s3://") => {
                if self.egress.allows_below(AMAZON_DOMAIN) {
                    return Ok(());
                }
                return refused("spec.model.source", format!("no allowed host is below {AMAZON_DOMAIN}"));
            }
            (ModelSource::Url { url }, None) => ("spec.model.source", url.as_str()),
        };
        match self.egress.check_text(url) {
            Ok(()) => Ok(()),
            Err(error) => refused(field, error.to_string()),
        }
    }
}
