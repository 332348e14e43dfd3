//! Specs and their changes on a real API server: validation, defaults and refusals.

use crate::tests::api_server::{Server, with_server};
use kube::api::{Patch, PatchParams, PostParams};
use remoe_api::{MoEDeployment, Mode, RemoteMode};
use serde_json::{Value, json};

/// Returns a minimal spec with `fields` merged in.
fn spec(fields: Value) -> Value {
    let mut spec = json!({"model": {"source": "pvc://models/demo"}});
    for (key, value) in fields.as_object().unwrap() {
        spec[key] = value.clone();
    }
    spec
}

fn model(fields: Value) -> Value {
    spec(json!({ "model": fields }))
}

fn arrivals(fields: Value) -> Value {
    spec(json!({"workload": {
        "maxInputTokens": 10, "maxOutputTokens": 10, "typicalInputTokens": 10, "typicalOutputTokens": 1,
        "arrivals": fields,
    }}))
}

/// Returns a spec with limits of cold requests and `arrivals`.
fn cold(stated: Option<Value>, slo: Value) -> Value {
    let mut spec = stated.map_or_else(|| spec(json!({})), arrivals);
    spec["slo"] = slo;
    spec
}

fn cpu(main: Option<Value>, remote: Option<Value>) -> Value {
    let mut spec = spec(json!({}));
    for (part, cpu) in [("main", main), ("remoteExperts", remote)] {
        if let Some(cpu) = cpu {
            spec[part] = json!({ "cpu": cpu });
        }
    }
    spec
}

fn object(name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "remoe.dev/v1alpha1", "kind": "MoEDeployment",
        "metadata": {"name": name}, "spec": spec,
    })
}

/// Returns the API server's answer to `spec`; nothing is stored.
async fn tried(server: &Server, name: &str, spec: &Value) -> Result<MoEDeployment, String> {
    let params = PatchParams { dry_run: true, ..PatchParams::apply("test").validation_strict() };
    let api = server.api::<MoEDeployment>();
    api.patch(name, &params, &Patch::Apply(object(name, spec))).await.map_err(|error| error.to_string())
}

#[test]
fn valid_specs_are_accepted() {
    let gpu = json!({"device": "cuda", "gpu": {"count": 1}});
    let gpu_prices = json!({"gpuHour": "2.50", "gpuMemoryMB": 80000});
    let workload = json!({
        "maxInputTokens": 10, "maxOutputTokens": 10, "typicalInputTokens": 10, "typicalOutputTokens": 1,
    });
    let valid = [
        spec(json!({})),
        model(json!({"source": "pvc://models"})),
        model(json!({"source": "hf://org/name", "revision": "main", "cacheClaimName": "weights"})),
        model(json!({"source": "hf://org/name", "credentialsSecretName": "hf-token", "dtype": "bfloat16"})),
        model(json!({"source": "pvc://models", "dtype": "float32", "expertsDtype": "int4"})),
        model(json!({"source": "pvc://models", "expertsDtype": "int4", "denseDtype": "int4"})),
        model(json!({"source": "pvc://models", "maxModelLen": 8192})),
        model(
            json!({"source": "pvc://models", "chatTemplateKwargs": {"enable_thinking": false, "x": {"y": [1]}}}),
        ),
        model(json!({"source": "s3://bucket/a/b", "endpoint": "http://minio:9000"})),
        model(json!({"source": "s3://bucket/a/b", "ambientCredentials": true})),
        model(json!({"source": "hf://o/n", "endpoint": "https://hub.example"})),
        model(json!({"source": "https://host/path", "credentialsSecretName": "basic"})),
        spec(json!({"mode": "Advisory", "acceptedPlan": "0123456789"})),
        spec(json!({"replicas": 3, "servedName": "a model"})),
        spec(json!({"slo": {"ttft": "1m30s", "tpot": "1.5ms"}})),
        spec(json!({ "workload": workload })),
        spec(json!({"main": gpu, "pricing": gpu_prices})),
        spec(json!({"main": {"memoryMB": {"min": 100, "max": 100}}})),
        spec(json!({"main": {"template": {
            "nodeSelector": {"pool": "a"}, "runtimeClassName": "nvidia", "priorityClassName": "high",
            "serviceAccountName": "m", "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
        }}})),
        spec(json!({"remoteExperts": {"mode": "Never"}})),
        spec(json!({"remoteExperts": {"mode": "Always", "maxReplicas": 64, "payloadLimitMB": 6}})),
        spec(json!({"remoteExperts": {"maxGroups": 64}})),
        spec(json!({
            "main": {"cpu": {"min": 500, "max": 16000, "step": 250}},
            "remoteExperts": {"cpu": {"min": 10, "max": 10, "step": 10}},
        })),
        arrivals(json!({"perHour": "0.5"})),
        arrivals(json!({"perHour": "3600", "burst": "1.5"})),
        cold(Some(json!({"perHour": "20"})), json!({"coldTtft": "30s", "coldPercent": "2.5"})),
        cold(Some(json!({"perHour": "20"})), json!({"coldPercent": "100"})),
        spec(json!({"pricing": {"billing": "Invocation", "cpuCoreHour": "1", "memoryGBHour": "0.5"}})),
        spec(json!({"profile": {"configMapName": "measured"}})),
    ];
    with_server(async |server| {
        for spec in &valid {
            if let Err(refusal) = tried(&server, "demo", spec).await {
                panic!("{spec}: {refusal}");
            }
        }
    });
}

