//! Quota of a tenant: models that its keys may use, concurrent requests, rate limits and budget.

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

/// Limits and usage of the holder of one or several keys.
#[derive(Debug)]
pub(crate) struct TenantLimits {
    name: Arc<str>,
    /// It may know what others do.
    sees_all: bool,
    models: Option<BTreeSet<String>>,
    /// Namespaces all of whose models it may use, beside `models`.
    namespaces: Option<BTreeSet<String>>,
    /// The one namespace that all models are in which it may use.
    home: Option<String>,
    concurrent: usize,
    /// Nano-dollars that it may spend on a day.
    budget: Option<u64>,
    privacy: Privacy,
    /// Shared with what the tenant was before its limits changed.
    usage: Arc<Mutex<TenantUsage>>,
}

#[derive(Debug)]
struct TenantUsage {
    requests: Option<RateLimit>,
    tokens: Option<RateLimit>,
    running: usize,
}

/// Why a tenant may not ask now.
#[derive(Debug)]
pub(crate) struct Limited {
    pub(crate) error: ServiceError,
    pub(crate) retry_after: Duration,
}

impl TenantLimits {
    pub(crate) fn unlimited(name: &str) -> Self {
        let usage = TenantUsage { requests: None, tokens: None, running: 0 };
        Self {
            name: name.into(),
            sees_all: true,
            models: None,
            namespaces: None,
            home: None,
            concurrent: usize::MAX,
            budget: None,
            privacy: Privacy::None,
            usage: Arc::new(Mutex::new(usage)),
        }
    }

    pub(crate) fn of(entry: TenantEntry) -> Self {
        let limit = |rate: Option<NonZeroU64>| rate.map(|rate| RateLimit::new(rate.get(), Instant::now()));
        Self {
            home: home(entry.models.as_ref(), entry.namespaces.as_ref()),
            name: entry.name.into(),
            sees_all: entry.admin,
            models: entry.models,
            namespaces: entry.namespaces,
            concurrent: entry.concurrent.map_or(usize::MAX, |count| count.get() as usize),
            budget: entry.dollars_per_day.and_then(nanodollars),
            privacy: entry.privacy,
            usage: Arc::new(Mutex::new(TenantUsage {
                requests: limit(entry.requests_per_minute),
                tokens: limit(entry.tokens_per_minute),
                running: 0,
            })),
        }
    }

    /// This tenant with what it had used up as `other`.
    pub(crate) fn after(&self, other: &Self) -> Arc<Self> {
        {
            let mut own = self.usage();
            let mut used = other.usage();
            let TenantUsage { requests, tokens, .. } = &mut *own;
            used.requests = requests.take().map(|limit| limit.after(used.requests.take()));
            used.tokens = tokens.take().map(|limit| limit.after(used.tokens.take()));
        }
        Arc::new(Self {
            name: self.name.clone(),
            sees_all: self.sees_all,
            models: self.models.clone(),
            namespaces: self.namespaces.clone(),
            home: self.home.clone(),
            concurrent: self.concurrent,
            budget: self.budget,
            privacy: self.privacy,
            usage: other.usage.clone(),
        })
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Nano-dollars that it may spend on a day, where that is limited.
    pub(crate) fn budget(&self) -> Option<u64> {
        self.budget
    }

    /// Returns how its requests are protected.
    pub(crate) fn privacy(&self) -> Privacy {
        self.privacy
    }

    /// Returns whether it may know what others do.
    pub(crate) fn sees_all(&self) -> bool {
        self.sees_all
    }

    /// Returns whether it may use `model`.
    pub(crate) fn may_use(&self, model: &str) -> bool {
        let (models, namespaces) = (self.models.as_ref(), self.namespaces.as_ref());
        let is_limited = models.is_some() || namespaces.is_some();
        let is_in = |set: Option<&BTreeSet<String>>, name: &str| set.is_some_and(|set| set.contains(name));
        !is_limited || is_in(models, model) || namespace(model).is_some_and(|of| is_in(namespaces, of))
    }

    /// Returns the one namespace that all models are in which it may use, if that is so. Short names are those of this namespace.
    pub(crate) fn home(&self) -> Option<&str> {
        self.home.as_deref()
    }

    fn usage(&self) -> MutexGuard<'_, TenantUsage> {
        // Numbers that are right after every step.
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a request in, to be counted until the permit is dropped.
    ///
    /// # Errors
    /// A limit is reached.
    pub(crate) fn admit(self: &Arc<Self>, now: Instant) -> Result<Permit, Limited> {
        let limited = |what: &str, retry_after: Duration| {
            let seconds = retry_after.as_secs_f64().ceil().max(1.0);
            let message = format!("limit of tenant {} reached: {what}; retry after {seconds} s", self.name);
            Limited { error: ServiceError::new(ErrorCode::ResourceExhausted, message), retry_after }
        };
        let mut usage = self.usage();
        if usage.running >= self.concurrent {
            return Err(limited("concurrent requests", Duration::from_secs(1)));
        }
        // A request's tokens are known when it is over: it may be the one that exceeds the limit.
        let tokens = usage.tokens.as_mut().map_or(Duration::ZERO, |tokens| tokens.wait(1.0, now));
        if !tokens.is_zero() {
            return Err(limited("tokens per minute", tokens));
        }
        if let Some(requests) = &mut usage.requests {
            let wait = requests.wait(1.0, now);
            if !wait.is_zero() {
                return Err(limited("requests per minute", wait));
            }
            requests.spend(1.0, now);
        }
        usage.running += 1;
        Ok(Permit { tenant: self.clone() })
    }
}

/// A request of a tenant that is not over.
pub(crate) struct Permit {
    tenant: Arc<TenantLimits>,
}

impl Permit {
    /// The request has taken `tokens`.
    pub(crate) fn charge(&self, tokens: u64) {
        if let Some(limit) = &mut self.tenant.usage().tokens {
            limit.spend(tokens as f64, Instant::now());
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut usage = self.tenant.usage();
        usage.running = usage.running.saturating_sub(1);
    }
}

/// Returns the namespace of all `models` and `namespaces` that a tenant may use, if there is exactly one.
fn home(models: Option<&BTreeSet<String>>, namespaces: Option<&BTreeSet<String>>) -> Option<String> {
    let of_models = models.into_iter().flatten().filter_map(|model| namespace(model));
    let all: BTreeSet<&str> = of_models.chain(namespaces.into_iter().flatten().map(String::as_str)).collect();
    let mut all = all.into_iter();
    all.next().filter(|_| all.next().is_none()).map(str::to_owned)
}
