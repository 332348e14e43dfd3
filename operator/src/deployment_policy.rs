//! Allowed classes of pods, and the prices that the platform sets for all MoEDeployments. Pure.
//!
//! Without this policy, every author of MoEDeployments chooses their prices and the classes of their pods. Prices
//! determine what is charged to callers' budgets, a PriorityClass preempts other pods, and a RuntimeClass decides on
//! isolation.

use super::status_issue::StatusIssue;
use remoe_api::{Billing, MoEDeployment, PodTemplate, PricingSpec};
use serde::Deserialize;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::str::FromStr;

/// Reason of a deployment that violates the policy.
pub(crate) const NOT_ALLOWED: &str = "NotAllowed";
/// Entry of a list that allows any name.
const WILDCARD: &str = "*";
/// Prefix of the PriorityClasses of Kubernetes itself.
const SYSTEM_PREFIX: &str = "system-";
/// Maximum characters of a price, as in `spec.pricing`.
const MAX_PRICE_CHARS: usize = 20;
/// Maximum price in dollars per hour.
const MAX_PRICE_DOLLARS: f64 = 1e6;

/// Policy for all deployments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeploymentPolicy {
    /// Price list of the platform, which replaces `spec.pricing`.
    pub prices: Option<PriceList>,
    /// Allowed PriorityClasses of pods.
    pub priority_classes: NameList,
    /// Allowed RuntimeClasses of pods.
    pub runtime_classes: NameList,
}

/// Allowed names, separated by commas; `*` allows every name that is not reserved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameList(BTreeSet<String>);

impl FromStr for NameList {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        Ok(Self(names.map(str::to_owned).collect()))
    }
}

impl NameList {
    /// Returns whether the list has `name` or `*`. Names with the reserved prefix must be in the list themselves.
    fn allow(&self, name: &str, reserved_prefix: Option<&str>) -> bool {
        let is_reserved = reserved_prefix.is_some_and(|prefix| name.starts_with(prefix));
        self.0.contains(name) || (self.0.contains(WILDCARD) && !is_reserved)
    }

    /// Describes the allowed names for an error message.
    fn description(&self, reserved_prefix: Option<&str>) -> String {
        let names: Vec<String> = self
            .0
            .iter()
            .map(|name| match reserved_prefix {
                Some(prefix) if name == WILDCARD => format!("all but {prefix}*"),
                _ => name.clone(),
            })
            .collect();
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    }
}

/// Prices of the platform in dollars, as decimal strings.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PriceList {
    /// Billing basis of remote functions.
    #[serde(default)]
    billing: Billing,
    /// One vCPU for one hour.
    cpu_core_hour: String,
    /// 1 GB of memory for one hour.
    #[serde(rename = "memoryGBHour")]
    memory_gb_hour: String,
    /// One GPU for one hour, by its extended resource.
    #[serde(default)]
    gpu_hour: BTreeMap<String, String>,
}

impl FromStr for PriceList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let list: Self = serde_json::from_str(text).map_err(|error| {
            format!("expected JSON with billing, cpuCoreHour, memoryGBHour and gpuHour: {error}")
        })?;
        let named = [("cpuCoreHour", &list.cpu_core_hour), ("memoryGBHour", &list.memory_gb_hour)];
        let gpus = list.gpu_hour.iter().map(|(resource, price)| (resource.as_str(), price));
        let invalid = named.into_iter().chain(gpus).find(|(_, price)| !is_price(price));
        let invalid = invalid.map(|(field, price)| {
            format!("invalid price {field}: expected a decimal above 0 and up to {MAX_PRICE_DOLLARS}, got {price:?}")
        });
        invalid.map_or(Ok(list), Err)
    }
}

/// Returns whether `text` is a decimal number above 0 in the format of `spec.pricing`.
fn is_price(text: &str) -> bool {
    let is_digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let (whole, fraction) = text.split_once('.').map_or((text, None), |(whole, rest)| (whole, Some(rest)));
    let is_decimal = text.len() <= MAX_PRICE_CHARS && is_digits(whole) && fraction.is_none_or(is_digits);
    is_decimal && text.parse().is_ok_and(|price: f64| price > 0.0 && price <= MAX_PRICE_DOLLARS)
}

