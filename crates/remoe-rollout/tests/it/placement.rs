//! Placement of experts.

use proptest::prelude::*;
use remoe_proto::{format_listing, parse_listing};
use remoe_rollout::placement::{RemoteProcess, local_experts};
use remoe_rollout::{MoeLayer, Placement};

fn model(layers: &[(u32, u32)]) -> Vec<MoeLayer> {
    let layers = layers.iter();
    layers.map(|&(layer, experts)| MoeLayer { layer, experts }).collect()
}

fn remote(placement: &Placement) -> String {
    format_listing(&placement.remote())
}

fn processes(placement: &Placement) -> Vec<String> {
    placement.processes().iter().map(|process| format_listing(&process.hosted)).collect()
}

#[test]
fn replicas_of_planned_memory_are_processes_of_their_own() {
    let plan = r#"{"plan": {"main_bytes": 1000000000, "layers": [
        {"remote": [1, 0], "memory_bytes": 300000000, "replicas": 2},
        {"remote": [], "memory_bytes": 0, "replicas": 0},
        {"remote": [3], "memory_bytes": 200000000, "replicas": 1}]}}"#;
    let placement = Placement::from_plan(&model(&[(1, 4), (2, 4), (3, 4)]), plan).unwrap();
    let processes = placement.processes();
    let seen: Vec<_> = processes
        .iter()
        .map(|process| (process.name.as_str(), format_listing(&process.hosted), process.memory_bytes))
        .collect();
    assert_eq!(
        seen,
        [
            ("layer-1-0", "1:0-1".to_owned(), Some(300_000_000)),
            ("layer-1-1", "1:0-1".to_owned(), Some(300_000_000)),
            ("layer-3-0", "3:3".to_owned(), Some(200_000_000)),
        ]
    );
    let error =
        Placement::from_plan(&model(&[(0, 4)]), r#"{"layers": [{"remote": [1], "memory_bytes": 0}]}"#);
    assert_eq!(error.unwrap_err().field, "layers[0].memory_bytes");
}

#[test]
fn ratio_takes_least_used_experts_if_usage_is_known() {
    let model = model(&[(1, 4), (3, 4)]);
    let usage = vec![vec![0.1, 0.4, 0.2, 0.3], vec![0.25; 4]];
    // The second layer's usage is uniform: the last ids, as without usage.
    for (ratio, expected) in [(0.0, ""), (0.25, "1:0,3:3"), (0.5, "1:0,2,3:2-3"), (1.0, "1:0-3,3:0-3")] {
        let placement = Placement::least_used(&model, &usage, ratio, 1).unwrap();
        assert_eq!(remote(&placement), expected, "{ratio}");
    }
    let of_another = Placement::least_used(&model, &usage[..1], 0.5, 1);
    assert_eq!(of_another.unwrap_err().field, "remote_set");
    assert_eq!(Placement::least_used(&model, &usage, 1.5, 1).unwrap_err().field, "remote_ratio");
}

#[test]
fn a_ratio_takes_the_last_experts_of_each_layer() {
    let model = model(&[(1, 8), (3, 8)]);
    for (ratio, expected) in [
        (0.0, ""),
        (0.06, ""),
        (0.0625, "1:7,3:7"),
        (0.25, "1:6-7,3:6-7"),
        (0.3, "1:6-7,3:6-7"),
        (0.32, "1:5-7,3:5-7"),
        (1.0, "1:0-7,3:0-7"),
    ] {
        let placement = Placement::from_ratio(&model, ratio, 1).unwrap();
        assert_eq!(remote(&placement), expected, "ratio {ratio}");
    }
}

