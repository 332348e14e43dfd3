//! Hosts of each remote expert of a layer.
//!
//! Experts with the same hosts form a host class. Every message keeps to one class, so that each host of the class has
//! all of its experts and can take it over from another host.

use crate::routing_check::RemoteSets;
use remoe_proto::v1::LayerExperts;
use std::collections::BTreeMap;

/// Host classes of one layer's remote experts.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct LayerHosts {
    /// Class by expert id; `None` for a local expert.
    class_of: Vec<Option<u32>>,
    /// Hosts of each class, as ascending indices of endpoints. Classes with few hosts come first, so that later classes
    /// can avoid the hosts that these have loaded.
    classes: Vec<Vec<usize>>,
}

impl LayerHosts {
    /// Returns the class of `expert`; `None` if it is local.
    pub(crate) fn class_of(&self, expert: u32) -> Option<usize> {
        self.class_of.get(expert as usize).copied().flatten().map(|class| class as usize)
    }

    /// Returns the number of classes.
    pub(crate) fn class_count(&self) -> usize {
        self.classes.len()
    }

    /// Returns the indices of the endpoints that host the experts of `class`; may be empty.
    pub(crate) fn hosts_of_class(&self, class: usize) -> &[usize] {
        self.classes.get(class).map_or(&[], Vec::as_slice)
    }
}

/// Groups the `remote` experts of every layer into classes, given the experts that each of `endpoints` hosts.
pub(crate) fn layer_hosts<'a>(
    remote: &RemoteSets,
    endpoints: impl Iterator<Item = &'a [LayerExperts]>,
) -> BTreeMap<usize, LayerHosts> {
    let empty = |last: Option<&u32>| vec![Vec::new(); last.map_or(0, |&last| last as usize + 1)];
    let mut hosts: BTreeMap<usize, Vec<Vec<usize>>> =
        remote.iter().map(|(&layer, experts)| (layer, empty(experts.last()))).collect();
    for (endpoint, sets) in endpoints.enumerate() {
        for set in sets {
            let Some(layer_hosts) = hosts.get_mut(&(set.layer as usize)) else { continue };
            for &expert in &set.experts {
                // A placement that follows another may name an endpoint twice.
                let expert_hosts = layer_hosts.get_mut(expert as usize);
                if let Some(expert_hosts) = expert_hosts.filter(|hosts| hosts.last() != Some(&endpoint)) {
                    expert_hosts.push(endpoint);
                }
            }
        }
    }
    let layers = hosts.into_iter().zip(remote.values());
    layers.map(|((layer, hosts), experts)| (layer, group_by_hosts(hosts, experts.iter().copied()))).collect()
}

/// Groups `experts` by their hosts; `hosts` has the hosts of each expert id.
fn group_by_hosts(mut hosts: Vec<Vec<usize>>, experts: impl Iterator<Item = u32>) -> LayerHosts {
    let mut class_of = vec![None; hosts.len()];
    let mut members: BTreeMap<(usize, Vec<usize>), Vec<u32>> = BTreeMap::new();
    for expert in experts {
        let hosts = std::mem::take(&mut hosts[expert as usize]);
        members.entry((hosts.len(), hosts)).or_default().push(expert);
    }
    let mut classes = Vec::with_capacity(members.len());
    for (class, ((_, hosts), experts)) in (0..).zip(members) {
        for expert in experts {
            class_of[expert as usize] = Some(class);
        }
        classes.push(hosts);
    }
    LayerHosts { class_of, classes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn set(layer: u32, experts: &[u32]) -> LayerExperts {
        LayerExperts { layer, experts: experts.to_vec() }
    }

    fn hosts_of(remote: &[u32], endpoints: &[Vec<LayerExperts>]) -> LayerHosts {
        let remote = RemoteSets::from([(1, remote.iter().copied().collect())]);
        layer_hosts(&remote, endpoints.iter().map(Vec::as_slice)).remove(&1).unwrap_or_default()
    }

    #[test]
    fn disjoint_groups_form_separate_classes() {
        let (a, b) = (vec![set(1, &[2, 4])], vec![set(1, &[3])]);
        let hosts = hosts_of(&[2, 3, 4, 5], &[a.clone(), b, a]);
        assert_eq!(hosts.class_count(), 3);
        assert!(hosts.hosts_of_class(0).is_empty(), "no function has expert 5");
        assert_eq!((hosts.hosts_of_class(1), hosts.hosts_of_class(2)), (&[1][..], &[0, 2][..]));
        let classes: Vec<Option<usize>> = (0..7).map(|expert| hosts.class_of(expert)).collect();
        assert_eq!(classes, [None, None, Some(2), Some(1), Some(2), Some(0), None]);
        assert!(hosts.hosts_of_class(9).is_empty());
    }

    #[test]
    fn endpoint_that_is_listed_twice_counts_once() {
        assert_eq!(hosts_of(&[2], &[vec![set(1, &[2]), set(1, &[2])]]).hosts_of_class(0), [0]);
    }

    proptest! {
        #[test]
        fn class_has_exactly_the_hosts_of_its_experts(
            remote in prop::collection::btree_set(0_u32..20, 1..20),
            endpoints in prop::collection::vec(prop::collection::btree_set(0_u32..20, 0..20), 0..6),
        ) {
            let listed: Vec<Vec<LayerExperts>> = endpoints
                .iter()
                .map(|experts| vec![set(1, &experts.iter().copied().collect::<Vec<_>>()), set(2, &[1])])
                .collect();
            let hosts = hosts_of(&remote.iter().copied().collect::<Vec<_>>(), &listed);
            let mut used = BTreeSet::new();
            for expert in 0..25 {
                let class = hosts.class_of(expert);
                prop_assert_eq!(class.is_some(), remote.contains(&expert));
                let Some(class) = class else { continue };
                used.insert(class);
                let expected = (0..endpoints.len()).filter(|&endpoint| endpoints[endpoint].contains(&expert));
                prop_assert_eq!(hosts.hosts_of_class(class), expected.collect::<Vec<_>>());
            }
            prop_assert_eq!(used, (0..hosts.class_count()).collect::<BTreeSet<_>>());
            prop_assert!((1..hosts.class_count()).all(|class| hosts.hosts_of_class(class - 1).len() <= hosts.hosts_of_class(class).len()));
        }
    }
}
