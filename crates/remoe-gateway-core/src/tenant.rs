//! Quota of a tenant: the models that its keys may use, its concurrent requests, rate limits and daily budget.

use crate::key_entries::TenantEntry;
use crate::names::namespace;
use crate::privacy::Privacy;
use crate::rate_limit::RateLimit;
use crate::spending::nanodollars;
use remoe_proto::{ErrorCode, ServiceError};
use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Limits and present usage of a tenant, which has one key or several.
#[derive(Debug)]
pub(crate) struct TenantLimits {
    name: Arc<str>,
    /// Set if the tenant may see costs and usage of all tenants (`admin` in the keys file).
    is_admin: bool,
    /// Models that the tenant may use. `None` in both `models` and `namespaces`: it may use all models.
    models: Option<BTreeSet<String>>,
    /// Namespaces of which the tenant may use every model, in addition to `models`.
    namespaces: Option<BTreeSet<String>>,
    /// Namespace of all models that the tenant may use, if there is exactly one.
    default_namespace: Option<String>,
    max_concurrent_requests: usize,
    /// Daily budget in nano-dollars; `None`: unlimited.
    daily_budget: Option<u64>,
    privacy: Privacy,
    /// Shared by the old and the new limits when a keys file changes, so that requests in flight stay counted.
    usage: Arc<Mutex<TenantUsage>>,
}

#[derive(Debug)]
struct TenantUsage {
    request_rate: Option<RateLimit>,
    token_rate: Option<RateLimit>,
    in_flight: usize,
}

/// Refusal of a request that exceeds a limit of its tenant.
#[derive(Debug)]
pub(crate) struct LimitExceeded {
    pub(crate) error: ServiceError,
    pub(crate) retry_after: Duration,
}

impl TenantLimits {
    /// Returns the limits of an admin tenant that may use everything.
    pub(crate) fn unlimited(name: &str) -> Self {
        let usage = TenantUsage { request_rate: None, token_rate: None, in_flight: 0 };
        Self {
            name: name.into(),
            is_admin: true,
            models: None,
            namespaces: None,
            default_namespace: None,
            max_concurrent_requests: usize::MAX,
            daily_budget: None,
            privacy: Privacy::None,
            usage: Arc::new(Mutex::new(usage)),
        }
    }

    /// Makes the limits that `entry` of a keys file declares, with no usage yet.
    pub(crate) fn from_entry(entry: TenantEntry) -> Self {
        let rate_limit = |per_minute: Option<NonZeroU64>| {
            per_minute.map(|rate| RateLimit::new(rate.get(), Instant::now()))
        };
        Self {
            default_namespace: only_namespace(entry.models.as_ref(), entry.namespaces.as_ref()),
            name: entry.name.into(),
            is_admin: entry.admin,
            models: entry.models,
            namespaces: entry.namespaces,
            max_concurrent_requests: entry.concurrent.map_or(usize::MAX, |count| count.get() as usize),
            daily_budget: entry.dollars_per_day.and_then(nanodollars),
            privacy: entry.privacy,
            usage: Arc::new(Mutex::new(TenantUsage {
                request_rate: rate_limit(entry.requests_per_minute),
                token_rate: rate_limit(entry.tokens_per_minute),
                in_flight: 0,
            })),
        }
    }