#[test]
fn replicas_host_the_same() {
    let placement = Placement::from_ratio(&model(&[(0, 4)]), 0.5, 3).unwrap();
    assert_eq!(processes(&placement), ["0:2-3", "0:2-3", "0:2-3"]);
    let names: Vec<String> = placement.processes().into_iter().map(|process| process.name).collect();
    assert_eq!(names, ["group-0-0", "group-0-1", "group-0-2"]);
    let revised = placement.revised(2).processes();
    assert_eq!((&*revised[1].name, &*revised[1].function), ("group-0-1-r2", "group-0"));
    let all_local = Placement::from_ratio(&model(&[(0, 4)]), 0.0, 3).unwrap();
    assert!(all_local.processes().is_empty());
}

#[test]
fn ratios_and_replicas_that_cannot_be_are_refused() {
    let model = model(&[(0, 4)]);
    for ratio in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
        assert_eq!(Placement::from_ratio(&model, ratio, 1).unwrap_err().field, "remote_ratio");
    }
    for replicas in [0, 65] {
        assert_eq!(Placement::from_ratio(&model, 0.5, replicas).unwrap_err().field, "replicas");
    }
}

#[test]
fn a_plan_by_layer_id_names_some_layers() {
    let model = model(&[(1, 8), (2, 8), (5, 8)]);
    let plan = r#"{"layers":[{"layer":5,"remote":[3]},{"layer":1,"remote":[7,6],"replicas":2}]}"#;
    let placement = Placement::from_plan(&model, plan).unwrap();
    assert_eq!(remote(&placement), "1:6-7,5:3");
    assert_eq!(processes(&placement), ["1:6-7,5:3", "1:6-7"]);
}

#[test]
fn the_planners_output_goes_by_position() {
    let model = model(&[(1, 4), (3, 4), (4, 4)]);
    let plan = r#"{"main_bytes":900,"layers":[
        {"remote":[0,3],"memory_bytes":1000,"replicas":3},
        {"remote":[],"memory_bytes":0,"replicas":0},
        {"remote":[1],"memory_bytes":1000,"replicas":1}]}"#;
    let placement = Placement::from_plan(&model, plan).unwrap();
    assert_eq!(processes(&placement), ["1:0,3", "1:0,3", "1:0,3", "4:1"]);
    let whole_answer = format!(r#"{{"plan":{plan},"evaluation":{{"total_cost":1.5}},"walk":[]}}"#);
    assert_eq!(Placement::from_plan(&model, &whole_answer).unwrap(), placement);
}

/// Returns names, experts and memory of the processes.
fn described(placement: &Placement) -> Vec<(String, String, Option<u64>, Option<u64>)> {
    let processes = placement.processes().into_iter();
    processes.map(|it| (it.name, format_listing(&it.hosted), it.memory_bytes, it.cpu_millis)).collect()
}

#[test]
fn groups_are_processes_of_their_own() {
    let model = model(&[(1, 8), (2, 8), (5, 8)]);
    let groups = r#""groups":[
        {"experts":"LAYER:0-3,7,5:1","replicas":2,"memory_bytes":300000000,"vcpus":1.5},
        {"experts":"5:0"}]"#;
    let by_id = groups.replace("LAYER", "1");
    let expected = [
        ("group-0-0".to_owned(), "1:0-3,7,5:1".to_owned(), Some(300_000_000), Some(1500)),
        ("group-0-1".to_owned(), "1:0-3,7,5:1".to_owned(), Some(300_000_000), Some(1500)),
        ("group-1-0".to_owned(), "5:0".to_owned(), None, None),
    ];
    let alone = Placement::from_plan(&model, &format!("{{{by_id}}}")).unwrap();
    assert_eq!(remote(&alone), "1:0-3,7,5:0-1");
    assert_eq!(described(&alone), expected);
    // Layers that also list the remote experts, by index and in the planner's form.
    let layers = r#""layers":[{"layer":5,"remote":[1,0]},{"layer":1,"remote":[0,1,2,3,7],"replicas":0}]"#;
    assert_eq!(Placement::from_plan(&model, &format!("{{{by_id},{layers}}}")).unwrap(), alone);
    let by_position = groups.replace("LAYER", "0").replace("5:", "2:");
    let layers = r#""layers":[
        {"remote":[0,1,2,3,7],"memory_bytes":0,"replicas":0},
        {"remote":[],"memory_bytes":0,"replicas":0},
        {"remote":[0,1],"memory_bytes":0,"replicas":0}]"#;
    for plan in [format!("{{{by_position},{layers}}}"), format!(r#"{{"plan":{{{by_position},{layers}}}}}"#)] {
        assert_eq!(Placement::from_plan(&model, &plan).unwrap(), alone);
    }
}

