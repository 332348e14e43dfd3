//! The gateway as a whole: its models, options, keys and bounds.

use crate::access_log::AccessLog;
use crate::body_budget::{BodyBudget, FLOOR, WHOLE};
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
use remoe_http::{ConnectionLimits, Lanes, Origins};
use remoe_otel::Traces;
use remoe_proto::identity::Keyring;
use remoe_proto::{ErrorCode, ServiceError, TlsHandshake};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Connecting to a function takes longer than this only where it is gone.
const CONNECT: Duration = Duration::from_secs(2);
/// Kept connections to functions end before the functions would end them.
const KEEP: Duration = Duration::from_secs(30);

/// Options of a deployment's gateway.
pub struct GatewayOptions {
    /// Keys of clients, until others [replace](Gateway::replace_keys) them.
    pub keys: Keys,
    /// Which short names of models select one.
    pub short_names: ShortNames,
    /// Origins that browsers may call from.
    pub cors_origins: Origins,
    /// Largest body of a request in bytes.
    pub body_limit: usize,
    /// A body must be there within this time.
    pub body_timeout: Duration,
    /// The longest wait for a turn of a request that states no `queue_deadline`; `None`: as long as others allow.
    pub queue_deadline: Option<Duration>,
    /// Bytes of all bodies that are there at the same time.
    pub bodies_limit: usize,
    /// Bytes of all answers that are held whole at the same time. A client, and a model, may have as much as it leaves
    /// free.
    pub answers_limit: usize,
    /// Limits of connections.
    pub connections: ConnectionLimits,
    /// Where money is accounted for, if anywhere.
    pub cost_accounting: Option<Arc<CostAccounting>>,
    /// Destination of a line per request, if any.
    pub access_log: Option<AccessLog>,
    /// Where spans of requests go.
    pub traces: Traces,
    /// Credentials shown to functions that must prove their identity, if any.
    pub keyring: Option<Arc<Keyring>>,
    /// TLS of the connections of clients; none: plaintext.
    pub handshake: Option<TlsHandshake>,
    /// Responses that later requests go on from.
    pub responses: Arc<ResponseStore>,
}

impl Default for GatewayOptions {
    /// No keys, any short name, no origins, 4 MiB bodies within 60 s, 256 MiB of them, 64 MiB of answers, connections
    /// as the environment says, no access log, no traces, no certificates, responses in memory.
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

/// One address for all models.
pub struct Gateway {
    options: GatewayOptions,
    /// Keys that clients may use now.
    keys: RwLock<Arc<Keys>>,
    catalogue: RwLock<Catalogue>,
    metrics: GatewayMetrics,
    upstream: Upstream,
    /// Bodies that are read at the same time.
    pub(crate) lanes: Lanes,
    /// For bodies.
    pub(crate) body_budget: Arc<BodyBudget>,
    /// For what is held of answers.
    pub(crate) answers: Arc<BodyBudget>,
    /// Pages of metrics for clients, and for addresses of their own: neither keeps the other out.
    pub(crate) scrapes: ScrapeLimits,
    pub(crate) own_scrapes: ScrapeLimits,
    pub(crate) created: u64,
}

/// Models of a gateway.
#[derive(Clone)]
struct Catalogue {
    models: Arc<[Arc<Model>]>,
    /// Set if these are all models there are, even if there are none.
    is_whole: bool,
}

impl Gateway {
    /// A gateway to `models`, each with a name of its own.
    #[must_use]
    pub fn new(mut options: GatewayOptions, models: Vec<Arc<Model>>, metrics: GatewayMetrics) -> Arc<Self> {
        let connector = Connector::new(options.keyring.take(), CONNECT);
        let upstream = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(KEEP)
            .build(connector);
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        options.keys.warn_without(&models, &options.short_names);
        Arc::new(Self {
            lanes: Lanes::new(cores, options.body_limit),
            body_budget: Arc::new(BodyBudget::new(options.bodies_limit, options.body_limit)),
            answers: Arc::new(BodyBudget::new(options.answers_limit, WHOLE).with_floor(FLOOR)),
            scrapes: ScrapeLimits::default(),
            own_scrapes: ScrapeLimits::default(),
            keys: RwLock::new(Arc::new(std::mem::take(&mut options.keys))),
            options,
            catalogue: RwLock::new(Catalogue { models: models.into(), is_whole: false }),
            metrics,
            upstream,
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        })
    }

