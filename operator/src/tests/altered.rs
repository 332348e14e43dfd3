//! Pods of functions that other writers altered.

use crate::diff::Diff;
use crate::names::{FUNCTION, MAIN, label};
use crate::pod_comparison::PodField;
use crate::testing::world::World;
use crate::write::Write;
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::{Container, EnvVar, Pod, PodSpec, Volume, VolumeMount};
use kube::ResourceExt;
use remoe_api::ConditionType;
use serde_json::{Value, json};

/// Change of a pod's spec.
type PodChange = fn(&mut PodSpec);

fn settled() -> World {
    let mut world = World::new(json!({
        "model": {"source": "s3://bucket/x", "endpoint": "http://minio:9000", "credentialsSecretName": "s3"},
    }));
    world.settle();
    world
}

fn main_pod(world: &mut World) -> &mut Pod {
    let mut pods = world.observed.pods.iter_mut();
    pods.find(|pod| label(&pod.metadata, FUNCTION) == MAIN).unwrap()
}

fn container(spec: &mut PodSpec) -> &mut Container {
    &mut spec.containers[0]
}

/// Sets the restart count.
fn restarted(pod: &mut Pod, times: u32) {
    let mut status = serde_json::to_value(&pod.status).unwrap();
    status["containerStatuses"] = json!([{
        "name": "main-model-fn", "image": "", "imageID": "", "ready": true, "restartCount": times,
        "state": {"running": {}},
    }]);
    pod.status = serde_json::from_value(status).unwrap();
}

/// Returns the names of created pods, and whether a warning gives the reason.
fn replaced(diff: &Diff) -> (usize, bool) {
    let made = diff.writes.iter().filter(|write| matches!(write, Write::Create(_))).count();
    let said = diff.events_after(usize::MAX);
    let reported = said.iter().any(|it| it.reason == "FunctionReplaced" && it.note.contains("PodAltered"));
    (made, reported)
}

/// Reconciles after `change` of the main function's spec.
fn after(change: impl FnOnce(&mut PodSpec)) -> (usize, bool) {
    let mut world = settled();
    // The API server and a node filled in defaults.
    let pod = main_pod(&mut world);
    restarted(pod, 0);
    change(pod.spec.as_mut().unwrap());
    let (_, diff) = world.reconcile();
    replaced(&diff)
}

#[test]
fn altered_pods_are_replaced_with_an_event() {
    let changes: [(&str, PodChange); 10] = [
        ("command", |spec| container(spec).command = Some(vec!["sh".to_owned()])),
        ("args", |spec| container(spec).args.as_mut().unwrap().push("--control-listen=[::]:1".to_owned())),
        ("env", |spec| container(spec).env.as_mut().unwrap()[0].value = Some("http://evil".to_owned())),
        ("env that is given twice", |spec| {
            let mut again = container(spec).env.as_ref().unwrap()[0].clone();
            again.value = Some("http://evil".to_owned());
            container(spec).env.as_mut().unwrap().push(again);
        }),
        ("env from", |spec| container(spec).env_from = None),
        ("volume", |spec| {
            let volumes = spec.volumes.as_mut().unwrap();
            let folder = volumes.iter_mut().find(|volume| volume.empty_dir.is_some()).unwrap();
            *folder =
                serde_json::from_value(json!({"name": folder.name, "hostPath": {"path": "/"}})).unwrap();
        }),
        ("mount", |spec| container(spec).volume_mounts.as_mut().unwrap()[0].name = "tmp".to_owned()),
        ("host", |spec| spec.host_network = Some(true)),
        ("token", |spec| spec.automount_service_account_token = Some(true)),
        ("privileges", |spec| {
            let security = container(spec).security_context.as_mut().unwrap();
            security.allow_privilege_escalation = Some(true);
        }),
    ];
    for (what, change) in changes {
        assert_eq!(after(change), (1, true), "{what}");
    }
}

#[test]
fn what_admission_adds_is_no_alteration() {
    assert_eq!(after(|_| {}), (0, false));
    let added = after(|spec| {
        let sidecar = Container { name: "proxy".to_owned(), ..Container::default() };
        spec.containers.insert(0, sidecar);
        let named = |value: Value| serde_json::from_value::<EnvVar>(value).unwrap();
        let ours = spec.containers.iter_mut().find(|it| it.name != "proxy").unwrap();
        ours.env.as_mut().unwrap().push(named(json!({"name": "TRACE", "value": "1"})));
        let token: Volume = serde_json::from_value(json!({"name": "t", "emptyDir": {}})).unwrap();
        spec.volumes.as_mut().unwrap().push(token);
        let mount =
            VolumeMount { name: "t".to_owned(), mount_path: "/t".to_owned(), ..VolumeMount::default() };
        ours.volume_mounts.as_mut().unwrap().push(mount);
        spec.service_account_name = Some("default".to_owned());
        spec.priority = Some(7);
        for volume in spec.volumes.iter_mut().flatten() {
            // As in a pod of an earlier version, and as the API server drops it.
            volume.empty_dir.iter_mut().for_each(|folder| folder.size_limit = None);
            volume.secret.iter_mut().for_each(|secret| secret.default_mode = Some(420));
        }
    });
    assert_eq!(added, (0, false));
}

