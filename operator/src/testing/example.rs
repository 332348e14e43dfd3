//! Small example model, its deployments and their plans.

use crate::SignerName;
use crate::deployment_policy::DeploymentPolicy;
use crate::exposure::GatewayService;
use crate::facts::ModelFacts;
use crate::manifests::{OperatorEnvironment, PodExtras, Revision, plan_hash, revision};
use crate::planning::{KnownProfile, Planning};
use crate::pod_comparison::PodComparison;
use crate::source_policy::SourcePolicy;
use crate::testing::solutions;
use remoe_api::{MixOf, MoEDeployment, MoEPlanSpec, ProfileSource, RemotePlan, RequestMix};
use remoe_hardware::Profile;
use remoe_planner::{Group, Options, Remote, solve};
use remoe_predictor::UsageShares;
use remoe_proto::format_listing;
use remoe_proto::v1::LayerExperts;
use serde_json::{Value, json};

/// Returns gateways behind `name` that require keys.
pub fn gateway_service(name: &str) -> GatewayService {
    GatewayService { name: name.to_owned(), ..GatewayService::default() }
}

pub fn environment() -> OperatorEnvironment {
    OperatorEnvironment {
        main_image: "main:1".to_owned(),
        main_cuda_image: "cuda:1".to_owned(),
        remote_image: "remote:1".to_owned(),
        pull_policy: "Never".to_owned(),
        sources: SourcePolicy::new(&["*".parse().unwrap()], false),
        pods: PodExtras::default(),
        operator_namespace: "remoe-system".to_owned(),
        metrics_namespace: "monitoring".to_owned(),
        release: "remoe".to_owned(),
        signer: SignerName::Operator,
        gateway: None,
        uncertified_gateways: false,
        trace_collector: None,
        comparison: PodComparison::default(),
        policy: DeploymentPolicy {
            prices: None,
            priority_classes: "*".parse().unwrap(),
            runtime_classes: "*".parse().unwrap(),
        },
    }
}

/// Returns a deployment with `spec` merged into one with all experts remote, as the API would return it.
pub fn deployment(spec: Value) -> MoEDeployment {
    let mut object = json!({
        "apiVersion": "remoe.dev/v1alpha1",
        "kind": "MoEDeployment",
        "metadata": {"name": "demo", "namespace": "test", "uid": "uid-1", "generation": 1},
        "spec": {
            "model": {"source": "pvc://models/demo"},
            "main": {"memoryMB": {"min": 200, "max": 4000, "step": 100}},
            "remoteExperts": {"mode": "Always", "memoryMB": {"min": 200, "max": 1000, "step": 100}},
        },
    });
    merge(&mut object["spec"], spec);
    serde_json::from_value(object).unwrap()
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

/// Four layers, of which the last three have eight experts.
pub fn facts() -> ModelFacts {
    serde_json::from_value(json!({
        "fingerprint": "f00d", "family": "mixtral", "dtype": "bfloat16", "layers": 4,
        "moe_layers": [1, 2, 3], "experts": 8, "top_k": 2, "shared_experts": 0, "hidden_size": 128,
        "vocab_size": 4096, "context_length": 1024, "expert_bytes": 98304,
        "non_expert_layer_bytes": [102912, 102912, 102912, 102912], "outside_bytes": 1048832,
        "kv_bytes_per_token": 1536, "token_bytes": 256, "total_bytes": 4000000,
    }))
    .unwrap()
}

/// MoE layers of the example, and their experts if they are large.
pub const LAYERS: usize = 3;
pub const EXPERTS: usize = 16;

/// Returns the example model with experts that do not all fit into a main function.
pub fn large() -> ModelFacts {
    let mut facts = facts();
    let model = &mut facts.inspection;
    (model.experts, model.expert_bytes) = (EXPERTS, 100_000_000);
    (model.hidden_size, model.token_bytes) = (4096, 8192);
    (model.outside_bytes, model.total_bytes) = (500_000_000, 6_000_000_000);
    facts
}

/// Nearly all work is on these experts, in every layer.
fn shares(hot: &[usize]) -> UsageShares {
    let weight = |at: usize| if hot.contains(&(at % EXPERTS)) { 1.0 } else { 0.001 };
    UsageShares::from_weights(EXPERTS, (0..LAYERS * EXPERTS).map(weight).collect()).unwrap()
}

pub fn mix(of: MixOf, hot: &[usize]) -> RequestMix {
    let text = shares(hot).to_text(1000).unwrap();
    RequestMix { of, model: "f00d".to_owned(), requests: 20, tokens: 2000, shares: text, predicted_us: 1500 }
}

pub fn prior() -> KnownProfile {
    KnownProfile { profile: Profile::prior(&facts().inspection, "bfloat16"), source: ProfileSource::Prior }
}

pub fn planning(owner: &MoEDeployment) -> Planning {
    Planning::new("demo", &owner.spec, &facts(), &prior()).unwrap()
}

/// Returns the planner's plan, with a function for each layer with remote experts.
pub fn plan(owner: &MoEDeployment) -> MoEPlanSpec {
    let mut plan = solutions::solve(&planning(owner), None).unwrap();
    if let Some(largest) = plan.groups.iter().map(|group| group.memory_mb).max() {
        let of_layer = |set: LayerExperts| {
            let experts = format_listing(std::slice::from_ref(&set));
            let experts = experts.split_once(':').unwrap().1.to_owned();
            RemotePlan { layer: set.layer, experts, memory_mb: largest, replicas: 1 }
        };
        plan.remote = built(owner, &plan).remote_sets().into_iter().map(of_layer).collect();
        plan.groups.clear();
    }
    plan
}

/// Returns a plan with experts 0 to 5 of every layer in `groups` groups, distributed round-robin, of 300 MB and, if
/// vCPUs are separate, 750 millicores; 1500 in main functions.
pub fn plan_of_groups(owner: &MoEDeployment, groups: u32) -> MoEPlanSpec {
    let planning = planning(owner);
    let problem = planning.problem();
    let options = Options { remote: Remote::Never, ..Options::default() };
    let mut answer = solve(problem, None, &options).unwrap();
    let apart = problem.specs.main_vcpus.is_some();
    answer.plan.main_vcpus = apart.then_some(1.5);
    answer.plan.layers.iter_mut().for_each(|layer| layer.remote = (0..6).collect());
    let group = |number: u32| Group {
        experts: vec![(0..6).filter(|expert| expert % groups == number).collect(); problem.layers.len()],
        memory_bytes: 300e6,
        vcpus: apart.then_some(0.75),
        replicas: 1 + number % 2,
        idle_seconds: None,
    };
    // Their order does not matter.
    answer.plan.groups = (0..groups).rev().map(group).collect();
    planning.plan(&answer, None, None)
}

/// Returns the functions of a plan.
pub fn built(owner: &MoEDeployment, plan: &MoEPlanSpec) -> Revision {
    revision(owner, &plan_hash(plan).unwrap(), plan, &environment()).unwrap()
}