    /// Has `models` in place of those that it had, whose time is no longer kept here. They are all that there is: from
    /// now on the gateway is well, whatever becomes of them.
    pub fn replace_models(&self, models: Vec<Arc<Model>>) {
        let mut catalogue = self.catalogue.write().unwrap_or_else(PoisonError::into_inner);
        let next = Catalogue { models: models.into(), is_whole: true };
        let before = std::mem::replace(&mut *catalogue, next);
        drop(catalogue);
        drop(before);
        self.forget_gone();
    }

    /// Removes the metrics of models that are gone. A model is there until the last request to it is over.
    pub(crate) fn forget_gone(&self) {
        self.metrics.forget_gone(|model| {
            if let Some(cost_accounting) = self.cost_accounting() {
                cost_accounting.metrics().forget(model);
            }
        });
    }

    /// Admits clients with one of `keys` from now on. Requests that are there stay; what tenants have used up stays
    /// used up.
    pub fn replace_keys(&self, keys: Keys) {
        keys.warn_without(&self.models(), &self.options.short_names);
        let mut known = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        *known = Arc::new(keys.after(&known));
        drop(known);
        self.metrics.keys_are_outdated(false);
    }

    /// Returns what tenants and models with a budget have spent today at this gateway; none without books, or without
    /// budgets.
    #[must_use]
    pub fn spending(&self) -> Option<DaySpending> {
        let (keys, models) = (self.keys(), self.models());
        let mut budgets = keys.budgets(&models, &self.options.short_names).peekable();
        budgets.peek()?;
        Some(self.cost_accounting()?.spending(budgets.map(|(payer, _)| payer)))
    }

    /// Takes a report of what was spent today at another gateway that shares the budgets of this one.
    pub fn spent_elsewhere(&self, gateway: &str, spending: DaySpending) {
        if let Some(cost_accounting) = self.cost_accounting() {
            cost_accounting.spent_elsewhere(gateway, spending);
        }
    }

    pub(crate) fn options(&self) -> &GatewayOptions {
        &self.options
    }

    pub(crate) fn keys(&self) -> Arc<Keys> {
        // It is replaced as a whole.
        self.keys.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn models(&self) -> Arc<[Arc<Model>]> {
        self.catalogue().models
    }

    /// Reports if requests are answered, even if only with the error that there is no model.
    pub(crate) fn is_well(&self) -> bool {
        let catalogue = self.catalogue();
        catalogue.is_whole || catalogue.models.iter().any(|model| model.takes_requests())
    }

    fn catalogue(&self) -> Catalogue {
        // Every change of it is whole.
        self.catalogue.read().unwrap_or_else(PoisonError::into_inner).clone()
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

    /// The models that `caller` may use: for it there are no others.
    pub(crate) fn models_of(&self, caller: &Caller) -> Vec<Arc<Model>> {
        let may_use =
            |model: &&Arc<Model>| caller.tenant.as_ref().is_none_or(|tenant| tenant.may_use(model.name()));
        self.models().iter().filter(may_use).cloned().collect()
    }

    /// The model called `name`, which may be a short one; the only model where none is named.
    ///
    /// # Errors
    /// There is no such model for `caller`, or several and none is named, or the short name is that of several.
    pub(crate) fn model(&self, name: Option<&str>, caller: &Caller) -> Result<Arc<Model>, ServiceError> {
        let models = self.models_of(caller);
        let names = || {
            let names: Vec<_> = models.iter().map(|model| format!("`{}`", model.name())).collect();
            if names.is_empty() { "none".to_owned() } else { names.join(", ") }
        };
        let home = caller.tenant.as_ref().and_then(|tenant| tenant.home());
        let short_names = &self.options.short_names;
        let (code, message) = match name {
            None => match short_names.only(&models, home) {
                Some(model) => return Ok(model.clone()),
                None => (ErrorCode::InvalidArgument, format!("missing `model`; available: {}", names())),
            },
            Some(name) => match short_names.find(&models, name, home) {
                Ok(model) => return Ok(model.clone()),
                Err(0) => {
                    let message = format!("The model `{name}` does not exist; available: {}", names());
                    (ErrorCode::NotFound, message)
                }
                Err(several) => {
                    let message = format!(
                        "ambiguous `model`: {several} models are named `{name}`; available: {}",
                        names()
                    );
                    (ErrorCode::InvalidArgument, message)
                }
            },
        };
        Err(ServiceError::new(code, message).about("model"))
    }
}