#[test]
fn invalid_specs_are_refused_with_the_field_and_the_reason() {
    let memory = |range: Value| spec(json!({"main": {"memoryMB": range}}));
    let workload = |max: u32, typical: u32| {
        spec(json!({"workload": {
            "maxInputTokens": max, "maxOutputTokens": 10, "typicalInputTokens": typical, "typicalOutputTokens": 1,
        }}))
    };
    let at_once = |concurrency: u32| {
        let mut spec = workload(10, 10);
        spec["workload"]["concurrency"] = json!(concurrency);
        spec
    };
    let invalid = [
        (json!({}), "spec.model"),
        (model(json!({})), "spec.model.source"),
        (model(json!({"source": "models/demo"})), "spec.model.source"),
        (model(json!({"source": "hf://name"})), "spec.model.source"),
        (model(json!({"source": "ftp://host/x"})), "spec.model.source"),
        (model(json!({"source": "pvc://Models/demo"})), "spec.model.source"),
        (model(json!({"source": "pvc://m/d", "revision": "main"})), "hf:// sources only"),
        (model(json!({"source": "https://h/n", "endpoint": "http://x"})), "s3:// and hf:// sources only"),
        (model(json!({"source": "s3://b", "endpoint": "minio:9000"})), "spec.model.endpoint"),
        (
            model(json!({"source": "pvc://m/d", "credentialsSecretName": "s"})),
            "credentialsSecretName is not valid",
        ),
        (model(json!({"source": "pvc://m/d", "cacheClaimName": "c"})), "cacheClaimName is not valid"),
        (model(json!({"source": "hf://o/n", "ambientCredentials": true})), "s3:// sources only"),
        (model(json!({"source": "pvc://m/d", "dtype": "int8"})), "spec.model.dtype"),
        (model(json!({"source": "pvc://m/d", "expertsDtype": "float32"})), "spec.model.expertsDtype"),
        (model(json!({"source": "pvc://m/d", "denseDtype": "mxfp4"})), "spec.model.denseDtype"),
        (model(json!({"source": "pvc://m/d", "maxModelLen": 0})), "spec.model.maxModelLen"),
        (spec(json!({"mode": "Passive"})), "spec.mode"),
        (spec(json!({"acceptedPlan": "0123456789"})), "mode Advisory"),
        (spec(json!({"mode": "Advisory", "acceptedPlan": "latest"})), "spec.acceptedPlan"),
        (spec(json!({"replicas": 0})), "spec.replicas"),
        (spec(json!({"replicas": 65})), "spec.replicas"),
        (spec(json!({"replicas": 2, "scaling": {"min": 0}})), "spec.replicas"),
        (spec(json!({"scaling": {"max": 0}})), "spec.scaling.max"),
        (spec(json!({"scaling": {"min": 3, "max": 2}})), "spec.scaling.max"),
        (spec(json!({"scaling": {"min": 2, "max": 1}})), "must be at least min"),
        (spec(json!({"scaling": {"min": 0, "idleWindow": "0s"}})), "spec.scaling.idleWindow"),
        (spec(json!({"slo": {"ttft": "0s"}})), "spec.slo.ttft"),
        (spec(json!({"slo": {"tpot": "fast"}})), "spec.slo.tpot"),
        (cold(None, json!({"coldTtft": "30s"})), "require workload.arrivals"),
        (cold(None, json!({"coldPercent": "5"})), "require workload.arrivals"),
        (cold(Some(json!({"perHour": "20"})), json!({"coldTtft": "0s"})), "spec.slo.coldTtft"),
        (cold(Some(json!({"perHour": "20"})), json!({"coldPercent": "101"})), "spec.slo.coldPercent"),
        (cold(Some(json!({"perHour": "20"})), json!({"coldPercent": 5})), "spec.slo.coldPercent"),
        (workload(10, 11), "at most maxInputTokens"),
        (workload(0, 0), "spec.workload.maxInputTokens"),
        (at_once(0), "spec.workload.concurrency"),
        (at_once(257), "spec.workload.concurrency"),
        (memory(json!({"min": 200, "max": 100})), "spec.main.memoryMB.max"),
        (memory(json!({"min": 150, "max": 300})), "spec.main.memoryMB.min"),
        (memory(json!({"min": 100})), "spec.main.memoryMB.max"),
        (spec(json!({"main": {"device": "tpu"}})), "spec.main.device"),
        (
            spec(json!({"main": {"device": "cuda"}, "pricing": {"gpuHour": "1", "gpuMemoryMB": 1000}})),
            "spec.main.gpu",
        ),
        (spec(json!({"main": {"gpu": {"count": 1}}})), "spec.main.gpu"),
        (
            spec(json!({
                "main": {"device": "cuda", "gpu": {"count": 2}},
                "pricing": {"gpuHour": "1", "gpuMemoryMB": 1000},
            })),
            "must be 1: the layers of a model are not divided over several GPUs",
        ),
        (spec(json!({"main": {"device": "cuda", "gpu": {"count": 1}}})), "requires pricing.gpuHour"),
        (spec(json!({"remoteExperts": {"maxReplicas": 0}})), "spec.remoteExperts.maxReplicas"),
        (spec(json!({"remoteExperts": {"maxGroups": 0}})), "spec.remoteExperts.maxGroups"),
        (spec(json!({"remoteExperts": {"maxGroups": 65}})), "spec.remoteExperts.maxGroups"),
        (cpu(Some(json!({"min": 500, "max": 1000})), None), "spec.remoteExperts.cpu"),
        (cpu(None, Some(json!({"min": 500, "max": 1000}))), "must be set together"),
        (
            cpu(Some(json!({"min": 500, "max": 400})), Some(json!({"min": 10, "max": 20}))),
            "spec.main.cpu.max",
        ),
        (cpu(Some(json!({"min": 5, "max": 400})), Some(json!({"min": 10, "max": 20}))), "spec.main.cpu.min"),
        (
            cpu(Some(json!({"min": 10, "max": 20})), Some(json!({"min": 10, "max": 9000, "step": 10}))),
            "spec.remoteExperts.cpu.step",
        ),
        (arrivals(json!({})), "spec.workload.arrivals.perHour"),
        (arrivals(json!({"perHour": "0"})), "spec.workload.arrivals.perHour"),
        (arrivals(json!({"perHour": 60})), "spec.workload.arrivals.perHour"),
        (arrivals(json!({"perHour": "60", "burst": "0.9"})), "spec.workload.arrivals.burst"),
        (arrivals(json!({"perHour": "60", "idle": "5m"})), "idle"),
        (spec(json!({"remoteExperts": {"mode": "Sometimes"}})), "spec.remoteExperts.mode"),
        (spec(json!({"pricing": {"cpuCoreHour": "cheap"}})), "spec.pricing.cpuCoreHour"),
        (spec(json!({"pricing": {"cpuCoreHour": 0.03}})), "spec.pricing.cpuCoreHour"),
        (spec(json!({"pricing": {"gpuHour": "1"}})), "spec.pricing.gpuHour"),
        (spec(json!({"profile": {}})), "spec.profile.configMapName"),
        (spec(json!({"replicas": 2, "scaling": {"min": 0, "max": 1, "idleWindow": "10m"}})), "replicas"),
    ];
    with_server(async |server| {
        for (spec, field) in &invalid {
            match tried(&server, "demo", spec).await {
                Ok(_) => panic!("{spec} was accepted"),
                Err(refusal) => assert!(refusal.contains(field), "{spec}: {refusal}"),
            }
        }
        for name in ["1demo", "a-name-of-more-than-forty-characters-is-long", "de.mo"] {
            let refusal = tried(&server, name, &spec(json!({}))).await.unwrap_err();
            assert!(refusal.contains("DNS label"), "{refusal}");
        }
    });
}

