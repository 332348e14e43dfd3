//! Names and labels of everything that belongs to a deployment.

use kube::api::ObjectMeta;
pub(crate) use remoe_api::tier;
use std::collections::{BTreeMap, BTreeSet};

/// The deployment's name.
pub(crate) const DEPLOYMENT: &str = "remoe.dev/deployment";
/// Which function: `main`, `l` and the id of the layer, or `g` and the number of the group. Users see it as its [`tier`].
pub(crate) const FUNCTION: &str = "remoe.dev/function";
/// Hash of all that a pod of the function consists of.
pub(crate) const IDENTITY: &str = "remoe.dev/identity";
/// Which of the function's replicas.
pub(crate) const REPLICA: &str = "remoe.dev/replica";
/// Hash of what a helper pod, or a profile, is about.
pub(crate) const SUBJECT: &str = "remoe.dev/subject";
/// Which part a pod plays.
pub(crate) const COMPONENT: &str = "app.kubernetes.io/component";

/// Value of `app.kubernetes.io/managed-by`.
pub(crate) const MANAGER: &str = "remoe-operator";
/// The function that every deployment has.
pub(crate) const MAIN: &str = "main";

/// The part that a pod plays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Component {
    /// A main function.
    Main,
    /// A remote-expert function.
    RemoteExpert,
    /// Reads the checkpoint's headers.
    Inspector,
    /// Measures the hardware.
    Profiler,
}

impl Component {
    /// Value of the label [`COMPONENT`].
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::RemoteExpert => "remote-expert",
            Self::Inspector => "inspector",
            Self::Profiler => "profiler",
        }
    }
}

/// The function of a layer's remote experts.
pub(crate) fn layer_function(layer: u32) -> String {
    format!("l{layer}")
}

/// The function of a group of remote experts.
pub(crate) fn group_function(number: usize) -> String {
    format!("g{number}")
}

/// Labels of every object of `deployment`.
pub(crate) fn labels(deployment: &str) -> BTreeMap<String, String> {
    BTreeMap::from([
        ("app.kubernetes.io/name".to_owned(), "remoe".to_owned()),
        ("app.kubernetes.io/instance".to_owned(), deployment.to_owned()),
        ("app.kubernetes.io/part-of".to_owned(), "remoe".to_owned()),
        ("app.kubernetes.io/managed-by".to_owned(), MANAGER.to_owned()),
        (DEPLOYMENT.to_owned(), deployment.to_owned()),
    ])
}

/// Returns the selector of the pods that play `component` in `deployment`.
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

/// A selector as the API's query parameters and the scale subresource write it.
pub(crate) fn selector_text(selector: &BTreeMap<String, String>) -> String {
    let pairs: Vec<String> = selector.iter().map(|(key, value)| format!("{key}={value}")).collect();
    pairs.join(",")
}

/// Record with the facts of the checkpoint.
pub(crate) fn model_record(deployment: &str) -> String {
    format!("{deployment}-model")
}

/// Record of what a profiler measured of `subject`, and the place of the pods that measure it.
pub(crate) fn profile_record(subject: &str) -> String {
    format!("remoe-profile-{subject}")
}

/// Record of the routing generations: the durable copy of what main functions were told.
pub(crate) fn routing_record(deployment: &str) -> String {
    format!("{deployment}-routing")
}

/// Incarnations are counted up to here. Pauses between them make ten years of it: a pod with a larger number
/// was not named by this operator.
const MOST_INCARNATIONS: u32 = 1_000_000;

/// Where a pod stands among those that were started for the same purpose: names end in an incarnation.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PodName {
    /// All but the incarnation: equal for all that fill one place.
    pub place: String,
    /// How many came before.
    pub incarnation: u32,
}

impl PodName {
    /// Reads the name of a pod; none where it has no incarnation.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (place, incarnation) = name.rsplit_once('-')?;
        // As it is written, so that two names never mean the same.
        let number: u32 = incarnation.parse().ok()?;
        (number.to_string() == incarnation).then(|| Self { place: place.to_owned(), incarnation: number })
    }
}

impl PodName {
    /// Reports if this operator can have counted up to the incarnation: other numbers say nothing about how many there
    /// were.
    pub(crate) fn is_counted(&self) -> bool {
        self.incarnation < MOST_INCARNATIONS
    }
}

/// Returns the incarnation that follows `newest` at a place where the names of `taken` are in use, by pods of any
/// owner.
pub(crate) fn next_incarnation(newest: Option<u32>, taken: &BTreeSet<u32>) -> u32 {
    let next = newest.and_then(|newest| newest.checked_add(1)).filter(|next| *next < MOST_INCARNATIONS);
    let first = next.unwrap_or(0);
    // Fewer pods than numbers exist, so one is free.
    (first..MOST_INCARNATIONS).chain(0..first).find(|number| !taken.contains(number)).unwrap_or(first)
}

impl std::fmt::Display for PodName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.place, self.incarnation)
    }
}

/// The label `key` of an object; empty where it has none.
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
        // Labels that others wrote.
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
        for last in [MOST_INCARNATIONS - 1, MOST_INCARNATIONS, u32::MAX] {
            assert_eq!(next_incarnation(Some(last), &taken(&[0, last])), 1);
        }
        assert!(!PodName::parse("demo-4294967295").unwrap().is_counted());
        assert_eq!(PodName::parse("demo-4294967296"), None);
    }
}
