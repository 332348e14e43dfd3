//! Cost of a change of plan: functions that start, and bytes that they load.

use crate::manifests::Revision;
use crate::names::{FUNCTION, label};
use crate::testing::example::{EXPERTS, LAYERS, built, mix};
use crate::tests::scene::{Scene, spec};
use crate::write::Write;
use remoe_api::{DemandPhase, MixOf};
use serde_json::json;
use std::collections::BTreeSet;

/// Started functions, and bytes of weights that they loaded.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct StartCount {
    starts: f64,
    bytes: f64,
}

/// Returns the remote experts by layer.
fn remote_experts(revision: &Revision) -> BTreeSet<(u32, u32)> {
    let sets = revision.remote_sets().into_iter();
    sets.flat_map(|set| set.experts.into_iter().map(move |expert| (set.layer, expert))).collect()
}

/// Lets `steps` seconds pass; counts starts and loaded bytes.
fn count(scene: &mut Scene, steps: usize) -> StartCount {
    let mut counted = StartCount::default();
    let model = scene.world.facts.inspection.clone();
    let expert_bytes = model.expert_bytes as f64;
    let not_experts = (model.outside_bytes + model.non_expert_layer_bytes.iter().sum::<u64>()) as f64;
    let mut remote = remote_experts(&built(&scene.world.owner, &scene.newest().spec));
    for _ in 0..steps {
        let (planned, steps) = scene.world.reconcile();
        let target = planned.target.unwrap().revision;
        let now = remote_experts(&target);
        let mut mains = 0;
        for write in &steps.writes {
            let Write::Create(creation) = write else { continue };
            counted.starts += 1.0;
            let name = label(&creation.pod.metadata, FUNCTION);
            let Some(function) = target.remote.iter().find(|function| function.name == name) else {
                mains += 1;
                counted.bytes += not_experts + ((LAYERS * EXPERTS) - now.len()) as f64 * expert_bytes;
                continue;
            };
            let hosted = function.hosted.as_ref().unwrap().sets();
            counted.bytes += hosted.iter().map(|set| set.experts.len()).sum::<usize>() as f64 * expert_bytes;
        }
        // A main function that stays loads the experts that become local.
        if mains == 0 {
            counted.bytes += remote.difference(&now).count() as f64 * expert_bytes;
        }
        remote = now;
        scene.world.write(&steps, usize::MAX);
        scene.world.run();
    }
    counted
}

#[test]
fn the_toll_of_a_revision_is_what_starts_and_loads() {
    let mut revisions = 0;
    for groups in [None, Some(4)] {
        let mut spec = spec();
        spec["scaling"] = json!({"min": 1});
        if let Some(groups) = groups {
            spec["remoteExperts"] = json!({"maxGroups": groups});
        }
        let mut scene = Scene::new(spec);
        assert_eq!(scene.phase(), DemandPhase::Active);
        for turn in 0..6 {
            let hot: Vec<usize> = (0..2 + turn).map(|index| (turn * 5 + index * 3) % EXPERTS).collect();
            scene.world.planner.changes.clear();
            scene.say("a", 0, 1, Some(mix(MixOf::Answered, &hot)));
            scene.pass(100);
            let counted = count(&mut scene, 60);
            let changes = &scene.world.planner.changes;
            let starts: f64 = changes.iter().filter_map(|change| change.starts).sum();
            let bytes: f64 =
                changes.iter().filter_map(|change| change.moved_bytes).map(|bytes| bytes.0).sum();
            println!(
                "{groups:?} turn {turn}: {starts} start and {bytes:.3e} bytes by plan, counted {counted:?}"
            );
            let near = |told: f64, counted: f64| (told - counted).abs() <= 0.05 * counted;
            assert!(near(starts, counted.starts), "{starts} start by plan, {counted:?}");
            assert!(near(bytes, counted.bytes), "{bytes} bytes by plan, {counted:?}");
            revisions += changes.len();
        }
    }
    assert!(revisions >= 6, "{revisions} revisions");
}
