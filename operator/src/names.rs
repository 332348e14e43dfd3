//! Names and labels of the objects of a deployment.

use kube::api::ObjectMeta;
pub(crate) use remoe_api::tier;
use std::collections::{BTreeMap, BTreeSet};

/// Label with the deployment's name.
pub(crate) const DEPLOYMENT: &str = "remoe.dev/deployment";
/// Label with the function: `main`, `l` and the index of the layer, or `g` and the number of the group. Users see it
/// as its [`tier`].
pub(crate) const FUNCTION: &str = "remoe.dev/function";
/// Label with the hash of the function's specification.
pub(crate) const IDENTITY: &str = "remoe.dev/identity";
/// Label with the index of the replica.
pub(crate) const REPLICA: &str = "remoe.dev/replica";
/// Label with the hash of what a one-shot pod or a profile is about.
pub(crate) const SUBJECT: &str = "remoe.dev/subject";
/// Label with the component of a pod.
pub(crate) const COMPONENT: &str = "app.kubernetes.io/component";

/// Value of `app.kubernetes.io/managed-by`.
pub(crate) const MANAGER: &str = "remoe-operator";
/// Name of the main function.
pub(crate) const MAIN: &str = "main";

/// Component of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Component {
    /// A main function.
    Main,
    /// A remote-expert function.
    RemoteExpert,
    /// Inspector, which reads the checkpoint's headers.
    Inspector,
    /// Profiler, which measures the hardware.
    Profiler,
}

impl Component {
    /// Returns the value of the label [`COMPONENT`].
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::RemoteExpert => "remote-expert",
            Self::Inspector => "inspector",
            Self::Profiler => "profiler",
        }
    }
}

/// Returns the name of the function of a layer's remote experts.
pub(crate) fn layer_function(layer: u32) -> String {
    format!("l{layer}")
}

/// Returns the name of the function of a group of remote experts.
pub(crate) fn group_function(number: usize) -> String {
    format!("g{number}")
}

/// Returns the labels of every object of `deployment`.
pub(crate) fn labels(deployment: &str) -> BTreeMap<String, String> {
    BTreeMap::from([
        ("app.kubernetes.io/name".to_owned(), "remoe".to_owned()),
        ("app.kubernetes.io/instance".to_owned(), deployment.to_owned()),
        ("app.kubernetes.io/part-of".to_owned(), "remoe".to_owned()),
        ("app.kubernetes.io/managed-by".to_owned(), MANAGER.to_owned()),
        (DEPLOYMENT.to_owned(), deployment.to_owned()),
    ])
}

/// Returns the selector of the pods of `component` in `deployment`.
pub(crate) fn component_selector(deployment: &str, component: Component) -> BTreeMap<String, String> {
    BTreeMap::from([
        (DEPLOYMENT.to_owned(), deployment.to_owned()),
        (COMPONENT.to_owned(), component.name().to_owned()),
    ])
}

/// Returns the selector of the pods of one function of `deployment`.
pub(crate) fn function_selector(deployment: &str, function: &str) -> BTreeMap<String, String> {
    BTreeMap::from([
        (DEPLOYMENT.to_owned(), deployment.to_owned()),
        (FUNCTION.to_owned(), function.to_owned()),
    ])
}

/// Formats a selector for query parameters and the scale subresource.
pub(crate) fn selector_text(selector: &BTreeMap<String, String>) -> String {
    let pairs: Vec<String> = selector.iter().map(|(key, value)| format!("{key}={value}")).collect();
    pairs.join(",")
}

/// Returns the name of the record with the facts of the checkpoint.
pub(crate) fn model_record(deployment: &str) -> String {
    format!("{deployment}-model")
}

/// Returns the name of the record of a measured profile, which is also the place of its profiler pods.
pub(crate) fn profile_record(subject: &str) -> String {
    format!("remoe-profile-{subject}")
}

/// Returns the name of the record with the routing generations.
pub(crate) fn routing_record(deployment: &str) -> String {
    format!("{deployment}-routing")
}

/// Upper bound of incarnations. With the pauses between them it takes ten years to reach: a pod with a higher number
/// was not named by this operator.
const MAX_INCARNATIONS: u32 = 1_000_000;

/// Name of a pod: its place, and an incarnation that counts the pods created for that place.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PodName {
    /// Name without the incarnation; equal for all pods of one replica.
    pub place: String,
    /// Number of earlier pods at this place.
    pub incarnation: u32,
}

impl PodName {
    /// Parses the name of a pod; absent if it has no incarnation.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (place, incarnation) = name.rsplit_once('-')?;
        // Only the canonical form, so that two names never mean the same.
        let number: u32 = incarnation.parse().ok()?;
        (number.to_string() == incarnation).then(|| Self { place: place.to_owned(), incarnation: number })
    }
}

impl PodName {
    /// Returns whether the incarnation is low enough to come from this operator. Others do not count earlier pods.
    pub(crate) fn is_counted(&self) -> bool {
        self.incarnation < MAX_INCARNATIONS
    }
}

/// Returns the incarnation that follows `newest`, skipping names that pods of any owner have `taken`.
pub(crate) fn next_incarnation(newest: Option<u32>, taken: &BTreeSet<u32>) -> u32 {
    let next = newest.and_then(|newest| newest.checked_add(1)).filter(|next| *next < MAX_INCARNATIONS);
    let first = next.unwrap_or(0);
    // There are fewer pods than numbers, so one is free.
    (first..MAX_INCARNATIONS).chain(0..first).find(|number| !taken.contains(number)).unwrap_or(first)
}

impl std::fmt::Display for PodName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.place, self.incarnation)
    }
}

/// Returns the label `key` of an object; empty if it has none.
pub(crate) fn label<'a>(meta: &'a ObjectMeta, key: &str) -> &'a str {
    meta.labels.as_ref().and_then(|labels| labels.get(key)).map_or("", String::as_str)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn users_see_functions_by_their_tiers() {
        let shown =
            [MAIN.to_owned(), group_function(0), group_function(12), layer_function(3)].map(|it| tier(&it));
        assert_eq!(shown, ["main", "group-0", "group-12", "layer-3"]);
        // Labels written by others.
        assert_eq!(["", "g", "l-1", "x3"].map(tier), ["main"; 4]);
    }

    #[test]
    fn a_pod_name_is_its_place_and_its_incarnation() {
        let name = PodName::parse("demo-l3-0123abcd-1-12").unwrap();
        assert_eq!((name.place.as_str(), name.incarnation), ("demo-l3-0123abcd-1", 12));
        assert_eq!(name.to_string(), "demo-l3-0123abcd-1-12");
        assert_eq!(PodName::parse("demo-01"), None);
        assert_eq!(PodName::parse("demo"), None);
    }

    #[test]
    fn incarnations_follow_each_other_and_pass_over_names_in_use() {
        let taken = |numbers: &[u32]| numbers.iter().copied().collect();
        assert_eq!(next_incarnation(None, &taken(&[])), 0);
        assert_eq!(next_incarnation(Some(3), &taken(&[3])), 4);
        assert_eq!(next_incarnation(Some(3), &taken(&[3, 4, 5, u32::MAX])), 6);
        assert_eq!(next_incarnation(None, &taken(&[0, u32::MAX])), 1);
        for last in [MAX_INCARNATIONS - 1, MAX_INCARNATIONS, u32::MAX] {
            assert_eq!(next_incarnation(Some(last), &taken(&[0, last])), 1);
        }
        assert!(!PodName::parse("demo-4294967295").unwrap().is_counted());
        assert_eq!(PodName::parse("demo-4294967296"), None);
    }
}
