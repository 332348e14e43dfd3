//! State of a gateway: its models, options, keys and limits.

use crate::access_log::AccessLog;
use crate::body_budget::{BodyBudget, MAX_HELD_BYTES, UNCOUNTED_BYTES};
use crate::caller::Caller;
use crate::connector::Connector;
use crate::cost_accounting::CostAccounting;
use crate::keys::Keys;
use crate::metrics::GatewayMetrics;
use crate::model::Model;
use crate::names::ShortNames;
use crate::responses::{ResponseLimits, ResponseStore};
use crate::scrapes::ScrapeLimits;
use crate::spending::DaySpending;
use bytes::Bytes;
use http_body_util::Full;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use remoe_http::{BodyLanes, ConnectionLimits, Origins};
use remoe_otel::Traces;
use remoe_proto::identity::Keyring;
use remoe_proto::{ErrorCode, ServiceError, TlsHandshake};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Timeout of connecting to a function.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Idle connections to functions are closed after this time, before the functions would close them.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Options of a gateway.
pub struct GatewayOptions {
    /// API keys, until [`Gateway::replace_keys`].
    pub keys: Keys,
    /// Rule by which short names select models.
    pub short_names: ShortNames,
    /// Origins that browsers may call from.
    pub cors_origins: Origins,
    /// Largest body of a request, in bytes.
    pub body_limit: usize,
    /// Time within which a request's body must arrive.
    pub body_timeout: Duration,
    /// Queue deadline of requests that state no `queue_deadline`; `None`: no such limit.
    pub queue_deadline: Option<Duration>,
    /// Largest total size of request bodies in memory, in bytes.
    pub bodies_limit: usize,
    /// Largest total size of answers that are held in memory, in bytes. A client, and a model, may use as much as it
    /// leaves free.
    pub answers_limit: usize,
    /// Limits of connections.
    pub connections: ConnectionLimits,
    /// Cost accounting, if costs are recorded.
    pub cost_accounting: Option<Arc<CostAccounting>>,
    /// Access log, if there is one.
    pub access_log: Option<AccessLog>,
    /// Destination of spans.
    pub traces: Traces,
    /// Credentials shown to functions that must prove their identity, if any.
    pub keyring: Option<Arc<Keyring>>,
    /// TLS of client connections; `None`: plaintext.
    pub handshake: Option<TlsHandshake>,
    /// Stored responses, which later requests continue.
    pub responses: Arc<ResponseStore>,
}

impl Default for GatewayOptions {
    /// Returns options without keys, browser origins, access log, traces and certificates. Bodies have at most 4 MiB
    /// and arrive within 60 s; all bodies have 256 MiB, and held answers 64 MiB. Connection limits come from the
    /// environment. Responses are stored in memory.
    fn default() -> Self {
        Self {
            keys: Keys::none(),
            short_names: ShortNames::Any,
            cors_origins: Origins::default(),
            body_limit: 4 << 20,
            body_timeout: Duration::from_secs(60),
            queue_deadline: None,
            bodies_limit: 256 << 20,
            answers_limit: 64 << 20,
            connections: ConnectionLimits::from_environment(|name| std::env::var(name).ok()),
            cost_accounting: None,
            access_log: None,
            traces: Traces::off(),
            keyring: None,
            handshake: None,
            responses: ResponseStore::in_memory(ResponseLimits::default()),
        }
    }
}

pub(crate) type Upstream = Client<Connector, Full<Bytes>>;

/// Gateway: one address for all models.
pub struct Gateway {
    options: GatewayOptions,
    /// Current API keys.
    keys: RwLock<Arc<Keys>>,
    model_list: RwLock<ModelList>,
    metrics: GatewayMetrics,
    upstream: Upstream,
    /// Limit of bodies that are parsed at the same time.
    pub(crate) lanes: BodyLanes,
    /// Memory for request bodies.
    pub(crate) body_budget: Arc<BodyBudget>,
    /// Memory for held answers.
    pub(crate) answer_budget: Arc<BodyBudget>,
    /// Limits of `/metrics` at the clients' address.
    pub(crate) client_scrapes: ScrapeLimits,
    /// Limits of `/metrics` at its own address, separate so that clients cannot keep the scraper out.
    pub(crate) metrics_scrapes: ScrapeLimits,
    /// Time when the gateway started, in seconds since 1970.
    pub(crate) started_at: u64,
}

/// Models behind a gateway.
#[derive(Clone)]
struct ModelList {
    models: Arc<[Arc<Model>]>,
    /// Set if the list of models is complete, even if it is empty.
    is_complete: bool,
}

impl Gateway {
    /// Makes a gateway to `models`, whose names differ.
    #[must_use]
    pub fn new(mut options: GatewayOptions, models: Vec<Arc<Model>>, metrics: GatewayMetrics) -> Arc<Self> {
        let connector = Connector::new(options.keyring.take(), CONNECT_TIMEOUT);
        let upstream = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(POOL_IDLE_TIMEOUT)
            .build(connector);
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        options.keys.warn_of_unused_budgets(&models, &options.short_names);
        Arc::new(Self {
            lanes: BodyLanes::new(cores, options.body_limit),
            body_budget: Arc::new(BodyBudget::new(options.bodies_limit, options.body_limit)),
            answer_budget: Arc::new(
                BodyBudget::new(options.answers_limit, MAX_HELD_BYTES).with_uncounted(UNCOUNTED_BYTES),
            ),
            client_scrapes: ScrapeLimits::default(),
            metrics_scrapes: ScrapeLimits::default(),
            keys: RwLock::new(Arc::new(std::mem::take(&mut options.keys))),
            options,
            model_list: RwLock::new(ModelList { models: models.into(), is_complete: false }),
            metrics,
            upstream,
            started_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        })
    }

