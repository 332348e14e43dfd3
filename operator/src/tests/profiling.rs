use crate::manifests::{OperatorEnvironment, profiler};
use crate::planning::{KnownProfile, Planning, PlanningError};
use crate::profiling::{from_log, measured, record, subject, supplied, with_added_owner};
use crate::testing::example::{deployment, environment, facts, plan};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Resource, ResourceExt};
use remoe_api::{Device, MoEDeployment, MoEDeploymentSpec, MoEPlanSpec, ProfileSource, SloSpec};
use remoe_hardware::{DeviceTimes, Origin, Profile};
use remoe_planner::Budget;
use serde_json::{Value, json};

/// Profile like that of a profiler.
fn profile() -> Profile {
    Profile { origin: Origin::Measured, ..Profile::prior(&facts().inspection, "bfloat16") }
}

fn of(spec: Value) -> String {
    subject(&deployment(spec), &facts()).unwrap()
}

#[test]
fn what_would_be_measured_alike_is_measured_once() {
    let base = of(json!({}));
    assert_eq!(base, of(json!({"servedName": "another", "replicas": 2, "remoteExperts": {"mode": "Never"}})));
    assert_ne!(base, of(json!({"model": {"dtype": "float32"}})));
    assert_ne!(base, of(json!({"model": {"expertsDtype": "int8"}})));
    assert_ne!(base, of(json!({"model": {"denseDtype": "int8"}})));
    assert_ne!(base, of(json!({"main": {"template": {"nodeSelector": {"pool": "large"}}}})));
    assert_ne!(base, of(json!({"main": {"memoryMB": {"min": 200, "max": 8000, "step": 100}}})));
    assert_ne!(base, of(json!({"main": {"cpu": {"min": 500, "max": 6000}}})));
    let gpu = json!({"device": "cuda", "gpu": {"count": 1}});
    assert_ne!(base, of(json!({"main": gpu})));
    let node = json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": "cpu", "operator": "In", "values": ["x"]}]}]});
    let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": node}});
    assert_ne!(base, of(json!({"main": {"template": {"affinity": affinity}}})));
    assert_ne!(base, of(json!({"main": {"template": {"runtimeClassName": "gvisor"}}})));
}

/// An upgrade, and fields about accounts or priorities, keep the profile.
#[test]
fn what_does_not_touch_the_hardware_keeps_its_figures() {
    let base = of(json!({}));
    let template = json!({
        "priorityClassName": "high", "serviceAccountName": "reader",
        "tolerations": [{"key": "gpu", "operator": "Exists"}], "affinity": {"podAntiAffinity": {}},
    });
    assert_eq!(base, of(json!({"main": {"template": template}})));
    // Memory beyond the measured vCPUs changes nothing.
    let memory = |max: u32| of(json!({"main": {"memoryMB": {"min": 200, "max": max, "step": 100}}}));
    assert_eq!(memory(8_000), memory(40_000));
    let mut annotated = deployment(json!({}));
    annotated.metadata.annotations = Some([("team".to_owned(), "a".to_owned())].into());
    annotated.metadata.labels = Some([("team".to_owned(), "a".to_owned())].into());
    assert_eq!(base, subject(&annotated, &facts()).unwrap());
    // Pods differ with the image; the measured subject does not.
    let upgraded = OperatorEnvironment { main_image: "main:2".to_owned(), ..environment() };
    let owner = deployment(json!({}));
    let pod = |environment: &OperatorEnvironment| {
        profiler(&owner, &base, 0, &plan(&owner), &facts(), environment).unwrap()
    };
    assert_ne!(pod(&environment()), pod(&upgraded));
    assert_eq!(pod(&environment()).name_any(), pod(&upgraded).name_any());
}

#[test]
fn a_profile_is_known_where_it_is_of_this_model() {
    let owner = deployment(json!({}));
    let mut kept = record(&owner, "0123456789", &profile()).unwrap();
    assert_eq!(kept.name_any(), "remoe-profile-0123456789");
    let known = measured(&kept, "0123456789", &owner, &facts()).unwrap();
    assert_eq!((known.source, known.profile), (ProfileSource::Measured, profile()));
    let others = deployment(json!({"model": {"dtype": "float32"}}));
    assert!(measured(&kept, "0123456789", &others, &facts()).is_none());
    assert!(measured(&kept, "9876543210", &owner, &facts()).is_none());
    kept.spec.json = Some("spoiled".to_owned());
    assert!(measured(&kept, "0123456789", &owner, &facts()).is_none());
}

#[test]
fn a_profile_stays_for_all_that_use_it_and_goes_with_the_last() {
    let first = deployment(json!({}));
    let second = MoEDeployment {
        metadata: kube::api::ObjectMeta {
            name: Some("second".to_owned()),
            uid: Some("uid-2".to_owned()),
            ..first.metadata.clone()
        },
        ..first.clone()
    };
    let kept = record(&first, "0123456789", &profile()).unwrap();
    assert!(with_added_owner(&kept, &first).is_none());
    let shared = with_added_owner(&kept, &second).unwrap();
    let owners: Vec<_> = shared.owner_references().iter().map(|owner| owner.uid.as_str()).collect();
    assert_eq!(owners, ["uid-1", "uid-2"]);
    // No controller, so that it is deleted only with the last owner.
    assert!(shared.owner_references().iter().all(|owner| owner.controller.is_none()));
    assert!(with_added_owner(&shared, &second).is_none());
}

#[test]
fn the_last_profile_in_a_log_counts() {
    let line = serde_json::to_string(&profile()).unwrap();
    let log = format!("{{\"level\":\"INFO\"}}\n{line}\n{{\"level\":\"INFO\"}}\nbye\n");
    assert_eq!(from_log(&log), Some(profile()));
    assert_eq!(from_log("{}\nnothing"), None);
    // Output of pods is unbounded; stored profiles are bounded.
    let mut large = profile();
    large.machine.cpu = "x".repeat(1 << 20);
    assert_eq!(from_log(&serde_json::to_string(&large).unwrap()), None);
}