#[test]
fn empty_value_that_the_api_leaves_out_is_no_alteration() {
    let mut world = settled();
    world.environment.pods = r#"{"env": [{"name": "A", "value": ""}, {"name": "B"}]}"#.parse().unwrap();
    world.settle();
    let variables = container(main_pod(&mut world).spec.as_mut().unwrap()).env.as_mut().unwrap();
    variables
        .iter_mut()
        .for_each(|variable| variable.value = variable.value.take().filter(|it| !it.is_empty()));
    let (_, diff) = world.reconcile();
    assert_eq!(diff.writes, []);
}

#[test]
fn another_drain_time_is_no_alteration() {
    let other = after(|spec| {
        let arguments = container(spec).args.as_mut().unwrap();
        let at = arguments.iter().position(|argument| argument == "--drain-seconds").unwrap();
        arguments[at + 1] = "77".to_owned();
        spec.termination_grace_period_seconds = Some(92);
    });
    assert_eq!(other, (0, false));
}

#[test]
fn changed_image_replaces_the_pod_once_it_runs() {
    let image = |restarts: u32, exact: bool| {
        let mut world = settled();
        world.environment.comparison.exact_images = exact;
        let pod = main_pod(&mut world);
        pod.spec.as_mut().unwrap().containers[0].image = Some("mirror/main:1".to_owned());
        restarted(pod, restarts);
        let (_, diff) = world.reconcile();
        replaced(&diff)
    };
    assert_eq!(image(0, false), (0, false), "admission may have written it");
    assert_eq!(image(1, false), (1, true));
    assert_eq!(image(0, true), (1, true));
}

#[test]
fn altered_main_function_gets_no_requests() {
    let mut world = World::with_gateways(json!({}), &["g1"]);
    world.settle();
    assert_eq!(world.demand().spec.mains.len(), 1);
    let pod = main_pod(&mut world);
    let name = pod.name_any();
    pod.spec.as_mut().unwrap().containers[0].command = Some(vec!["sh".to_owned()]);
    let (_, diff) = world.reconcile();
    world.write(&diff, usize::MAX);
    assert!(world.demand().spec.mains.iter().all(|main| main.pod != name));
    world.settle();
    assert!(world.observed.pods.iter().all(|pod| pod.name_any() != name));
    assert_eq!(world.demand().spec.mains.len(), 1);
}

/// Rewrites every pod as admission would at its creation.
fn rewrite(world: &mut World) {
    for pod in &mut world.observed.pods {
        let spec = pod.spec.as_mut().unwrap();
        container(spec).command = Some(vec!["/wrapper".to_owned()]);
    }
}

/// Reconciles repeatedly, past the pauses between replacements. Returns the created pods.
fn let_admission_rewrite(world: &mut World) -> usize {
    let mut made = 0;
    for _ in 0..60 {
        let (_, diff) = world.reconcile();
        made += replaced(&diff).0;
        world.write(&diff, usize::MAX);
        rewrite(world);
        world.observed.now = world.observed.now.checked_add(SignedDuration::from_secs(60)).unwrap();
        world.run();
    }
    made
}

#[test]
fn admission_that_rewrites_commands_ends_replacement() {
    let mut world = World::with_gateways(json!({}), &["g1"]);
    world.settle();
    rewrite(&mut world);
    let functions = world.observed.pods.len();
    assert_eq!(let_admission_rewrite(&mut world), 4 * functions, "of each function four");
    assert_eq!(let_admission_rewrite(&mut world), 0);
    assert_eq!(world.observed.pods.len(), functions);
    assert_eq!(world.demand().spec.mains, [], "it gets no requests");
    let (_, _, status) = world.look_and_state();
    let degraded = status.condition(ConditionType::Degraded).unwrap();
    assert_eq!((degraded.status.as_str(), degraded.reason.as_str()), ("True", "PodRewritten"));
    let message = &degraded.message;
    assert!(
        message.contains("command of container") && message.contains("functions.rewrittenFields"),
        "{message}"
    );

    // After the administrator exempts the field, the existing pods work.
    world.environment.comparison.rewritten = vec![PodField::Command];
    assert_eq!(let_admission_rewrite(&mut world), 0);
    world.settle();
    assert_eq!(world.demand().spec.mains.len(), 1);
}

#[test]
fn fields_rewritten_by_admission_are_ignored_in_comparison() {
    let made = |rewritten: &[PodField], change: PodChange| {
        let mut world = settled();
        world.environment.comparison.rewritten = rewritten.to_vec();
        let pod = main_pod(&mut world);
        restarted(pod, 1);
        change(pod.spec.as_mut().unwrap());
        let (_, diff) = world.reconcile();
        replaced(&diff)
    };
    let image: PodChange = |spec| container(spec).image = Some("mirror/main:1".to_owned());
    let arguments: PodChange = |spec| container(spec).args.as_mut().unwrap().push("--more".to_owned());
    let host: PodChange = |spec| spec.host_network = Some(true);
    assert_eq!(made(&[PodField::Image], image), (0, false));
    assert_eq!(made(&[PodField::Args], arguments), (0, false));
    assert_eq!(made(&[PodField::Args], image), (1, true));
    assert_eq!(made(&[PodField::Image, PodField::Args], host), (1, true));
}
