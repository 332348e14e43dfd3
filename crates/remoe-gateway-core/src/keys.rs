//! API keys and their tenants: which clients may use which models, and within which limits.

mod remedy;

use crate::key_entries::{KeysFile, ModelEntry};
use crate::model::Model;
use crate::names::ShortNames;
use crate::spending::{Payer, nanodollars};
use crate::tenant::TenantLimits;
use remedy::remedy;
use remoe_http::constant_time_eq;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Prefix of a SHA-256 digest, which a keys file may have instead of a key.
const DIGEST: &str = "sha256:";

/// Reason why keys cannot be used. Its text never contains a key.
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
    /// The file is no YAML of the expected form.
    #[error("invalid keys file {path}{place}: `{field}`: {remedy}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Path of the entry in the file.
        field: String,
        /// Line as ` (line N)`; empty if it is not known.
        place: String,
        /// Expected value.
        remedy: String,
    },
    /// A name, key or budget is invalid or occurs twice.
    #[error("invalid keys file {path}: {problem}")]
    Wrong {
        /// The file.
        path: PathBuf,
        /// Problem and its place.
        problem: String,
    },
}

/// API keys of a gateway. Without keys, every client may use every model.
#[derive(Debug, Default)]
pub struct Keys {
    /// SHA-256 digests of the keys, and the tenants of the keys.
    keys: Vec<([u8; 32], Arc<TenantLimits>)>,
    /// Daily budgets by model, in nano-dollars. Each limits the requests of all tenants to the model together.
    model_budgets: BTreeMap<String, u64>,
}

impl Keys {
    /// Returns an empty set of keys.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Adds `key` of an unlimited admin tenant `name`. Returns `None` if that key or tenant exists already: the two
    /// would share one tenant's limits.
    #[must_use]
    pub fn with_key(mut self, name: &str, key: &str) -> Option<Self> {
        let digest: [u8; 32] = Sha256::digest(key).into();
        if self.keys.iter().any(|(other, tenant)| *other == digest || **tenant.name() == *name) {
            return None;
        }
        self.keys.push((digest, Arc::new(TenantLimits::unlimited(name))));
        Some(self)
    }

    /// Reads the text of a keys file.
    pub(crate) fn read_text(path: &Path) -> Result<String, KeysError> {
        std::fs::read_to_string(path).map_err(|error| KeysError::Unreadable { path: path.to_owned(), error })
    }