impl DeploymentPolicy {
    /// Returns `deployment` with the prices that apply to it.
    pub(crate) fn priced<'a>(&self, deployment: &'a MoEDeployment) -> Cow<'a, MoEDeployment> {
        let Some(prices) = &self.prices else { return Cow::Borrowed(deployment) };
        let gpu = deployment.spec.main.gpu.as_ref();
        let gpu_hour = gpu.and_then(|gpu| prices.gpu_hour.get(&gpu.resource)).cloned();
        let mut priced = deployment.clone();
        priced.spec.pricing = PricingSpec {
            billing: prices.billing,
            cpu_core_hour: prices.cpu_core_hour.clone(),
            memory_gb_hour: prices.memory_gb_hour.clone(),
            // The resource allows gpuMemoryMB only together with gpuHour.
            gpu_memory_mb: deployment.spec.pricing.gpu_memory_mb.filter(|_| gpu_hour.is_some()),
            gpu_hour,
        };
        Cow::Owned(priced)
    }

    /// Returns why `deployment` violates the policy; absent if it does not.
    pub(crate) fn refusal(&self, deployment: &MoEDeployment) -> Option<StatusIssue> {
        let spec = &deployment.spec;
        let refused = self
            .class_refusal("main", &spec.main.template)
            .or_else(|| self.class_refusal("remoteExperts", &spec.remote_experts.template))
            .or_else(|| self.unpriced_gpu(deployment));
        refused.map(|message| StatusIssue::new(NOT_ALLOWED, message))
    }

    fn class_refusal(&self, part: &str, template: &PodTemplate) -> Option<String> {
        let message = |field: &str, name: &str, allowed: &NameList, reserved_prefix, chart_value: &str| {
            format!(
                "spec.{part}.template.{field} {name} is not allowed; allowed: {}; name one of these or none, or \
                 have {chart_value} of the operator's chart extended",
                allowed.description(reserved_prefix)
            )
        };
        let priority = template.priority_class_name.as_deref();
        if let Some(name) = priority.filter(|name| !self.priority_classes.allow(name, Some(SYSTEM_PREFIX))) {
            let (allowed, chart_value) = (&self.priority_classes, "allowed.priorityClasses");
            return Some(message("priorityClassName", name, allowed, Some(SYSTEM_PREFIX), chart_value));
        }
        let runtime = template.runtime_class_name.as_deref();
        let name = runtime.filter(|name| !self.runtime_classes.allow(name, None))?;
        Some(message("runtimeClassName", name, &self.runtime_classes, None, "allowed.runtimeClasses"))
    }

    fn unpriced_gpu(&self, deployment: &MoEDeployment) -> Option<String> {
        let (gpu, prices) = (deployment.spec.main.gpu.as_ref()?, self.prices.as_ref()?);
        (!prices.gpu_hour.contains_key(&gpu.resource)).then(|| {
            let names: Vec<&str> = prices.gpu_hour.keys().map(String::as_str).collect();
            format!(
                "spec.main.gpu.resource {} has no price in the list of the platform; priced: {}; name one of \
                 these, or have prices.gpuHour of the operator's chart extended",
                gpu.resource,
                if names.is_empty() { "none".to_owned() } else { names.join(", ") }
            )
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::example::{deployment, environment};
    use serde_json::{Value, json};

    fn template(part: &str, field: &str, name: &str) -> Value {
        json!({part: {"template": {field: name}}})
    }

    fn refusal(policy: &DeploymentPolicy, spec: Value) -> Option<String> {
        policy.refusal(&deployment(spec)).map(|issue| issue.message)
    }

    #[test]
    fn by_default_only_system_priorities_are_refused() {
        let policy = environment().policy;
        assert_eq!(refusal(&policy, json!({})), None);
        for part in ["main", "remoteExperts"] {
            assert_eq!(refusal(&policy, template(part, "priorityClassName", "high")), None);
            assert_eq!(refusal(&policy, template(part, "runtimeClassName", "gvisor")), None);
            let refused =
                refusal(&policy, template(part, "priorityClassName", "system-node-critical")).unwrap();
            assert!(
                refused.starts_with(&format!("spec.{part}.template.priorityClassName system-node-critical"))
            );
            assert!(refused.contains("allowed: all but system-*"), "{refused}");
        }
    }

    #[test]
    fn a_list_allows_its_names_and_no_other() {
        let names = |text: &str| text.parse::<NameList>().unwrap();
        let policy = DeploymentPolicy {
            prices: None,
            priority_classes: names("low, system-cluster-critical"),
            runtime_classes: names(""),
        };
        for (field, name, may) in [
            ("priorityClassName", "low", true),
            ("priorityClassName", "system-cluster-critical", true),
            ("priorityClassName", "high", false),
            ("runtimeClassName", "gvisor", false),
        ] {
            let refused = refusal(&policy, template("main", field, name));
            assert_eq!(refused.is_none(), may, "{name}: {refused:?}");
        }
        let refused = refusal(&policy, template("main", "runtimeClassName", "gvisor")).unwrap();
        assert!(refused.contains("allowed: none") && refused.contains("allowed.runtimeClasses"), "{refused}");
    }

    fn policy_with_prices(list: &Value) -> DeploymentPolicy {
        DeploymentPolicy { prices: Some(list.to_string().parse().unwrap()), ..environment().policy }
    }

    #[test]
    fn the_price_list_applies_in_place_of_the_spec() {
        let list =
            json!({"cpuCoreHour": "0.05", "memoryGBHour": "0.01", "gpuHour": {"nvidia.com/gpu": "2.5"}});
        let (policy, free) =
            (policy_with_prices(&list), json!({"billing": "Invocation", "cpuCoreHour": "0"}));
        let owner = deployment(json!({"pricing": free}));
        assert_eq!(environment().policy.priced(&owner).spec, owner.spec, "without a list");
        let pricing = &policy.priced(&owner).spec.pricing;
        assert_eq!(pricing.billing, Billing::Reserved);
        assert_eq!((pricing.cpu_core_hour.as_str(), pricing.memory_gb_hour.as_str()), ("0.05", "0.01"));
        assert_eq!((pricing.gpu_hour.as_ref(), pricing.gpu_memory_mb), (None, None));
        let on_gpu = |resource: &str| {
            let gpu = json!({"resource": resource, "count": 1});
            let pricing = json!({"gpuHour": "0.1", "gpuMemoryMB": 80_000});
            deployment(json!({"main": {"device": "cuda", "gpu": gpu}, "pricing": pricing}))
        };
        let owner = on_gpu("nvidia.com/gpu");
        let pricing = &policy.priced(&owner).spec.pricing;
        assert_eq!((pricing.gpu_hour.as_deref(), pricing.gpu_memory_mb), (Some("2.5"), Some(80_000)));
        assert_eq!(policy.refusal(&owner), None);
        let refused = policy.refusal(&on_gpu("amd.com/gpu")).unwrap();
        assert_eq!(refused.reason, NOT_ALLOWED);
        assert!(refused.message.contains("priced: nvidia.com/gpu"), "{}", refused.message);
    }

    #[test]
    fn invalid_price_lists_are_refused() {
        for (invalid, expected) in [
            ("", "expected JSON"),
            ("{}", "cpuCoreHour"),
            (r#"{"cpuCoreHour": "1", "memoryGBHour": "1", "cpu": "1"}"#, "unknown field `cpu`"),
            (r#"{"cpuCoreHour": "0.0", "memoryGBHour": "1"}"#, "invalid price cpuCoreHour"),
            (r#"{"cpuCoreHour": "1", "memoryGBHour": "1000001"}"#, "invalid price memoryGBHour"),
            (r#"{"cpuCoreHour": "-1", "memoryGBHour": "1"}"#, "invalid price cpuCoreHour"),
            (r#"{"cpuCoreHour": "1", "memoryGBHour": "1e3"}"#, "invalid price memoryGBHour"),
            (r#"{"cpuCoreHour": "1.", "memoryGBHour": "1"}"#, "invalid price cpuCoreHour"),
            (r#"{"cpuCoreHour": "1", "memoryGBHour": "1", "gpuHour": {"a/b": ""}}"#, "invalid price a/b"),
        ] {
            let error = invalid.parse::<PriceList>().unwrap_err();
            assert!(error.contains(expected), "{invalid}: {error}");
        }
    }
}