    /// Replaces the models by `models`, the complete list. From now on the gateway is healthy even without models.
    /// Callers run [`Model::run_deadlines`] of the new models.
    pub fn replace_models(&self, models: Vec<Arc<Model>>) {
        let mut model_list = self.model_list.write().unwrap_or_else(PoisonError::into_inner);
        let next = ModelList { models: models.into(), is_complete: true };
        let before = std::mem::replace(&mut *model_list, next);
        drop(model_list);
        // Models are dropped after the lock is released.
        drop(before);
        self.remove_gone_models();
    }

    /// Removes the metrics of models that are gone. A replaced model is gone when its last request has ended.
    pub(crate) fn remove_gone_models(&self) {
        self.metrics.remove_gone_models(|model| {
            if let Some(cost_accounting) = self.cost_accounting() {
                cost_accounting.metrics().remove_model(model);
            }
        });
    }

    /// Replaces the API keys. Requests in flight continue, and tenants keep their spent quotas.
    pub fn replace_keys(&self, keys: Keys) {
        keys.warn_of_unused_budgets(&self.models(), &self.options.short_names);
        let mut current = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        *current = Arc::new(keys.with_usage_of(&current));
        drop(current);
        self.metrics.set_keys_outdated(false);
    }

    /// Returns today's spending of tenants and models that have a budget, at this gateway. Returns `None` if no costs
    /// are recorded or there are no budgets.
    #[must_use]
    pub fn spending(&self) -> Option<DaySpending> {
        let (keys, models) = (self.keys(), self.models());
        let mut budgets = keys.budgets(&models, &self.options.short_names).peekable();
        budgets.peek()?;
        Some(self.cost_accounting()?.spending(budgets.map(|(payer, _)| payer)))
    }

    /// Takes today's spending at another gateway that shares the budgets of this one.
    pub fn spent_elsewhere(&self, gateway: &str, spending: DaySpending) {
        if let Some(cost_accounting) = self.cost_accounting() {
            cost_accounting.spent_elsewhere(gateway, spending);
        }
    }

    pub(crate) fn options(&self) -> &GatewayOptions {
        &self.options
    }

    pub(crate) fn keys(&self) -> Arc<Keys> {
        // A panic cannot leave it half changed, so a poisoned lock is used as it is.
        self.keys.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn models(&self) -> Arc<[Arc<Model>]> {
        self.model_list().models
    }

    /// Reports if the gateway is healthy: it knows all models, or one of them admits requests.
    pub(crate) fn is_healthy(&self) -> bool {
        let model_list = self.model_list();
        model_list.is_complete || model_list.models.iter().any(|model| model.takes_requests())
    }

    fn model_list(&self) -> ModelList {
        // It is replaced as a whole, so a poisoned lock is used as it is.
        self.model_list.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn metrics(&self) -> &GatewayMetrics {
        &self.metrics
    }

    pub(crate) fn cost_accounting(&self) -> Option<&Arc<CostAccounting>> {
        self.options.cost_accounting.as_ref()
    }

    pub(crate) fn upstream(&self) -> &Upstream {
        &self.upstream
    }

    /// Returns the models that `caller` may use.
    pub(crate) fn models_of(&self, caller: &Caller) -> Vec<Arc<Model>> {
        let may_use =
            |model: &&Arc<Model>| caller.tenant.as_ref().is_none_or(|tenant| tenant.may_use(model.name()));
        self.models().iter().filter(may_use).cloned().collect()
    }

    /// Returns the model called `name`, a full or a short name. Without a name, returns the only model.
    ///
    /// # Errors
    /// `caller` may use no such model, the short name is ambiguous, or the name is missing and there are several
    /// models.
    pub(crate) fn model(&self, name: Option<&str>, caller: &Caller) -> Result<Arc<Model>, ServiceError> {
        let models = self.models_of(caller);
        let names = || {
            let names: Vec<_> = models.iter().map(|model| format!("`{}`", model.name())).collect();
            if names.is_empty() { "none".to_owned() } else { names.join(", ") }
        };
        let default_namespace = caller.tenant.as_ref().and_then(|tenant| tenant.default_namespace());
        let short_names = &self.options.short_names;
        let (code, message) = match name {
            None => match short_names.only(&models, default_namespace) {
                Some(model) => return Ok(model.clone()),
                None => (ErrorCode::InvalidArgument, format!("missing `model`; available: {}", names())),
            },
            Some(name) => match short_names.find(&models, name, default_namespace) {
                Ok(model) => return Ok(model.clone()),
                Err(0) => {
                    let message = format!("The model `{name}` does not exist; available: {}", names());
                    (ErrorCode::NotFound, message)
                }
                Err(matches) => {
                    let message = format!(
                        "ambiguous `model`: {matches} models are named `{name}`; available: {}",
                        names()
                    );
                    (ErrorCode::InvalidArgument, message)
                }
            },
        };
        Err(ServiceError::new(code, message).about("model"))
    }
}
