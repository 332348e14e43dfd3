//! Keys and the tenants that they belong to: which clients may use which models, and how often.

mod remedy;

use crate::key_entries::{KeysFile, ModelEntry};
use crate::model::Model;
use crate::names::ShortNames;
use crate::spending::{Payer, nanodollars};
use crate::tenant::TenantLimits;
use remedy::remedy;
use remoe_http::same;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Prefix of a digest that a file has in place of a key.
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
    #[error("invalid keys file {path}{place}: `{field}`: {remedy}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Which entry.
        field: String,
        /// The line, where it is known.
        place: String,
        /// Expected value.
        remedy: String,
    },
    /// The file contradicts itself.
    #[error("invalid keys file {path}: {problem}")]
    Wrong {
        /// The file.
        path: PathBuf,
        /// Problem and its place.
        problem: String,
    },
}

/// The keys of a gateway. Without any, every client may use everything.
#[derive(Debug, Default)]
pub struct Keys {
    keys: Vec<([u8; 32], Arc<TenantLimits>)>,
    /// Daily budgets of the requests of models, in nano-dollars.
    models: BTreeMap<String, u64>,
}

impl Keys {
    /// No keys.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// One more key, of a tenant `name` that may do and know everything. None where that key, or a tenant of that name,
    /// is there: one would have the other's limits.
    #[must_use]
    pub fn with_key(mut self, name: &str, key: &str) -> Option<Self> {
        let digest: [u8; 32] = Sha256::digest(key).into();
        if self.keys.iter().any(|(known, tenant)| *known == digest || **tenant.name() == *name) {
            return None;
        }
        self.keys.push((digest, Arc::new(TenantLimits::unlimited(name))));
        Some(self)
    }

    /// Reads the text of a keys file.
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
                remedy: remedy(&error.inner().to_string()),
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
            let (entries, tenant) = (entry.keys.clone(), Arc::new(TenantLimits::of(entry)));
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
        let mut tenants: BTreeMap<Arc<str>, Arc<TenantLimits>> = BTreeMap::new();
        for (_, tenant) in &mut self.keys {
            let known = tenants.entry(tenant.name().clone()).or_insert_with(|| {
                let same = |(_, other): &&([u8; 32], Arc<TenantLimits>)| other.name() == tenant.name();
                before.keys.iter().find(same).map_or_else(|| tenant.clone(), |(_, other)| tenant.after(other))
            });
            *tenant = known.clone();
        }
        self
    }

    /// Reports if there are no keys, so that every client is admitted.
    pub(crate) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Whose spending is limited, and what each may spend on a day, in nano-dollars, where `models` are there.
    pub(crate) fn budgets<'a>(
        &'a self,
        models: &'a [Arc<Model>],
        short_names: &ShortNames,
    ) -> impl Iterator<Item = (Payer<'a>, u64)> {
        let mut budgets: BTreeMap<Payer<'_>, u64> = BTreeMap::new();
        let limited =
            self.keys.iter().filter_map(|(_, tenant)| Some((Payer::Tenant(tenant.name()), tenant.budget()?)));
        budgets.extend(limited);
        let of_model = |model: &'a Arc<Model>| {
            Some((Payer::Model(model.name()), self.budget_of(model, models, short_names)?))
        };
        budgets.extend(models.iter().filter_map(of_model));
        budgets.into_iter()
    }

    /// A tenant or model whose spending is limited, where there is one.
    #[must_use]
    pub fn with_budget(&self) -> Option<&str> {
        let tenants = self.keys.iter().filter(|(_, tenant)| tenant.budget().is_some());
        let tenants = tenants.map(|(_, tenant)| &**tenant.name());
        tenants.chain(self.models.keys().map(String::as_str)).next()
    }

    /// Returns the daily budget of requests of `model`, one of `models`, in nano-dollars, if it is limited: the least
    /// one of all names that clients may call it by.
    pub(crate) fn budget_of(
        &self,
        model: &Model,
        models: &[Arc<Model>],
        short_names: &ShortNames,
    ) -> Option<u64> {
        let found = |name: &str| short_names.find(models, name, None);
        let is_its = |name: &str| found(name).is_ok_and(|found| found.name() == model.name());
        let limits = self.models.iter().filter(|(name, _)| is_its(name));
        limits.map(|(_, budget)| *budget).min()
    }

    /// Says which budgets limit nothing, because none of `models`, or several, have that name.
    pub(crate) fn warn_without(&self, models: &[Arc<Model>], short_names: &ShortNames) {
        for name in self.models.keys().filter(|name| short_names.find(models, name, None).is_err()) {
            tracing::warn!(model = name, "dollarsPerDay ignored: expected exactly one model of this name");
        }
    }

    /// Whose key was presented. The time depends on how long it is and on how many keys there are.
    pub(crate) fn tenant(&self, presented: &[u8]) -> Option<&Arc<TenantLimits>> {
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
        let of = |says: &str| {
            let keys = parse(&format!("tenants: [{{name: a, keys: [k]{says}}}]")).unwrap();
            let tenant = keys.tenant(b"k").unwrap().clone();
            let may = ["a/x", "a/y", "b/x", "x"].map(|model| tenant.may_use(model));
            (may, tenant.home().map(str::to_owned), tenant.sees_all())
        };
        let home = |name: &str| Some(name.to_owned());
        assert_eq!(of(""), ([true; 4], None, false));
        assert_eq!(of(", models: [a/x]"), ([true, false, false, false], home("a"), false));
        assert_eq!(of(", namespaces: [a]"), ([true, true, false, false], home("a"), false));
        assert_eq!(of(", namespaces: [a], models: [b/x]"), ([true, true, true, false], None, false));
        assert_eq!(of(", namespaces: [a, b]"), ([true, true, true, false], None, false));
        assert_eq!(of(", namespaces: []"), ([false; 4], None, false), "an empty list is none, not all");
        assert_eq!(of(", models: [x]"), ([false, false, false, true], None, false));
        assert_eq!(of(", admin: true"), ([true; 4], None, true));
        assert_eq!(
            of(", admin: true, models: []"),
            ([false; 4], None, true),
            "it sees all, and uses nothing"
        );
    }

    #[test]
    fn what_is_wrong_is_said_without_keys() {
        for (text, says) in [
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
        let limited = |tenant: &Arc<TenantLimits>| tenant.admit(now).err().unwrap().error.message;
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