#[test]
fn layers_may_have_replicas_beside_groups() {
    let model = model(&[(1, 8), (2, 8)]);
    let plan = r#"{"groups":[{"experts":"1:3"}],
        "layers":[{"layer":1,"remote":[1]},{"layer":2,"remote":[6,7],"replicas":2}]}"#;
    let placement = Placement::from_plan(&model, plan).unwrap();
    assert_eq!(remote(&placement), "1:1,3,2:6-7");
    assert_eq!(processes(&placement), ["1:1,2:6-7", "2:6-7", "1:3"]);
    let named = placement.processes().into_iter().map(|process| (process.function, process.name));
    let expected = [("group-1", "group-1-0"), ("group-1", "group-1-1"), ("group-0", "group-0-0")];
    assert_eq!(
        named.collect::<Vec<_>>(),
        expected.map(|(function, name)| (function.to_owned(), name.to_owned()))
    );
}

#[test]
fn experts_are_dealt_to_groups_in_turn() {
    let model = model(&[(1, 8), (3, 4)]);
    let placement = Placement::from_ratio(&model, 0.5, 2).unwrap().in_groups(3).unwrap();
    assert_eq!(remote(&placement), "1:4-7,3:2-3");
    let names = ["group-0-0", "group-0-1", "group-1-0", "group-1-1", "group-2-0", "group-2-1"];
    assert_eq!(placement.processes().iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), names);
    assert_eq!(processes(&placement), ["1:4,7,3:2", "1:4,7,3:2", "1:5,3:3", "1:5,3:3", "1:6", "1:6"]);
    let few = Placement::from_ratio(&model, 0.25, 1).unwrap().in_groups(64).unwrap();
    assert_eq!(processes(&few), ["1:6,3:3", "1:7"], "groups without experts are none");
    let none = Placement::from_ratio(&model, 0.0, 1).unwrap().in_groups(2).unwrap();
    assert!(none.processes().is_empty());
    for groups in [0, 65] {
        let error = Placement::from_ratio(&model, 0.5, 1).unwrap().in_groups(groups).unwrap_err();
        assert_eq!(error.field, "groups");
    }
}