    /// Parses `text`, the contents of the keys file at `path`.
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
                    .map_or_else(String::new, |location| format!(" (line {})", location.line())),
                remedy: remedy(&error.inner().to_string()),
            })?;
        let invalid = |problem: String| KeysError::Wrong { path: path.clone(), problem };
        let (mut names, mut digests) = (BTreeSet::new(), BTreeSet::new());
        let mut keys = Vec::new();
        for entry in file.tenants {
            let name = entry.name.clone();
            if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(invalid(format!(
                    "invalid tenant name {name:?}: expected visible ASCII without spaces"
                )));
            }
            if entry.dollars_per_day.is_some_and(|dollars| nanodollars(dollars).is_none()) {
                return Err(invalid(format!(
                    "invalid dollarsPerDay of tenant {name}: expected a number from 1e-9 to 1e9"
                )));
            }
            if !names.insert(name.clone()) {
                return Err(invalid(format!("duplicate tenant {name}")));
            }
            let (tenant_keys, tenant) = (entry.keys.clone(), Arc::new(TenantLimits::from_entry(entry)));
            for (number, key) in tenant_keys.iter().enumerate() {
                let digest = digest(key).ok_or_else(|| {
                    invalid(format!(
                        "invalid key {number} of tenant {name}: expected visible ASCII, or {DIGEST} and 64 hexadecimal digits"
                    ))
                })?;
                if !digests.insert(digest) {
                    return Err(invalid(format!("duplicate key {number} of tenant {name}")));
                }
                keys.push((digest, tenant.clone()));
            }
        }
        if keys.is_empty() {
            return Err(invalid(
                "expected at least one key; add a tenant with a key, or omit --keys".to_owned(),
            ));
        }
        let mut model_budgets = BTreeMap::new();
        for ModelEntry { name, dollars_per_day } in file.models {
            let budget = nanodollars(dollars_per_day).ok_or_else(|| {
                invalid(format!("invalid dollarsPerDay of model {name}: expected a number from 1e-9 to 1e9"))
            })?;
            if model_budgets.insert(name.clone(), budget).is_some() {
                return Err(invalid(format!("duplicate model {name}")));
            }
        }
        Ok(Self { keys, model_budgets })
    }

    /// Returns these new keys with the usage of tenants that `previous` has, too. A tenant that gets a new key keeps
    /// its spent quota and its requests in flight.
    pub(crate) fn with_usage_of(mut self, previous: &Self) -> Self {
        let mut tenants: BTreeMap<Arc<str>, Arc<TenantLimits>> = BTreeMap::new();
        for (_, tenant) in &mut self.keys {
            let merged = tenants.entry(tenant.name().clone()).or_insert_with(|| {
                let mut old_tenants = previous.keys.iter().map(|(_, old)| old);
                let old = old_tenants.find(|old| old.name() == tenant.name());
                old.map_or_else(|| tenant.clone(), |old| tenant.with_usage_of(old))
            });
            *tenant = merged.clone();
        }
        self
    }

    /// Reports if there are no keys, so that every client is admitted.
    pub(crate) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Returns the tenants and models that have a daily budget, each with the budget in nano-dollars. `models` are
    /// all models of the gateway.
    pub(crate) fn budgets<'a>(
        &'a self,
        models: &'a [Arc<Model>],
        short_names: &ShortNames,
    ) -> impl Iterator<Item = (Payer<'a>, u64)> {
        let mut budgets: BTreeMap<Payer<'_>, u64> = BTreeMap::new();
        let tenant_budgets = self
            .keys
            .iter()
            .filter_map(|(_, tenant)| Some((Payer::Tenant(tenant.name()), tenant.daily_budget()?)));
        budgets.extend(tenant_budgets);
        let model_budget = |model: &'a Arc<Model>| {
            Some((Payer::Model(model.name()), self.budget_of(model, models, short_names)?))
        };
        budgets.extend(models.iter().filter_map(model_budget));
        budgets.into_iter()
    }

    /// Returns the name of a tenant or model that has a daily budget, if there is one.
    #[must_use]
    pub fn first_budget_holder(&self) -> Option<&str> {
        let tenants = self.keys.iter().filter(|(_, tenant)| tenant.daily_budget().is_some());
        let tenants = tenants.map(|(_, tenant)| &**tenant.name());
        tenants.chain(self.model_budgets.keys().map(String::as_str)).next()
    }

    /// Returns the daily budget of `model` in nano-dollars, if it has one. If the keys file has budgets for several
    /// of the model's names, returns the smallest. `models` are all models of the gateway.
    pub(crate) fn budget_of(
        &self,
        model: &Model,
        models: &[Arc<Model>],
        short_names: &ShortNames,
    ) -> Option<u64> {
        let selected = |name: &str| short_names.find(models, name, None);
        let selects_model = |name: &str| selected(name).is_ok_and(|found| found.name() == model.name());
        let budgets = self.model_budgets.iter().filter(|(name, _)| selects_model(name));
        budgets.map(|(_, budget)| *budget).min()
    }

    /// Logs a warning for each model budget that has no effect because its name selects no model or several.
    pub(crate) fn warn_of_unused_budgets(&self, models: &[Arc<Model>], short_names: &ShortNames) {
        for name in self.model_budgets.keys().filter(|name| short_names.find(models, name, None).is_err()) {
            tracing::warn!(model = name, "dollarsPerDay ignored: expected exactly one model of this name");
        }
    }

    /// Returns the tenant of the `presented` key. The time depends only on its length and on the number of keys, so
    /// that timing reveals nothing of a key.
    pub(crate) fn tenant(&self, presented: &[u8]) -> Option<&Arc<TenantLimits>> {
        let presented = Sha256::digest(presented);
        let mut found = None;
        for (digest, tenant) in &self.keys {
            if constant_time_eq(&presented, digest) {
                found = Some(tenant);
            }
        }
        found
    }
}

