//! Settings of the operator for the pods of all deployments: images, and additions.

use crate::manifests::{OperatorEnvironment, PodExtras, inspector, plan_hash, profiler, revision};
use crate::names::{COMPONENT, FUNCTION};
use crate::testing::example::{deployment, environment, facts, plan};
use crate::testing::world::World;
use crate::write::Write;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use remoe_api::{Device, MoEPlanSpec};
use serde_json::{Value, json};

fn extras(value: &Value) -> PodExtras {
    value.to_string().parse().unwrap()
}

/// Returns every kind of pod, for a fetched model and an operator with `extras`.
fn pods(extras: PodExtras) -> Vec<Pod> {
    let environment = OperatorEnvironment { pods: extras, ..environment() };
    let owner = deployment(json!({"model": {"source": "s3://bucket/x", "endpoint": "http://minio:9000"}}));
    let plan = plan(&owner);
    let revision = revision(&owner, &plan_hash(&plan).unwrap(), &plan, &environment).unwrap();
    let mut all: Vec<Pod> = revision.functions().map(|function| function.pod(&owner, 0, 0)).collect();
    all.push(inspector(&owner, "subject", 0, &environment).unwrap());
    all.push(profiler(&owner, "subject", 0, &plan, &facts(), &environment).unwrap());
    all
}

#[test]
fn all_pods_have_what_the_operator_was_told() {
    let given = extras(&json!({
        "imagePullSecrets": [{"name": "registry"}], "labels": {"team": "a"}, "annotations": {"sidecar/inject": "false"},
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}, {"name": "AWS_ENDPOINT_URL", "value": "elsewhere"}],
    }));
    for (pod, plain) in pods(given).into_iter().zip(pods(PodExtras::default())) {
        let name = pod.name_any();
        assert_eq!(pod.labels()["team"], "a", "{name}");
        assert_eq!(pod.labels()[COMPONENT], plain.labels()[COMPONENT]);
        assert_eq!(pod.annotations()["sidecar/inject"], "false", "{name}");
        assert!(plain.annotations().iter().all(|(key, value)| pod.annotations().get(key) == Some(value)));
        let (spec, plain) = (pod.spec.unwrap(), plain.spec.unwrap());
        assert_eq!(spec.image_pull_secrets.unwrap()[0].name, "registry", "{name}");
        assert_eq!(plain.image_pull_secrets, None);
        let variables = spec.containers[0].env.clone().unwrap();
        let value = |name: &str| {
            let mut all = variables.iter().filter(|variable| variable.name == name);
            let value = all.next().and_then(|variable| variable.value.as_deref());
            assert!(all.next().is_none(), "{name} stands twice");
            value
        };
        assert_eq!(value("HTTPS_PROXY"), Some("http://proxy:3128"), "{name}");
        assert_eq!(value("AWS_ENDPOINT_URL"), Some("http://minio:9000"), "what the model needs stands");
        assert_eq!(spec.security_context, plain.security_context);
    }
}

#[test]
fn the_cluster_chooses_users_where_it_is_to() {
    for (pod, plain) in
        pods(extras(&json!({"arbitraryUser": true}))).into_iter().zip(pods(PodExtras::default()))
    {
        let security = pod.spec.unwrap().security_context.unwrap();
        assert_eq!((security.run_as_user, security.run_as_group, security.fs_group), (None, None, None));
        assert_eq!((security.run_as_non_root, security.fs_group_change_policy), (Some(true), None));
        let plain = plain.spec.unwrap().security_context.unwrap();
        assert_eq!((plain.run_as_user, plain.fs_group), (Some(65532), Some(65532)));
    }
}

/// New labels are applied to running pods; a change of their spec replaces them.
#[test]
fn only_what_pods_consist_of_has_them_made_anew() {
    let mut settled = World::new(json!({}));
    settled.settle();
    let writes = |given: Value| {
        let mut world = settled.clone();
        world.environment.pods = extras(&given);
        let (_, diff) = world.reconcile();
        diff.writes
    };
    assert_eq!(writes(json!({})), []);
    let relabelled = writes(json!({"labels": {"team": "a"}, "annotations": {"owner": "b"}}));
    let functions = settled.observed.pods.iter().filter(|pod| pod.labels().contains_key(FUNCTION)).count();
    assert_eq!(relabelled.len(), functions);
    for write in relabelled {
        let Write::Relabel { live, wanted } = write else { panic!("{write:?}") };
        assert_eq!(live.name_any(), wanted.name_any());
        assert_eq!((wanted.labels()["team"].as_str(), wanted.annotations()["owner"].as_str()), ("a", "b"));
    }
    for made_anew in [
        json!({"env": [{"name": "A", "value": "b"}]}),
        json!({"imagePullSecrets": [{"name": "registry"}]}),
        json!({"arbitraryUser": true}),
    ] {
        assert!(
            writes(made_anew.clone()).iter().any(|write| matches!(write, Write::Create(_))),
            "{made_anew}"
        );
    }
}

#[test]
fn what_is_misspelt_or_not_theirs_is_refused() {
    for (wrong, said) in [
        ("", "expected JSON with imagePullSecrets"),
        (r#"{"label": {}}"#, "unknown field `label`"),
        (r#"{"labels": {"a": 1}}"#, "expected a string"),
        (r#"{"arbitraryUser": "yes"}"#, "expected a boolean"),
        (r#"{"env": [{"value": "b"}]}"#, "expected a name in each entry"),
        (r#"{"imagePullSecrets": [{}]}"#, "expected a name in each entry"),
        (r#"{"labels": {"app.kubernetes.io/part-of": "other"}}"#, "app.kubernetes.io/part-of"),
        (r#"{"labels": {"remoe.dev/deployment": "other"}}"#, "remoe.dev/deployment"),
        (r#"{"annotations": {"remoe.dev/x": ""}}"#, "remoe.dev/x"),
    ] {
        let error = wrong.parse::<PodExtras>().unwrap_err();
        assert!(error.contains(said), "{wrong}: {error}");
    }
    assert_eq!("{}".parse(), Ok(PodExtras::default()));
}

#[test]
fn what_computes_on_a_gpu_has_the_image_for_it() {
    let gpu = json!({
        "main": {"device": "cuda", "gpu": {"resource": "nvidia.com/gpu", "count": 1}},
        "pricing": {"gpuHour": "2.5", "gpuMemoryMB": 80_000},
    });
    for (spec, device, main) in [(json!({}), Device::Cpu, "main:1"), (gpu, Device::Cuda, "cuda:1")] {
        let (owner, environment) = (deployment(spec), environment());
        // The nodes of functions do not affect their hardware profile.
        let plan = MoEPlanSpec { device, ..plan(&deployment(json!({}))) };
        let revision = revision(&owner, &plan_hash(&plan).unwrap(), &plan, &environment).unwrap();
        let image = |pod: Pod| pod.spec.unwrap().containers[0].image.clone().unwrap();
        assert_eq!(image(revision.main.pod(&owner, 0, 0)), main);
        assert_eq!(image(profiler(&owner, "subject", 0, &plan, &facts(), &environment).unwrap()), main);
        assert_eq!(image(inspector(&owner, "subject", 0, &environment).unwrap()), "main:1");
        for remote in &revision.remote {
            assert_eq!(image(remote.pod(&owner, 0, 0)), "remote:1");
        }
    }
}