#[test]
fn a_supplied_profile_that_is_not_there_is_named() {
    let missing = supplied("mine", None).unwrap_err();
    assert_eq!(
        (missing.reason, missing.message.as_str()),
        ("ProfileMissing", "missing ConfigMap mine (spec.profile.configMapName)")
    );
    let mut map = ConfigMap::default();
    let text = serde_json::to_string(&profile()).unwrap();
    map.data = Some([("profile.json".to_owned(), text)].into());
    assert_eq!(supplied("mine", Some(&map)).unwrap().source, ProfileSource::Supplied);
    map.data = Some([("profile.json".to_owned(), "{}".to_owned())].into());
    assert_eq!(supplied("mine", Some(&map)).unwrap_err().reason, "ProfileInvalid");
    map.data = None;
    assert_eq!(supplied("mine", Some(&map)).unwrap_err().reason, "ProfileMissing");
}

#[test]
fn a_profiler_is_where_main_functions_are() {
    let template = json!({"nodeSelector": {"pool": "large"}, "serviceAccountName": "reader"});
    let owner = deployment(json!({"main": {"template": template, "memoryMB": {"min": 200, "max": 40000}}}));
    let pod = profiler(&owner, "0123456789", 1, &plan(&owner), &facts(), &environment()).unwrap();
    assert_eq!(pod.name_any(), "remoe-profile-0123456789-1");
    assert!(pod.owner_references().iter().all(|owner| owner.controller == Some(true)));
    assert_eq!(pod.meta().labels.as_ref().unwrap()["app.kubernetes.io/component"], "profiler");
    let spec = pod.spec.unwrap();
    assert_eq!(spec.node_selector.unwrap()["pool"], "large");
    assert_eq!(spec.service_account_name.as_deref(), Some("reader"));
    assert_eq!(spec.active_deadline_seconds, Some(600));
    let container = &spec.containers[0];
    assert_eq!(container.image.as_deref(), Some("main:1"));
    let limits = container.resources.as_ref().unwrap().limits.as_ref().unwrap();
    // The vCPUs of main functions, up to eight; memory for the weights, and more.
    assert_eq!((limits["cpu"].0.as_str(), limits["memory"].0.as_str()), ("8", "2504M"));
}

/// Deployment whose main functions occupy the only GPU.
fn on_gpu() -> MoEDeployment {
    deployment(json!({
        "main": {"device": "cuda", "gpu": {"resource": "example.com/gpu", "count": 1}},
        "pricing": {"gpuHour": "2.50", "gpuMemoryMB": 16_000},
    }))
}

#[test]
fn profiler_of_a_gpu_deployment_needs_no_gpu() {
    let owner = on_gpu();
    let plan = MoEPlanSpec { device: Device::Cuda, ..plan(&deployment(json!({}))) };
    let pod = profiler(&owner, "0123456789", 0, &plan, &facts(), &environment()).unwrap();
    let spec = pod.spec.unwrap();
    let container = &spec.containers[0];
    let resources = container.resources.clone().unwrap();
    for given in [resources.limits.unwrap(), resources.requests.unwrap()] {
        assert_eq!(given.keys().collect::<Vec<_>>(), ["cpu", "memory"]);
    }
    let arguments = container.args.as_ref().unwrap().join(" ");
    assert!(arguments.contains("--device cuda --assume-device"), "{arguments}");
    // It runs beside the main function despite the taint of GPU nodes, and sees no GPU.
    let tolerated = spec.tolerations.unwrap();
    assert!(tolerated.iter().any(|taint| taint.key.as_deref() == Some("example.com/gpu")), "{tolerated:?}");
    assert!(spec.affinity.unwrap().pod_affinity.is_some());
    let hidden = container.env.iter().flatten().find(|variable| variable.name == "NVIDIA_VISIBLE_DEVICES");
    assert_eq!(hidden.unwrap().value.as_deref(), Some("void"));
    // Without a GPU, none of that applies.
    let owner = deployment(json!({}));
    let pod = profiler(&owner, "0123456789", 0, &self::plan(&owner), &facts(), &environment()).unwrap();
    let arguments = pod.spec.unwrap().containers[0].args.clone().unwrap().join(" ");
    assert!(!arguments.contains("--assume-device"), "{arguments}");
}

#[test]
fn assumed_times_of_a_gpu_make_plans_as_a_prior_does() {
    let owner = on_gpu();
    let assumed =
        Profile { origin: Origin::Measured, ..Profile::prior_on_gpu(&facts().inspection, "bfloat16") };
    let mut measured = assumed.clone();
    measured.device = measured.device.map(|times| DeviceTimes { assumed: false, ..times });
    let solved = |profile: Profile| {
        let known = KnownProfile { profile, source: ProfileSource::Measured };
        let spec = MoEDeploymentSpec {
            slo: SloSpec { tpot: serde_json::from_value(json!("1us")).unwrap(), ..owner.spec.slo.clone() },
            ..owner.spec.clone()
        };
        let planning = Planning::new("demo", &spec, &facts(), &known).unwrap();
        assert_eq!(planning.problem().device, remoe_planner::Device::Gpu);
        planning.solve(None, Budget::UNLIMITED)
    };
    // A limit missed by assumed figures is a warning; one missed by measured figures is an error.
    let plan = solved(assumed).unwrap();
    assert!(plan.warning.is_some() && plan.verdict.is_none(), "{plan:?}");
    assert!(matches!(solved(measured), Err(PlanningError::Infeasible(_))));
}