/// Returns the digest of `key`, an entry of a keys file: a key, or a digest with [`DIGEST`] before it.
fn digest(key: &str) -> Option<[u8; 32]> {
    if let Some(hex) = key.strip_prefix(DIGEST) {
        let mut digest = [0; 32];
        if hex.len() != 64 || !hex.is_ascii() {
            return None;
        }
        for (byte, start) in digest.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(hex.get(start..start + 2)?, 16).ok()?;
        }
        return Some(digest);
    }
    (!key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic())).then(|| Sha256::digest(key).into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::privacy::Privacy;
    use std::time::{Duration, Instant};

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
    fn tenant_may_use_its_models_and_namespaces_alone() {
        let permissions = |fields: &str| {
            let keys = parse(&format!("tenants: [{{name: a, keys: [k]{fields}}}]")).unwrap();
            let tenant = keys.tenant(b"k").unwrap().clone();
            let may_use = ["a/x", "a/y", "b/x", "x"].map(|model| tenant.may_use(model));
            (may_use, tenant.default_namespace().map(str::to_owned), tenant.is_admin())
        };
        let namespace = |name: &str| Some(name.to_owned());
        assert_eq!(permissions(""), ([true; 4], None, false));
        assert_eq!(permissions(", models: [a/x]"), ([true, false, false, false], namespace("a"), false));
        assert_eq!(permissions(", namespaces: [a]"), ([true, true, false, false], namespace("a"), false));
        assert_eq!(permissions(", namespaces: [a], models: [b/x]"), ([true, true, true, false], None, false));
        assert_eq!(permissions(", namespaces: [a, b]"), ([true, true, true, false], None, false));
        assert_eq!(
            permissions(", namespaces: []"),
            ([false; 4], None, false),
            "an empty list permits no model"
        );
        assert_eq!(permissions(", models: [x]"), ([false, false, false, true], None, false));
        assert_eq!(permissions(", admin: true"), ([true; 4], None, true));
        assert_eq!(
            permissions(", admin: true, models: []"),
            ([false; 4], None, true),
            "an admin sees everything, and may use no model here"
        );
    }

    #[test]
    fn error_of_invalid_keys_file_contains_no_key() {
        for (text, expected) in [
            ("tenants: [{name: a, keys: top-secret}]", "tenants[0].keys"),
            (
                "tenants: [{name: a, keys: [top-secret], modls: [x]}]",
                "tenants[0].modls`: unknown field, expected",
            ),
            ("tenants: [{name: a}]", "missing field `keys`; add it"),
            ("tenants: [{name: a, keys: [top-secret], concurrent: top-secret}]", "expected a nonzero u32"),
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
            assert!(error.contains(expected) && !error.contains("top-secret"), "{text}: {error}");
        }
    }

    #[test]
    fn privacy_of_a_tenant_is_read_and_replaced() {
        let privacy = |keys: &Keys| keys.tenant(b"k").unwrap().privacy();
        let with_field = |field: &str| parse(&format!("tenants: [{{name: a, keys: [k]{field}}}]")).unwrap();
        for (field, expected) in [
            ("", Privacy::None),
            (", privacy: None", Privacy::None),
            (", privacy: Shared", Privacy::Shared),
            (", privacy: CountsOnly", Privacy::CountsOnly),
            (", privacy: LeftOut", Privacy::LeftOut),
        ] {
            assert_eq!(privacy(&with_field(field)), expected, "{field}");
        }
        let reloaded = with_field(", privacy: LeftOut").with_usage_of(&with_field(""));
        assert_eq!(privacy(&reloaded), Privacy::LeftOut, "without a restart");
        assert_eq!(privacy(&Keys::none().with_key("a", "k").unwrap()), Privacy::None);
    }

    #[test]
    fn new_keys_of_a_tenant_keep_its_spent_quota() {
        let keys_with = |keys: &str, limits: &str| {
            parse(&format!("tenants: [{{name: a, keys: {keys}, {limits}}}, {{name: b, keys: [b]}}]")).unwrap()
        };
        let limits = "requestsPerMinute: 2, tokensPerMinute: 60, concurrent: 2";
        let before = keys_with("[old]", limits);
        let now = Instant::now();
        let running = before.tenant(b"old").unwrap().admit(now).unwrap();
        let after = keys_with("[new, newer]", limits).with_usage_of(&before);
        assert!(after.tenant(b"old").is_none());
        let (new, newer) = (after.tenant(b"new").unwrap(), after.tenant(b"newer").unwrap());
        assert!(Arc::ptr_eq(new, newer), "both keys share one tenant's limits");
        let second = new.admit(now).unwrap();
        let limited = |tenant: &Arc<TenantLimits>| tenant.admit(now).err().unwrap().error.message;
        assert!(limited(newer).contains("concurrent requests"));
        drop(second);
        assert!(limited(newer).contains("requests per minute"));
        // A request that the old key began is charged to the tenant of the new one.
        running.charge(200);
        drop(running);
        assert!(limited(new).contains("tokens per minute"));
        let freed = keys_with("[new]", "requestsPerMinute: 100").with_usage_of(&after);
        let tenant = freed.tenant(b"new").unwrap();
        assert!(limited(tenant).contains("requests per minute"), "both requests of the old limit are spent");
        assert!(tenant.admit(now + Duration::from_secs(1)).is_ok(), "but the bucket refills at the new rate");
        assert!(freed.tenant(b"b").unwrap().admit(now).is_ok());
    }

    #[test]
    fn exceeded_limits_state_when_to_retry() {
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
