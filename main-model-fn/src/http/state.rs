//! State that all HTTP handlers share.

use super::metrics::HttpMetrics;
use super::placement::PlacementView;
use super::primer::SummarySource;
use super::text_frontend::{TextFrontend, TextTokens};
use super::tools::Dialect;
use crate::engine::EngineHandle;
use crate::grammar::{Compiler, Grammar, Source};
use prometheus::Registry;
use remoe_billing::Meter;
use remoe_http::{BodyLanes, ConnectionLimits, Origins};
use remoe_model::GenerationDefaults;
use remoe_otel::Traces;
use remoe_plan::PlanAccount;
use remoe_proto::{ErrorCode, ServiceError};
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// Settings of the HTTP API.
#[derive(Debug, Clone)]
pub(crate) struct HttpOptions {
    /// Name of the model in requests and answers.
    pub(crate) model: String,
    /// Further names of the model that requests may use.
    pub(crate) further_names: Vec<String>,
    /// API key that clients must send as a bearer token; `None` if there is none.
    pub(crate) api_key: Option<String>,
    /// Key that identifies a gateway if connections have no identity.
    pub(crate) gateway_key: Option<String>,
    /// True if all clients are gateways, as mutual TLS ensures.
    pub(crate) is_only_for_gateways: bool,
    /// Origins that browsers may call from; `*` allows all.
    pub(crate) cors_origins: Origins,
    /// Largest request body in bytes.
    pub(crate) body_limit: usize,
    /// Longest time until a request body is complete.
    pub(crate) body_timeout: Duration,
    pub(crate) connections: ConnectionLimits,
    /// Sampling defaults for requests.
    pub(crate) defaults: GenerationDefaults,
    /// Variables of the chat template for requests that do not set them.
    pub(crate) template_variables: Map<String, Value>,
    /// Tokens that end an answer.
    pub(crate) end_ids: Vec<u32>,
    /// Model summary from which gateways predict expert usage; `None` if it is not served.
    pub(crate) primer: Option<SummarySource>,
    /// Tracing of requests.
    pub(crate) traces: Traces,
}

impl HttpOptions {
    /// Creates the default settings: no keys, no origins, bodies of up to 4 MiB within 60 s, connection limits of the
    /// environment, no traces.
    pub(crate) fn new(model: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            further_names: Vec::new(),
            api_key: None,
            gateway_key: None,
            is_only_for_gateways: false,
            cors_origins: Origins::default(),
            body_limit: 4 << 20,
            body_timeout: Duration::from_secs(60),
            connections: ConnectionLimits::from_environment(|name| std::env::var(name).ok()),
            defaults: GenerationDefaults::default(),
            template_variables: Map::new(),
            end_ids: Vec::new(),
            primer: None,
            traces: Traces::off(),
        }
    }

    fn has_name(&self, name: &str) -> bool {
        name == self.model || self.further_names.iter().any(|further| further == name)
    }
}

/// State that all HTTP handlers share.
pub(crate) struct HttpState {
    pub(super) engine: EngineHandle,
    pub(super) text: Option<Arc<dyn TextFrontend>>,
    /// How the model's chat template shows tools, writes calls and marks thoughts.
    pub(super) dialect: Dialect,
    /// Compiler of grammars; `None` without a tokenizer.
    grammars: Option<Compiler>,
    pub(super) options: HttpOptions,
    pub(super) metrics: HttpMetrics,
    pub(super) placement: PlacementView,
    pub(super) registry: Registry,
    pub(super) created: u64,
    /// Limits the bodies that are parsed and tokenised at the same time, and so memory and threads.
    pub(super) preparing: BodyLanes,
    /// Computes the costs of requests.
    pub(super) meter: Meter,
    ready: watch::Receiver<bool>,
    account: watch::Receiver<Option<Arc<PlanAccount>>>,
}

impl HttpState {
    /// Creates the state. Without `text`, only prompts of token ids work, and answers have no text.
    ///
    /// Requests are accepted while `ready` is true. `account` is the plan that measured figures are compared with.
    /// `registry` holds the metrics of `/metrics`.
    ///
    /// # Errors
    /// Fails if the name of a metric is taken in `registry`.
    pub(crate) fn new(
        engine: EngineHandle,
        text: Option<Arc<dyn TextFrontend>>,
        options: HttpOptions,
        ready: watch::Receiver<bool>,
        account: watch::Receiver<Option<Arc<PlanAccount>>>,
        placement: PlacementView,
        registry: Registry,
    ) -> Result<Self, prometheus::Error> {
        let vocab_size = engine.limits().vocab_size;
        let grammars = text
            .clone()
            .map(|text| Compiler::new(Arc::new(TextTokens(text)), vocab_size, options.end_ids.clone()));
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Ok(Self {
            metrics: HttpMetrics::new(&registry)?,
            preparing: BodyLanes::new(cores, options.body_limit),
            engine,
            dialect: text.as_ref().map_or(Dialect::PLAIN, |text| Dialect::of(text.as_ref())),
            text,
            grammars,
            options,
            placement,
            registry,
            created: unix_seconds(),
            meter: Meter::default(),
            ready,
            account,
        })
    }

    /// Compiles the grammar of `source`, which is the value of `field`.
    ///
    /// # Errors
    /// Fails as [`Compiler::compile`] does, or if there is no tokenizer.
    pub(super) async fn compile(&self, source: Source, field: &str) -> Result<Grammar, ServiceError> {
        let no_text =
            || ServiceError::invalid(field, "structured output needs a tokenizer, which this model lacks");
        self.grammars.as_ref().ok_or_else(no_text)?.compile(source, field).await
    }

    /// Returns the plan of the generation in force; `None` if it was not planned.
    pub(super) fn account(&self) -> Option<Arc<PlanAccount>> {
        self.account.borrow().clone()
    }

    /// Checks that the function accepts requests.
    ///
    /// # Errors
    /// Fails while the model loads and while the function drains.
    pub(super) fn check_ready(&self) -> Result<(), ServiceError> {
        if *self.ready.borrow() {
            return Ok(());
        }
        Err(ServiceError::new(
            ErrorCode::Unavailable,
            "not ready: the model is loading, or the server is shutting down; retry later",
        ))
    }

    /// Checks that `model` is absent or names the served model.
    ///
    /// # Errors
    /// Fails if it names another model.
    pub(super) fn check_model(&self, model: Option<&str>) -> Result<(), ServiceError> {
        match model {
            Some(model) if !self.options.has_name(model) => {
                let served = &self.options.model;
                let message = format!("The model `{model}` does not exist; available: `{served}`");
                Err(ServiceError::new(ErrorCode::NotFound, message).about("model"))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the seconds since 1970-01-01 UTC.
pub(super) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
