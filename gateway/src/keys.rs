//! Who may ask what, and how often: keys and the tenants that they belong to.

use crate::budget::Payer;
use crate::gateway::named;
use crate::model::Model;
use crate::rates::Budget;
use remoe_http::same;
use remoe_wire::{ErrorCode, ServiceError};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::num::{NonZeroU32, NonZeroU64};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a digest begins with where a file has it in place of a key.
const DIGEST: &str = "sha256:";

/// Why keys cannot be used. No key is ever part of it.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// The file cannot be read.
    #[error("cannot read the keys file {path}: {error}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The file is not of the form.
    #[error("invalid keys file {path}{place}: unexpected content at `{field}`; see docs/gateway.md")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Which entry.
        field: String,
        /// The line, where it is known.
        place: String,
    },
    /// The file contradicts itself.
    #[error("invalid keys file {path}: {problem}")]
    Wrong {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        problem: String,
    },
}

/// The keys of a gateway. Without any, everybody may ask everything.
#[derive(Debug, Default)]
pub struct Keys {
    keys: Vec<([u8; 32], Arc<Tenant>)>,
    /// What requests of models may cost on a day, in nano-dollars.
    models: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct KeysFile {
    tenants: Vec<TenantEntry>,
    #[serde(default)]
    models: Vec<ModelEntry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ModelEntry {
    name: String,
    dollars_per_day: f64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct TenantEntry {
    name: String,
    keys: Vec<String>,
    models: Option<BTreeSet<String>>,
    requests_per_minute: Option<NonZeroU64>,
    tokens_per_minute: Option<NonZeroU64>,
    concurrent: Option<NonZeroU32>,
    dollars_per_day: Option<f64>,
    #[serde(default)]
    privacy: Privacy,
}

/// What may be known of a tenant's requests, for predictions of which experts are used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub enum Privacy {
    /// Each is remembered without its text, and the mean of what they use predicts requests of tenants without records.
    Shared,
    /// Each is remembered without its text, and no other tenant's predictions lean on it.
    #[default]
    None,
    /// What they use is added up with everybody's; no single one is remembered.
    CountsOnly,
    /// Nothing: no main function is asked what they use.
    LeftOut,
}

impl Keys {
    /// No keys.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// One more key, of a tenant `name` that may do and know everything. None where that key, or a tenant of that name, is
    /// there: one would have the other's limits.
    #[must_use]
    pub fn with_key(mut self, name: &str, key: &str) -> Option<Self> {
        let digest: [u8; 32] = Sha256::digest(key).into();
        if self.keys.iter().any(|(known, tenant)| *known == digest || **tenant.name() == *name) {
            return None;
        }
        self.keys.push((digest, Arc::new(Tenant::unlimited(name))));
        Some(self)
    }

    /// What a file says.
    pub(crate) fn text(path: &Path) -> Result<String, KeysError> {
        std::fs::read_to_string(path).map_err(|error| KeysError::Unreadable { path: path.to_owned(), error })
    }

    /// The keys that the `text` of the file at `path` names.
    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self, KeysError> {
        let path = path.to_owned();
        // The parser's own message may quote a key.
        let file: KeysFile = serde_path_to_error::deserialize(serde_yaml::Deserializer::from_str(text))
            .map_err(|error| KeysError::Malformed {
                path: path.clone(),
                field: error.path().to_string(),
                place: error
                    .inner()
                    .location()
                    .map_or_else(String::new, |at| format!(" (line {})", at.line())),
            })?;
        let wrong = |problem: String| KeysError::Wrong { path: path.clone(), problem };
        let (mut names, mut digests) = (BTreeSet::new(), BTreeSet::new());
        let mut keys = Vec::new();
        for entry in file.tenants {
            let name = entry.name.clone();
            if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(wrong(format!(
                    "invalid tenant name {name:?}: expected visible ASCII without spaces"
                )));
            }
            if entry.dollars_per_day.is_some_and(|dollars| nanodollars(dollars).is_none()) {
                return Err(wrong(format!(
                    "invalid dollarsPerDay of tenant {name}: expected a number from 1e-9 to 1e9"
                )));
            }
            if !names.insert(name.clone()) {
                return Err(wrong(format!("duplicate tenant {name}")));
            }
            let (entries, tenant) = (entry.keys.clone(), Arc::new(Tenant::of(entry)));
            for (number, key) in entries.iter().enumerate() {
                let digest = digest(key).ok_or_else(|| {
                    wrong(format!(
                        "invalid key {number} of tenant {name}: expected visible ASCII, or {DIGEST} and 64 hexadecimal digits"
                    ))
                })?;
                if !digests.insert(digest) {
                    return Err(wrong(format!("duplicate key {number} of tenant {name}")));
                }
                keys.push((digest, tenant.clone()));
            }
        }
        if keys.is_empty() {
            return Err(wrong(
                "expected at least one key; add a tenant with a key, or omit --keys".to_owned(),
            ));
        }
        let mut models = BTreeMap::new();
        for ModelEntry { name, dollars_per_day } in file.models {
            let budget = nanodollars(dollars_per_day).ok_or_else(|| {
                wrong(format!("invalid dollarsPerDay of model {name}: expected a number from 1e-9 to 1e9"))
            })?;
            if models.insert(name.clone(), budget).is_some() {
                return Err(wrong(format!("duplicate model {name}")));
            }
        }
        Ok(Self { keys, models })
    }

    /// These keys after those `before`: what a tenant of both has used up it has used up, and what runs of it counts.
    pub(crate) fn after(mut self, before: &Self) -> Self {
        let mut tenants: BTreeMap<Arc<str>, Arc<Tenant>> = BTreeMap::new();
        for (_, tenant) in &mut self.keys {
            let known = tenants.entry(tenant.name.clone()).or_insert_with(|| {
                let same = |(_, other): &&([u8; 32], Arc<Tenant>)| other.name == tenant.name;
                before.keys.iter().find(same).map_or_else(|| tenant.clone(), |(_, other)| tenant.after(other))
            });
            *tenant = known.clone();
        }
        self
    }

    /// Whether everybody may ask.
    pub(crate) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Whose spending is limited, and what each may spend on a day, in nano-dollars, where `models` are there.
    pub(crate) fn budgets<'a>(&'a self, models: &'a [Arc<Model>]) -> impl Iterator<Item = (Payer<'a>, u64)> {
        let mut budgets: BTreeMap<Payer<'_>, u64> = BTreeMap::new();
        let limited =
            self.keys.iter().filter_map(|(_, tenant)| Some((Payer::Tenant(&tenant.name), tenant.budget?)));
        budgets.extend(limited);
        let of_model =
            |model: &'a Arc<Model>| Some((Payer::Model(model.name()), self.budget_of(model, models)?));
        budgets.extend(models.iter().filter_map(of_model));
        budgets.into_iter()
    }

