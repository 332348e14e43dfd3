//! Hosts of each remote expert of a layer. Pure.
//!
//! Experts with the same hosts are a class: what one host of a class can take, each of them can. Messages keep to a
//! class, so that a replica that is asked instead of another has all of the message's experts. Groups that share no
//! expert are classes of their own; sets that overlap make more classes than sets.

use crate::routing_check::RemoteSets;
use remoe_proto::v1::LayerExperts;
use std::collections::BTreeMap;

/// The remote experts of one layer by their hosts.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct LayerHosts {
    /// By expert id; none of a local expert.
    class_of: Vec<Option<u32>>,
    /// The hosts of each class as indices of endpoints, ascending. Classes with few hosts come first: those
    /// with more can then make up for what their hosts have to do.
    classes: Vec<Vec<usize>>,
}

impl LayerHosts {
    /// The class of `expert`; none where it is local.
    pub(crate) fn class_of(&self, expert: u32) -> Option<usize> {
        self.class_of.get(expert as usize).copied().flatten().map(|class| class as usize)
    }

    /// How many classes there are.
    pub(crate) fn classes(&self) -> usize {
        self.classes.len()
    }

    /// Indices of the endpoints that host every expert of `class`; there may be none.
    pub(crate) fn of(&self, class: usize) -> &[usize] {
        self.classes.get(class).map_or(&[], Vec::as_slice)
    }
}

/// The classes of every layer of `remote`, whose experts each of `endpoints` hosts some of.
pub(crate) fn layer_hosts<'a>(
    remote: &RemoteSets,
    endpoints: impl Iterator<Item = &'a [LayerExperts]>,
) -> BTreeMap<usize, LayerHosts> {
    let room = |last: Option<&u32>| vec![Vec::new(); last.map_or(0, |&last| last as usize + 1)];
    let mut hosts: BTreeMap<usize, Vec<Vec<usize>>> =
        remote.iter().map(|(&layer, experts)| (layer, room(experts.last()))).collect();
    for (endpoint, sets) in endpoints.enumerate() {
        for set in sets {
            let Some(of_layer) = hosts.get_mut(&(set.layer as usize)) else { continue };
            for &expert in &set.experts {
                // An endpoint may be named twice in one placement that leads to another.
                if let Some(known) =
                    of_layer.get_mut(expert as usize).filter(|it| it.last() != Some(&endpoint))
                {
                    known.push(endpoint);
                }
            }
        }
    }
    let layers = hosts.into_iter().zip(remote.values());
    layers.map(|((layer, hosts), experts)| (layer, classes(hosts, experts.iter().copied()))).collect()
}

/// The classes of `experts`, whose hosts `hosts` has by id.
fn classes(mut hosts: Vec<Vec<usize>>, experts: impl Iterator<Item = u32>) -> LayerHosts {
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
    fn groups_that_share_nothing_are_classes_of_their_own() {
        let (a, b) = (vec![set(1, &[2, 4])], vec![set(1, &[3])]);
        let hosts = hosts_of(&[2, 3, 4, 5], &[a.clone(), b, a]);
        assert_eq!(hosts.classes(), 3);
        assert!(hosts.of(0).is_empty(), "no function has expert 5");
        assert_eq!((hosts.of(1), hosts.of(2)), (&[1][..], &[0, 2][..]));
        let classes: Vec<Option<usize>> = (0..7).map(|expert| hosts.class_of(expert)).collect();
        assert_eq!(classes, [None, None, Some(2), Some(1), Some(2), Some(0), None]);
        assert!(hosts.of(9).is_empty());
    }

    #[test]
    fn an_endpoint_that_is_listed_twice_counts_once() {
        assert_eq!(hosts_of(&[2], &[vec![set(1, &[2]), set(1, &[2])]]).of(0), [0]);
    }

    proptest! {
        #[test]
        fn a_class_has_exactly_the_hosts_of_each_of_its_experts(
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
                let theirs = (0..endpoints.len()).filter(|&it| endpoints[it].contains(&expert));
                prop_assert_eq!(hosts.of(class), theirs.collect::<Vec<_>>());
            }
            prop_assert_eq!(used, (0..hosts.classes()).collect::<BTreeSet<_>>());
            prop_assert!((1..hosts.classes()).all(|class| hosts.of(class - 1).len() <= hosts.of(class).len()));
        }
    }
}