#[test]
fn errors_name_the_field() {
    let model = model(&[(1, 4), (3, 4)]);
    for (plan, field) in [
        ("nonsense", ""),
        ("[]", ""),
        (r#"{"plan":[[]]}"#, ""),
        (r#"{"layers":3}"#, "layers"),
        (r#"{"layers":[{"layer":2,"remote":[0]}]}"#, "layers[0].layer"),
        (r#"{"layers":[{"layer":1,"remote":[0]},{"layer":1,"remote":[1]}]}"#, "layers[1].layer"),
        (r#"{"layers":[{"layer":1,"remote":[0]},{"remote":[1]}]}"#, "layers"),
        (r#"{"layers":[{"remote":[0]}]}"#, "layers"),
        (r#"{"layers":[{"layer":1,"remote":[0,4]}]}"#, "layers[0].remote[1]"),
        (r#"{"layers":[{"layer":1,"remote":[2,0,2]}]}"#, "layers[0].remote[2]"),
        (r#"{"layers":[{"layer":1,"remote":[2],"replicas":0}]}"#, "layers[0].replicas"),
        (r#"{"layers":[{"layer":1,"remote":[2],"replicas":1000}]}"#, "layers[0].replicas"),
        ("{}", "layers"),
        (r#"{"groups":[]}"#, "layers"),
        (r#"{"groups":[{"experts":""}]}"#, "groups[0].experts"),
        (r#"{"groups":[{"experts":"1:0"},{"experts":"1:x"}]}"#, "groups[1].experts"),
        (r#"{"groups":[{"experts":"0:1"}]}"#, "groups[0].experts"),
        (r#"{"groups":[{"experts":"3:3-4"}]}"#, "groups[0].experts"),
        (r#"{"groups":[{"experts":"1:0-2"},{"experts":"3:0,1:2"}]}"#, "groups[1].experts"),
        (r#"{"groups":[{"experts":"1:0","replicas":0}]}"#, "groups[0].replicas"),
        (r#"{"groups":[{"experts":"1:0","replicas":65}]}"#, "groups[0].replicas"),
        (r#"{"groups":[{"experts":"1:0","memory_bytes":0}]}"#, "groups[0].memory_bytes"),
        (r#"{"groups":[{"experts":"1:0","vcpus":1}]}"#, "groups[0].vcpus"),
        (r#"{"groups":[{"experts":"1:0","memory_bytes":1,"vcpus":0}]}"#, "groups[0].vcpus"),
        (r#"{"groups":[{"experts":"2:0"}],"layers":[{"remote":[]},{"remote":[]}]}"#, "groups[0].experts"),
        (
            r#"{"groups":[{"experts":"1:0"}],"layers":[{"layer":1,"remote":[0],"replicas":1}]}"#,
            "layers[0].replicas",
        ),
        (r#"{"groups":[{"experts":"1:0"}],"layers":[{"layer":1,"remote":[0,2]}]}"#, "layers[0].remote[1]"),
        (
            r#"{"groups":[{"experts":"1:0"}],"layers":[{"layer":1,"remote":[2],"replicas":0}]}"#,
            "layers[0].replicas",
        ),
    ] {
        assert_eq!(Placement::from_plan(&model, plan).unwrap_err().field, field, "{plan}");
    }
}

proptest! {
    #[test]
    fn every_expert_is_in_one_place(
        experts in 1_u32..70,
        layers in 1_u32..6,
        ratio in 0.0..=1.0,
        replicas in 1_u32..4,
    ) {
        let model: Vec<MoeLayer> = (0..layers).map(|layer| MoeLayer { layer: 2 * layer, experts }).collect();
        let placement = Placement::from_ratio(&model, ratio, replicas).unwrap();
        let local = local_experts(&model, &placement.remote());
        for moe in &model {
            let ids = |sets: &[remoe_proto::v1::LayerExperts]| -> Vec<u32> {
                let of_layer = sets.iter().filter(|set| set.layer == moe.layer);
                of_layer.flat_map(|set| set.experts.clone()).collect()
            };
            let (mut all, away) = (ids(&local), ids(&placement.remote()));
            prop_assert_eq!(away.len(), (ratio * f64::from(experts) + 0.5).floor() as usize);
            all.extend(away);
            prop_assert_eq!(all, (0..experts).collect::<Vec<_>>());
        }
        for RemoteProcess { hosted, .. } in placement.processes() {
            prop_assert_eq!(&hosted, &placement.remote());
            prop_assert_eq!(&parse_listing(&format_listing(&hosted)).unwrap(), &hosted);
        }
    }
}

#[test]
fn bytes_are_any_number_and_what_is_wrong_is_named() {
    let model = model(&[(0, 4)]);
    let plan = |bytes: &str| format!(r#"{{"groups":[{{"experts":"0:1","memory_bytes":{bytes}}}]}}"#);
    for (bytes, whole) in [("1.5e9", 1_500_000_000), ("1000.25", 1001), ("7", 7)] {
        let placement = Placement::from_plan(&model, &plan(bytes)).unwrap();
        assert_eq!(placement.processes()[0].memory_bytes, Some(whole));
    }
    for bytes in ["-1", "1e16", "\"1GB\""] {
        let error = Placement::from_plan(&model, &plan(bytes)).unwrap_err();
        assert_eq!(error.field, "groups[0].memory_bytes", "{error}");
    }
}