    /// A tenant or model whose spending is limited, where there is one.
    #[must_use]
    pub fn with_budget(&self) -> Option<&str> {
        let tenants = self.keys.iter().filter(|(_, tenant)| tenant.budget.is_some());
        let tenants = tenants.map(|(_, tenant)| &*tenant.name);
        tenants.chain(self.models.keys().map(String::as_str)).next()
    }

    /// What requests of `model`, one of `models`, may cost on a day, in nano-dollars, where that is limited: under any name
    /// that clients may call it by, the least of them.
    pub(crate) fn budget_of(&self, model: &Model, models: &[Arc<Model>]) -> Option<u64> {
        let is_its = |name: &str| named(models, name).is_ok_and(|found| found.name() == model.name());
        let limits = self.models.iter().filter(|(name, _)| is_its(name));
        limits.map(|(_, budget)| *budget).min()
    }

    /// Says which budgets limit nothing, because none of `models`, or several, have that name.
    pub(crate) fn warn_without(&self, models: &[Arc<Model>]) {
        for name in self.models.keys().filter(|name| named(models, name).is_err()) {
            tracing::warn!(model = name, "dollarsPerDay ignored: expected exactly one model of this name");
        }
    }

    /// Whose key was presented. The time depends on how long it is and on how many keys there are.
    pub(crate) fn tenant(&self, presented: &[u8]) -> Option<&Arc<Tenant>> {
        let presented = Sha256::digest(presented);
        let mut found = None;
        for (digest, tenant) in &self.keys {
            if same(&presented, digest) {
                found = Some(tenant);
            }
        }
        found
    }
}

/// `dollars` of a budget; none where they are none.
fn nanodollars(dollars: f64) -> Option<u64> {
    (1e-9..=1e9).contains(&dollars).then(|| (dollars * 1e9).round() as u64)
}

/// The digest of a key as a file has it.
fn digest(key: &str) -> Option<[u8; 32]> {
    if let Some(hex) = key.strip_prefix(DIGEST) {
        let mut digest = [0; 32];
        if hex.len() != 64 || !hex.is_ascii() {
            return None;
        }
        for (byte, at) in digest.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(hex.get(at..at + 2)?, 16).ok()?;
        }
        return Some(digest);
    }
    (!key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic())).then(|| Sha256::digest(key).into())
}

/// Somebody with keys.
#[derive(Debug)]
pub(crate) struct Tenant {
    name: Arc<str>,
    /// It may know what others do.
    sees_all: bool,
    models: Option<BTreeSet<String>>,
    concurrent: usize,
    /// Nano-dollars that it may spend on a day.
    budget: Option<u64>,
    privacy: Privacy,
    /// Shared with what the tenant was before its limits changed.
    usage: Arc<Mutex<Usage>>,
}

