//! State that all handlers share.

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

/// Settings of a deployment for its HTTP front.
#[derive(Debug, Clone)]
pub(crate) struct HttpOptions {
    /// The model's name in requests and answers.
    pub(crate) model: String,
    /// Names that requests may use as well.
    pub(crate) further_names: Vec<String>,
    /// Clients must send it as a bearer token, when there is one.
    pub(crate) api_key: Option<String>,
    /// Key by which a gateway is known where connections have no identity.
    pub(crate) gateway_key: Option<String>,
    /// All clients have shown the identity of a gateway.
    pub(crate) is_only_for_gateways: bool,
    /// Origins that browsers may call from; `*` is all of them.
    pub(crate) cors_origins: Origins,
    /// Largest request body in bytes.
    pub(crate) body_limit: usize,
    /// A request body must be there within this time.
    pub(crate) body_timeout: Duration,
    pub(crate) connections: ConnectionLimits,
    /// Sampling of requests that do not say.
    pub(crate) defaults: GenerationDefaults,
    /// Variables of the chat template, where a request does not set them.
    pub(crate) template_variables: Map<String, Value>,
    /// Tokens that end an answer.
    pub(crate) end_ids: Vec<u32>,
    /// Source of what gateways predict from; absent if they are not told.
    pub(crate) primer: Option<SummarySource>,
    /// Where spans of requests go.
    pub(crate) traces: Traces,
}

impl HttpOptions {
    /// No key, no origins, 4 MiB bodies within 60 s, connections as the
    /// environment says, no traces.
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

    fn is_called(&self, name: &str) -> bool {
        name == self.model || self.further_names.iter().any(|further| further == name)
    }
}

/// The engine, the text and the options behind the routes.
pub(crate) struct HttpState {
    pub(super) engine: EngineHandle,
    pub(super) text: Option<Arc<dyn TextFrontend>>,
    /// How the model's chat template shows tools, writes calls and opens thoughts.
    pub(super) dialect: Dialect,
    /// Where there is text.
    grammars: Option<Compiler>,
    pub(super) options: HttpOptions,
    pub(super) metrics: HttpMetrics,
    pub(super) placement: PlacementView,
    pub(super) registry: Registry,
    pub(super) created: u64,
    /// Bodies that are parsed and tokenised at the same time: bounds memory and threads.
    pub(super) preparing: BodyLanes,
    /// Tells requests what they cost.
    pub(super) meter: Meter,
    ready: watch::Receiver<bool>,
    account: watch::Receiver<Option<Arc<PlanAccount>>>,
}

impl HttpState {
    /// Without `text` only prompts of ids work and no answer has text. Requests are taken while
    /// `ready` is true. `account` is the plan that figures are compared with. `placement` is what is in force.
    /// `registry` is what `/metrics` shows.
    ///
    /// # Errors
    /// A metric's name is taken in `registry`.
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

    /// Compiles `source`, which stands in `field`.
    ///
    /// # Errors
    /// As [`Compiler::compile`], or there is no tokenizer.
    pub(super) async fn compile(&self, source: Source, field: &str) -> Result<Grammar, ServiceError> {
        let no_text =
            || ServiceError::invalid(field, "structured output needs a tokenizer, which this model lacks");
        self.grammars.as_ref().ok_or_else(no_text)?.compile(source, field).await
    }

    /// The plan behind the generation in force, where there is one.
    pub(super) fn account(&self) -> Option<Arc<PlanAccount>> {
        self.account.borrow().clone()
    }

    /// # Errors
    /// The model is loading or the function is draining.
    pub(super) fn check_ready(&self) -> Result<(), ServiceError> {
        if *self.ready.borrow() {
            return Ok(());
        }
        Err(ServiceError::new(
            ErrorCode::Unavailable,
            "not ready: the model is loading, or the server is shutting down; retry later",
        ))
    }

    /// # Errors
    /// `model` names another model than the one served; naming none is fine.
    pub(super) fn check_model(&self, model: Option<&str>) -> Result<(), ServiceError> {
        match model {
            Some(model) if !self.options.is_called(model) => {
                let served = &self.options.model;
                let message = format!("The model `{model}` does not exist; available: `{served}`");
                Err(ServiceError::new(ErrorCode::NotFound, message).about("model"))
            }
            _ => Ok(()),
        }
    }
}

/// Seconds since 1970.
pub(super) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