#[test]
fn the_examples_are_accepted() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = files.filter(|path| path.extension().is_some_and(|kind| kind == "yaml")).collect();
    assert!(files.len() >= 2);
    with_server(async |server| {
        for file in &files {
            let example: Value = serde_yaml::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
            if let Err(refusal) = tried(&server, "demo", &example["spec"]).await {
                panic!("{}: {refusal}", file.display());
            }
        }
    });
}

#[test]
fn what_is_left_out_is_filled_in() {
    with_server(async |server| {
        let stored = tried(&server, "demo", &spec(json!({}))).await.unwrap();
        assert_eq!(stored.spec.mode, Mode::Active);
        assert_eq!(stored.spec.remote_experts.mode, RemoteMode::Auto);
        assert_eq!(
            (stored.spec.replicas, stored.spec.main_functions(), stored.spec.idle_window()),
            (None, 1, None)
        );
        assert_eq!(
            serde_json::to_value(&stored.spec.scaling).unwrap(),
            json!({"min": 1, "idleWindow": "600s", "targetPercent": 70, "window": "60s"})
        );
        assert_eq!(serde_json::to_value(stored.spec.slo).unwrap(), json!({"ttft": "10s", "tpot": "150ms"}));
        assert_eq!(stored.spec.main.memory_mb.step, 100);
        assert_eq!((stored.spec.main.cpu, stored.spec.remote_experts.max_groups), (None, 16));
        assert_eq!(stored.spec.pricing.cpu_core_hour, "0.03");
    });
}