#[derive(Debug)]
struct Usage {
    requests: Option<Budget>,
    tokens: Option<Budget>,
    running: usize,
}

/// Why a tenant may not ask now.
#[derive(Debug)]
pub(crate) struct Limited {
    pub(crate) error: ServiceError,
    pub(crate) retry_after: Duration,
}

impl Tenant {
    fn unlimited(name: &str) -> Self {
        let usage = Usage { requests: None, tokens: None, running: 0 };
        Self {
            name: name.into(),
            sees_all: true,
            models: None,
            concurrent: usize::MAX,
            budget: None,
            privacy: Privacy::None,
            usage: Arc::new(Mutex::new(usage)),
        }
    }

    fn of(entry: TenantEntry) -> Self {
        let budget = |rate: Option<NonZeroU64>| rate.map(|rate| Budget::new(rate.get(), Instant::now()));
        Self {
            name: entry.name.into(),
            sees_all: false,
            models: entry.models,
            concurrent: entry.concurrent.map_or(usize::MAX, |count| count.get() as usize),
            budget: entry.dollars_per_day.and_then(nanodollars),
            privacy: entry.privacy,
            usage: Arc::new(Mutex::new(Usage {
                requests: budget(entry.requests_per_minute),
                tokens: budget(entry.tokens_per_minute),
                running: 0,
            })),
        }
    }

