//! Sleep groups, and the usage since the last poll.

use remoe_process::Role;
use remoe_proto::v1::{LayerExperts, LayerPairs};
use remoe_rollout::FunctionSpec;
use remoe_rollout::groups::{ReportedUsage, groups};
use std::collections::BTreeSet;

fn set(layer: u32, experts: &[u32]) -> LayerExperts {
    LayerExperts { layer, experts: experts.to_vec() }
}

fn function(name: &str, hosted: Vec<LayerExperts>) -> FunctionSpec {
    FunctionSpec {
        name: name.to_owned(),
        role: if hosted.is_empty() { Role::Main } else { Role::Remote },
        arguments: Vec::new(),
        environment: Vec::new(),
        http: None,
        hosted,
        limits: None,
    }
}

fn said(layer: u32, pairs: &[(u32, u64)]) -> Vec<LayerPairs> {
    let (experts, pairs) = pairs.iter().copied().unzip();
    vec![LayerPairs { layer, experts, pairs }]
}

#[test]
fn functions_that_share_an_expert_are_one_group() {
    let (even, odd) = (vec![set(1, &[0, 2]), set(2, &[0])], vec![set(1, &[1])]);
    let all = [
        function("main", Vec::new()),
        function("a", odd.clone()),
        function("b", even.clone()),
        function("c", odd),
        function("d", vec![set(3, &[7])]),
        function("e", vec![set(2, &[0, 5]), set(3, &[7])]),
    ];
    let found = groups(&all);
    let places: Vec<String> = found.iter().map(|group| group.places.concat()).collect();
    assert_eq!(found[0].places, ["a", "c"]);
    assert_eq!(found[0].hosted, [set(1, &[1])]);
    assert_eq!(places.len(), 2);
    assert_eq!(found[1].places.iter().collect::<BTreeSet<_>>().len(), 3, "b and d are joined by e");
    assert_eq!(found[1].hosted, [set(1, &[0, 2]), set(2, &[0, 5]), set(3, &[7])]);
}

#[test]
fn what_is_new_counts_once_and_a_restart_begins_anew() {
    let mut told = ReportedUsage::default();
    let group = [set(1, &[2, 3])];
    assert_eq!(told.note("m", &said(1, &[(2, 5), (4, 1)]), true).of(&group), 5);
    assert_eq!(told.note("m", &said(1, &[(2, 5), (4, 9)]), true).of(&group), 0);
    assert_eq!(told.note("m", &said(1, &[(2, 6), (3, 4)]), false).of(&group), 5);
    // Expert 4 is no longer listed, as it is not remote; later its count continues.
    assert_eq!(told.note("m", &said(1, &[(4, 10)]), false).of(&[set(1, &[4])]), 1);
    assert_eq!(told.note("m", &said(1, &[(2, 1)]), false).of(&group), 1, "it counts from zero");
    assert_eq!(told.note("old", &said(1, &[(2, 700)]), false).of(&group), 0, "of before");
    assert_eq!(told.note("old", &said(1, &[(2, 701)]), false).of(&group), 1);
    told.keep(|main| main == "m");
    assert_eq!(told.note("old", &said(1, &[(2, 702)]), true).of(&group), 702);
}