#[test]
fn replicas_are_scaled_through_the_subresource() {
    with_server(async |server| {
        let api = server.api::<MoEDeployment>();
        let object: MoEDeployment = serde_json::from_value(object("demo", &spec(json!({})))).unwrap();
        api.create(&PostParams::default(), &object).await.unwrap();
        for (replicas, awake, sleeps) in [(2, 2, false), (0, 1, true)] {
            let scale = json!({"spec": {"replicas": replicas}});
            api.patch_scale("demo", &PatchParams::default(), &Patch::Merge(&scale)).await.unwrap();
            let spec = api.get("demo").await.unwrap().spec;
            assert_eq!((spec.main_functions(), spec.idle_window().is_some()), (awake, sleeps));
        }
        // Explicit maxima are kept.
        let most = json!({"spec": {"scaling": {"min": 1, "max": 3}}});
        api.patch("demo", &PatchParams::default(), &Patch::Merge(&most)).await.unwrap();
        for (replicas, is_taken) in [(3, true), (4, false)] {
            let scale = json!({"spec": {"replicas": replicas}});
            let scaled = api.patch_scale("demo", &PatchParams::default(), &Patch::Merge(&scale)).await;
            assert_eq!(scaled.is_ok(), is_taken, "{scaled:?}");
        }
    });
}

#[test]
fn a_plan_is_never_changed() {
    use crate::manifests::plan_object;
    use crate::testing::example::{deployment, plan, plan_of_groups};
    use remoe_api::MoEPlan;

    with_server(async |server| {
        let mut owner = deployment(json!({}));
        owner.metadata.uid = None;
        owner.metadata.namespace = Some(server.namespace.clone());
        let api = server.api::<MoEPlan>();
        let cpu = json!({"min": 500, "max": 4000});
        let apart = deployment(json!({"main": {"cpu": cpu}, "remoteExperts": {"cpu": cpu}}));
        let mut name = String::new();
        for plan in [plan_of_groups(&apart, 3), plan(&owner)] {
            let (_, object) = plan_object(&owner, plan).unwrap();
            let stored = api.create(&PostParams::default(), &object).await.unwrap();
            name = stored.metadata.name.clone().unwrap();
            // Figures survive a round trip.
            assert_eq!(stored.spec, object.spec);
        }
        let change = json!({"spec": {"main": {"memoryMB": 100}}});
        let refusal = api.patch(&name, &PatchParams::default(), &Patch::Merge(&change)).await.unwrap_err();
        assert!(refusal.to_string().contains("spec is immutable"), "{refusal}");
    });
}