    /// This tenant with what it had used up as `other`.
    fn after(&self, other: &Self) -> Arc<Self> {
        {
            let mut own = self.usage();
            let mut used = other.usage();
            let Usage { requests, tokens, .. } = &mut *own;
            used.requests = requests.take().map(|budget| budget.after(used.requests.take()));
            used.tokens = tokens.take().map(|budget| budget.after(used.tokens.take()));
        }
        Arc::new(Self {
            name: self.name.clone(),
            sees_all: self.sees_all,
            models: self.models.clone(),
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

    /// What may be known of its requests.
    pub(crate) fn privacy(&self) -> Privacy {
        self.privacy
    }

    /// Whether it may know what others do.
    pub(crate) fn sees_all(&self) -> bool {
        self.sees_all
    }

    /// Whether it may use `model`.
    pub(crate) fn may_use(&self, model: &str) -> bool {
        self.models.as_ref().is_none_or(|models| models.contains(model))
    }

    fn usage(&self) -> MutexGuard<'_, Usage> {
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
    tenant: Arc<Tenant>,
}

impl Permit {
    /// The request has taken `tokens`.
    pub(crate) fn charge(&self, tokens: u64) {
        if let Some(budget) = &mut self.tenant.usage().tokens {
            budget.spend(tokens as f64, Instant::now());
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut usage = self.tenant.usage();
        usage.running = usage.running.saturating_sub(1);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Keys, String> {
        Keys::parse(text, Path::new("keys.yaml")).map_err(|error| error.to_string())
    }

    #[test]
    fn keys_and_digests_name_their_tenant() {
        let hex: String = Sha256::digest("second").iter().map(|byte| format!("{byte:02x}")).collect();
        let keys = parse(&format!(
            "tenants:\n- {{name: one, keys: [first, 'sha256:{hex}'], models: [m]}}\n- {{name: two, keys: [third]}}\n"
        ))
        .unwrap();
        let name = |key: &str| keys.tenant(key.as_bytes()).map(|tenant| tenant.name().to_string());
        assert_eq!(name("first").as_deref(), Some("one"));
        assert_eq!(name("second").as_deref(), Some("one"));
        assert_eq!(name("third").as_deref(), Some("two"));
        assert_eq!(
            (name("firs"), name("first "), name(""), name(&format!("sha256:{hex}"))),
            (None, None, None, None)
        );
        let one = keys.tenant(b"first").unwrap();
        assert!(one.may_use("m") && !one.may_use("n"));
    }

    #[test]
    fn what_is_wrong_is_said_without_keys() {
        for (text, says) in [
            ("tenants: [{name: a, keys: top-secret}]", "tenants[0].keys"),
            ("tenants: [{name: a, keys: [top-secret], modls: [x]}]", "tenants[0]"),
            ("tenants: [{name: a, keys: [top-secret], requestsPerMinute: 0}]", "requestsPerMinute"),
            ("tenants: [{name: a, keys: [top-secret, top-secret]}]", "key 1 of tenant a"),
            ("tenants: [{name: a, keys: ['top-secret x']}]", "key 0 of tenant a"),
            ("tenants: [{name: a, keys: ['sha256:top-secret']}]", "key 0 of tenant a"),
            ("tenants: [{name: a, keys: [x]}, {name: a, keys: [y]}]", "duplicate tenant a"),
            ("tenants: [{name: a, keys: [x], dollarsPerDay: 0}]", "dollarsPerDay of tenant a"),
            ("tenants: [{name: a, keys: [top-secret], privacy: leftout}]", "tenants[0].privacy"),
            ("tenants: [{name: a, keys: [top-secret], privacy: null}]", "tenants[0].privacy"),
            ("tenants: [{name: a, keys: [top-secret], privacy: [LeftOut]}]", "tenants[0].privacy"),
            (
                "{tenants: [{name: a, keys: [x]}], models: [{name: m, dollarsPerDay: -1}]}",
                "dollarsPerDay of model m",
            ),
            ("tenants: []", "at least one key"),
            ("top-secret", "keys.yaml"),
        ] {
            let error = parse(text).err().unwrap();
            assert!(error.contains(says) && !error.contains("top-secret"), "{text}: {error}");
        }
    }

    #[test]
    fn a_tenant_says_what_may_be_known_of_its_requests() {
        let privacy = |keys: &Keys| keys.tenant(b"k").unwrap().privacy();
        let of = |says: &str| parse(&format!("tenants: [{{name: a, keys: [k]{says}}}]")).unwrap();
        for (says, means) in [
            ("", Privacy::None),
            (", privacy: None", Privacy::None),
            (", privacy: Shared", Privacy::Shared),
            (", privacy: CountsOnly", Privacy::CountsOnly),
            (", privacy: LeftOut", Privacy::LeftOut),
        ] {
            assert_eq!(privacy(&of(says)), means, "{says}");
        }
        assert_eq!(privacy(&of(", privacy: LeftOut").after(&of(""))), Privacy::LeftOut, "without a restart");
        assert_eq!(privacy(&Keys::none().with_key("a", "k").unwrap()), Privacy::None);
    }

    #[test]
    fn other_keys_of_a_tenant_do_not_give_back_what_it_used_up() {
        let of = |keys: &str, limits: &str| {
            parse(&format!("tenants: [{{name: a, keys: {keys}, {limits}}}, {{name: b, keys: [b]}}]")).unwrap()
        };
        let limits = "requestsPerMinute: 2, tokensPerMinute: 60, concurrent: 2";
        let before = of("[old]", limits);
        let now = Instant::now();
        let running = before.tenant(b"old").unwrap().admit(now).unwrap();
        let after = of("[new, newer]", limits).after(&before);
        assert!(after.tenant(b"old").is_none());
        let (new, newer) = (after.tenant(b"new").unwrap(), after.tenant(b"newer").unwrap());
        assert!(Arc::ptr_eq(new, newer), "one tenant has its limits once");
        let second = new.admit(now).unwrap();
        let limited = |tenant: &Arc<Tenant>| tenant.admit(now).err().unwrap().error.message;
        assert!(limited(newer).contains("concurrent requests"));
        drop(second);
        assert!(limited(newer).contains("requests per minute"));
        // What ran by the old key is charged, and ends, for the new one.
        running.charge(200);
        drop(running);
        assert!(limited(new).contains("tokens per minute"));
        let freed = of("[new]", "requestsPerMinute: 100").after(&after);
        let tenant = freed.tenant(b"new").unwrap();
        assert!(limited(tenant).contains("requests per minute"), "nothing is left of two");
        assert!(tenant.admit(now + Duration::from_secs(1)).is_ok(), "but it fills up at the new rate");
        assert!(freed.tenant(b"b").unwrap().admit(now).is_ok());
    }

    #[test]
    fn limits_hold_and_say_when_to_come_back() {
        let keys = parse(
            "tenants: [{name: a, keys: [k], requestsPerMinute: 3, tokensPerMinute: 60, concurrent: 2}]",
        );
        let keys = keys.unwrap();
        let tenant = keys.tenant(b"k").unwrap();
        let now = Instant::now();
        let first = tenant.admit(now).unwrap();
        let second = tenant.admit(now).unwrap();
        assert!(tenant.admit(now).err().unwrap().error.message.contains("concurrent requests"));
        drop(second);
        let third = tenant.admit(now).unwrap();
        drop(third);
        let limited = tenant.admit(now).err().unwrap();
        assert!(limited.error.message.contains("requests per minute"), "{}", limited.error.message);
        assert!(
            limited.retry_after <= Duration::from_secs(20) && limited.retry_after > Duration::from_secs(19)
        );
        first.charge(119);
        let later = now + Duration::from_secs(40);
        let limited = tenant.admit(later).err().unwrap();
        assert!(limited.error.message.contains("tokens per minute"), "{}", limited.error.message);
        assert!(tenant.admit(now + Duration::from_secs(70)).is_ok());
    }
}