    /// Returns these limits with the usage of `previous`, the same tenant's limits before the keys file changed.
    pub(crate) fn with_usage_of(&self, previous: &Self) -> Arc<Self> {
        {
            let mut new = self.usage();
            let mut shared = previous.usage();
            let TenantUsage { request_rate, token_rate, .. } = &mut *new;
            shared.request_rate =
                request_rate.take().map(|limit| limit.with_debt_of(shared.request_rate.take()));
            shared.token_rate = token_rate.take().map(|limit| limit.with_debt_of(shared.token_rate.take()));
        }
        Arc::new(Self {
            name: self.name.clone(),
            is_admin: self.is_admin,
            models: self.models.clone(),
            namespaces: self.namespaces.clone(),
            default_namespace: self.default_namespace.clone(),
            max_concurrent_requests: self.max_concurrent_requests,
            daily_budget: self.daily_budget,
            privacy: self.privacy,
            usage: previous.usage.clone(),
        })
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Returns the daily budget in nano-dollars; `None`: unlimited.
    pub(crate) fn daily_budget(&self) -> Option<u64> {
        self.daily_budget
    }

    /// Returns what predictions of expert usage may remember of the tenant's requests.
    pub(crate) fn privacy(&self) -> Privacy {
        self.privacy
    }

    /// Returns whether the tenant may see costs and usage of all tenants.
    pub(crate) fn is_admin(&self) -> bool {
        self.is_admin
    }

    /// Returns whether the tenant may use `model`, a full name `NAMESPACE/NAME`.
    pub(crate) fn may_use(&self, model: &str) -> bool {
        let (models, namespaces) = (self.models.as_ref(), self.namespaces.as_ref());
        let is_limited = models.is_some() || namespaces.is_some();
        let is_in = |set: Option<&BTreeSet<String>>, name: &str| set.is_some_and(|set| set.contains(name));
        !is_limited || is_in(models, model) || namespace(model).is_some_and(|name| is_in(namespaces, name))
    }

    /// Returns the namespace of all models that the tenant may use, if there is exactly one. Short names in its
    /// requests select models of this namespace.
    pub(crate) fn default_namespace(&self) -> Option<&str> {
        self.default_namespace.as_deref()
    }

    fn usage(&self) -> MutexGuard<'_, TenantUsage> {
        // A panic cannot leave the counts inconsistent, so a poisoned lock is used as it is.
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a request and counts it until the permit is dropped.
    ///
    /// # Errors
    /// The tenant has reached its limit of concurrent requests, requests per minute or tokens per minute.
    pub(crate) fn admit(self: &Arc<Self>, now: Instant) -> Result<TenantPermit, LimitExceeded> {
        let exceeded = |limit: &str, retry_after: Duration| {
            let seconds = retry_after.as_secs_f64().ceil().max(1.0);
            let message = format!("limit of tenant {} reached: {limit}; retry after {seconds} s", self.name);
            LimitExceeded { error: ServiceError::new(ErrorCode::ResourceExhausted, message), retry_after }
        };
        let mut usage = self.usage();
        if usage.in_flight >= self.max_concurrent_requests {
            return Err(exceeded("concurrent requests", Duration::from_secs(1)));
        }
        // Tokens are charged when a request ends. So one request may exceed the limit, and later ones wait.
        let token_wait =
            usage.token_rate.as_mut().map_or(Duration::ZERO, |rate| rate.time_until_available(1.0, now));
        if !token_wait.is_zero() {
            return Err(exceeded("tokens per minute", token_wait));
        }
        if let Some(rate) = &mut usage.request_rate {
            let request_wait = rate.time_until_available(1.0, now);
            if !request_wait.is_zero() {
                return Err(exceeded("requests per minute", request_wait));
            }
            rate.spend(1.0, now);
        }
        usage.in_flight += 1;
        Ok(TenantPermit { tenant: self.clone() })
    }
}

/// Admission of one request of a tenant. The request counts as in flight until this is dropped.
pub(crate) struct TenantPermit {
    tenant: Arc<TenantLimits>,
}

impl TenantPermit {
    /// Charges `tokens` of the request to the tenant's limit of tokens per minute.
    pub(crate) fn charge(&self, tokens: u64) {
        if let Some(limit) = &mut self.tenant.usage().token_rate {
            limit.spend(tokens as f64, Instant::now());
        }
    }
}

impl Drop for TenantPermit {
    fn drop(&mut self) {
        let mut usage = self.tenant.usage();
        usage.in_flight = usage.in_flight.saturating_sub(1);
    }
}

/// Returns the namespace of all `models` and `namespaces` that a tenant may use, if there is exactly one.
fn only_namespace(
    models: Option<&BTreeSet<String>>,
    namespaces: Option<&BTreeSet<String>>,
) -> Option<String> {
    let of_models = models.into_iter().flatten().filter_map(|model| namespace(model));
    let distinct: BTreeSet<&str> =
        of_models.chain(namespaces.into_iter().flatten().map(String::as_str)).collect();
    let mut distinct = distinct.into_iter();
    distinct.next().filter(|_| distinct.next().is_none()).map(str::to_owned)
}
