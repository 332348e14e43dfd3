//! Two tenants of one release, each with the role `edit` in one namespace and a key for its models. The rival tries
//! to wake, name, bill, block, read and reach the victim's deployment. Each attempt prints its outcome.

use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use remoe_e2e::cluster::Cluster;
use remoe_e2e::deployment::Deployment;
use remoe_e2e::policy::{PolicyEndpoint, admits};
use remoe_e2e::scene::Scene;
use remoe_e2e::tenant::{Tenant, with_key};
use remoe_e2e::{claim, demo, gateways, pods, release};
use remoe_test_support::raw::{self, RawResponse};
use serde_json::{Value, json};
use std::net::SocketAddr;

const TEST: &str = "tenants_of_two_namespaces_cannot_reach_each_other";
/// Secret with the keys of the gateways.
const KEYS: &str = "tenants";
/// Short model name that the chart grants to the victim.
const GRANTED: &str = "public";
/// Request limit of the rival's second key, per minute.
const FLOOD: usize = 2;

/// Prints an attempt with its outcome.
fn print_attempt(part: &str, attempt: &str, answered: &str) {
    let answered: String = answered.chars().take(160).collect();
    let attempt = attempt.replace("\r\n", "; ");
    eprintln!("{part:8} | {attempt} | {}", answered.replace('\n', " "));
}

/// Prints an HTTP attempt and checks that its response has `status`.
fn check_status(part: &str, attempt: &str, answer: &RawResponse, status: u16) {
    print_attempt(part, attempt, &format!("{} {}", answer.head.status, answer.text()));
    assert_eq!(answer.head.status, status, "{attempt}: {}", answer.text());
}

/// Checks that the API server forbids an attempt.
fn check_forbidden(part: &str, attempt: &str, answer: Result<String, String>) {
    let refusal = answer.expect_err(attempt);
    let words = refusal.split_once("exit status: 1: ").map_or("", |(_, words)| words);
    print_attempt(part, attempt, words);
    assert!(words.contains("orbidden"), "{attempt}: {refusal}");
}

fn chat(model: &str, headers: &str) -> String {
    let body = json!({"model": model, "messages": [{"role": "user", "content": "Read Genesis 1:1."}],
        "max_tokens": 1, "temperature": 0, "user": "victim"});
    raw::post("/v1/chat/completions", &body.to_string()).replacen("\r\n", &format!("\r\n{headers}"), 1)
}

/// Returns today's cost of `tenant` by the administrator's metrics, in nano-dollars.
async fn spent_nanodollars(gateway: SocketAddr, tenant: &str) -> f64 {
    let page = raw::ask(gateway, with_key(&raw::get("/metrics"), "sk-admin")).await.text();
    let of_tenant = format!("tenant=\"{tenant}\"");
    let mut lines = page.lines();
    let found =
        lines.find(|line| line.starts_with("remoe_budget_spent_nanodollars{") && line.contains(&of_tenant));
    found.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
}

/// Returns the number of wakes of the victim's deployment.
async fn wake_count(victim: &Tenant<'_>) -> Value {
    gateways::demand(victim.scene, "demo").await["spec"]["wakes"].clone()
}

async fn try_to_wake(victim: &Tenant<'_>, rival: &Tenant<'_>, gateway: SocketAddr) {
    let before = wake_count(victim).await;
    let name = victim.model("demo");
    for model in [&name, GRANTED, "demo"] {
        for (key, status) in [(rival.key, 404), ("sk-guessed", 401)] {
            let answer = raw::ask(gateway, with_key(&chat(model, ""), key)).await;
            check_status("wake", &format!("chat with {model}, key {key}"), &answer, status);
        }
        check_status(
            "wake",
            &format!("chat with {model}, no key"),
            &raw::ask(gateway, chat(model, "")).await,
            401,
        );
    }
    let body =
        json!({"model": name, "prompt": "a", "input": "a", "max_tokens": 1, "messages": []}).to_string();
    for path in ["/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/v1/embeddings"] {
        let answer = rival.ask(gateway, &raw::post(path, &body)).await;
        check_status("wake", &format!("{path} with {name}"), &answer, 404);
    }
    let answer = rival.ask(gateway, &raw::get(&format!("/v1/placement?model={name}"))).await;
    check_status("wake", &format!("/v1/placement of {name}"), &answer, 404);
    let there = victim.scene.namespace.as_str();
    for (kind, subresource, change) in [
        ("moed", "scale", json!({"spec": {"replicas": 1}})),
        ("moed", "", json!({"spec": {"scaling": {"min": 1}}})),
        ("moedemand", "", json!({"spec": {"wakes": 100}})),
        ("moedemand", "status", json!({"status": {"gateways": [{"uid": "x", "waiting": 1}]}})),
    ] {
        let (subresource, change) = (format!("--subresource={subresource}"), change.to_string());
        let mut patch = vec!["patch", kind, "demo", "--type=merge", "--patch", &change, "--namespace", there];
        patch.extend((subresource != "--subresource=").then_some(subresource.as_str()));
        check_forbidden(
            "wake",
            &format!("kubectl patch {kind} {subresource} {change}"),
            rival.kubectl(&patch).await,
        );
    }
    assert_eq!(wake_count(victim).await, before);
    assert!(pods::list(victim.scene, pods::FUNCTIONS).await.is_empty(), "functions started");
    print_attempt("wake", "after all of these", "no wake, no pod");
}

/// The rival's deployment uses all of the victim's names that a spec can have.
async fn try_to_take_names(victim: &Tenant<'_>, rival: &Tenant<'_>, gateway: SocketAddr) {
    let object = |namespace: &str, spec: Value| {
        json!({"apiVersion": "remoe.dev/v1alpha1", "kind": "MoEDeployment",
            "metadata": {"name": "demo", "namespace": namespace}, "spec": spec})
    };
    let named = |name: &str| demo::spec(&json!({"servedName": name}));
    let there = victim.scene.namespace.as_str();
    let taken = rival.apply(&object(there, named(GRANTED))).await;
    check_forbidden("name", "a MoEDeployment in the victim's namespace", taken);
    let apply = async |name: &str| {
        let applied = rival.apply(&object(&rival.scene.namespace, named(name))).await;
        print_attempt(
            "name",
            &format!("the rival's servedName: {name}"),
            applied.as_ref().unwrap_or_else(|it| it),
        );
        assert!(applied.is_ok(), "{applied:?}");
        let settled = [("Ready", "True"), ("Progressing", "False")];
        Deployment::existing(rival.scene, "demo").wait_for_conditions(&settled).await;
    };
    apply(GRANTED).await;
    let before = wake_count(victim).await;
    for model in ["demo", GRANTED, &rival.model("demo")] {
        let answer = rival.ask(gateway, &chat(model, "")).await;
        check_status("name", &format!("the rival asks {model}: its own"), &answer, 200);
    }
    assert_eq!(wake_count(victim).await, before);
    // The victim's functions sleep, so an answer requires a wake.
    let before = before.as_i64().unwrap();
    let full = victim.model("demo");
    let asked = [(GRANTED, victim.key), (GRANTED, "sk-admin"), (&full, victim.key)];
    for (model, key) in asked {
        let answer = raw::ask(gateway, with_key(&chat(model, ""), key)).await;
        check_status("name", &format!("{key} asks {model}: the victim's"), &answer, 200);
        assert_eq!(wake_count(victim).await, json!(before + 1), "{model} woke no function of the victim");
    }
    // It stays awake and has costs.
    let awake = json!({"spec": {"scaling": {"min": 1, "max": 1}}});
    Deployment::existing(victim.scene, "demo").patch(&awake).await;
    apply(&full).await;
    for (model, key) in asked {
        let answer = raw::ask(gateway, with_key(&chat(model, ""), key)).await;
        check_status("name", &format!("{key} asks {model}: the victim's"), &answer, 200);
        assert_eq!(answer.ok()["model"], GRANTED, "the servedName of the victim");
    }
    let page = raw::ask(gateway, with_key(&raw::get("/metrics"), "sk-admin")).await.text();
    let of_rival = format!("model=\"{}\"", rival.model("demo"));
    let counted = page.lines().filter(|line| line.starts_with("remoe_gateway_tokens_total{"));
    let served: Vec<&str> = counted.filter(|line| line.contains(&of_rival)).collect();
    print_attempt("name", "tokens of the rival's deployment, by tenant", &served.join("; "));
    assert!(!served.is_empty() && served.iter().all(|line| line.contains("tenant=\"rival\"")), "{served:?}");
}

async fn try_to_bill(rival: &Tenant<'_>, gateway: SocketAddr) {
    let (theirs, own) =
        (spent_nanodollars(gateway, "victim").await, spent_nanodollars(gateway, "rival").await);
    assert!(theirs > 0.0 && own > 0.0, "{theirs} {own}");
    for headers in [
        "x-remoe-tenant: victim\r\n",
        "x-remoe-gateway: victim\r\nx-remoe-told: 1\r\n",
        "x-remoe-tokens: 18446744073709551615,1\r\n",
        "OpenAI-Organization: victim\r\n",
    ] {
        let answer = rival.ask(gateway, &chat(&rival.model("demo"), headers)).await;
        check_status("bill", headers.trim(), &answer, 200);
    }
    let (theirs_now, own_now) =
        (spent_nanodollars(gateway, "victim").await, spent_nanodollars(gateway, "rival").await);
    print_attempt(
        "bill",
        "spent by the victim, by the rival",
        &format!("{theirs} -> {theirs_now}, {own} -> {own_now}"),
    );
    assert_eq!(theirs, theirs_now);
    assert!(own_now > own);
}

async fn try_to_lock_out(victim: &Tenant<'_>, rival: &Tenant<'_>, gateway: SocketAddr) {
    let mut statuses = Vec::new();
    for _ in 0..3 * FLOOD {
        let answer = raw::ask(gateway, with_key(&chat(&rival.model("demo"), ""), "sk-flood")).await;
        statuses.push(answer.head.status);
    }
    print_attempt("lock out", "a flood with another key of the rival", &format!("{statuses:?}"));
    assert_eq!(statuses[..FLOOD], [200; FLOOD]);
    assert!(statuses[FLOOD..].iter().all(|status| *status == 429), "{statuses:?}");
    for (who, request) in [(victim, victim.model("demo")), (rival, rival.model("demo"))] {
        let answer = who.ask(gateway, &chat(&request, "")).await;
        check_status("lock out", &format!("{request} with its tenant's key meanwhile"), &answer, 200);
    }
    let pricing = json!({"cpuCoreHour": "1000", "memoryGBHour": "1000"});
    let spec = demo::spec(&json!({"mode": "Advisory", "pricing": pricing}));
    let object = json!({"apiVersion": "remoe.dev/v1alpha1", "kind": "MoEDeployment",
        "metadata": {"name": "dear", "namespace": rival.scene.namespace}, "spec": spec});
    let dear = rival.apply(&object).await;
    print_attempt("lock out", "a deployment for $1,000 an hour", dear.as_ref().unwrap_or_else(|it| it));
    let before = spent_nanodollars(gateway, "victim").await;
    let answer = victim.ask(gateway, &chat(&rival.model("dear"), "")).await;
    check_status("lock out", "the victim asks it by mistake", &answer, 404);
    assert_eq!(spent_nanodollars(gateway, "victim").await, before);
}

async fn try_to_read(victim: &Tenant<'_>, rival: &Tenant<'_>, gateway: SocketAddr) {
    let there = victim.scene.namespace.as_str();
    for path in ["/v1/models", "/status", "/metrics", "/version"] {
        let answer = rival.ask(gateway, &raw::get(path)).await;
        check_status("read", path, &answer, 200);
        // The rival's own deployment has the victim's name as its servedName.
        let text = answer.text().replace(&victim.model("demo"), "");
        assert!(!text.contains(there) && !text.contains("\"victim\""), "{path} tells of the victim: {text}");
    }
    let stored = raw::post(
        "/v1/responses",
        &json!({"model": victim.model("demo"), "input": "a", "max_output_tokens": 1}).to_string(),
    );
    let stored = victim.ask(gateway, &stored).await.ok()["id"].as_str().unwrap().to_owned();
    let answer = rival.ask(gateway, &raw::get(&format!("/v1/responses/{stored}"))).await;
    check_status("read", "the victim's stored response", &answer, 404);

    let metrics = SocketAddr::new(gateway.ip(), 9090);
    for key in ["", rival.key] {
        let request =
            if key.is_empty() { raw::get("/metrics") } else { with_key(&raw::get("/metrics"), key) };
        let answer = raw::ask(metrics, request).await;
        let page = answer.text();
        let spending =
            page.lines().filter(|line| line.starts_with("remoe_cost_") || line.starts_with("remoe_budget_"));
        let tenants = page.lines().filter(|line| line.contains("tenant=\"victim\""));
        let (spending, tenants) = (spending.count(), tenants.count());
        print_attempt(
            "read",
            &format!("port 9090, key {key:?}"),
            &format!("{spending} lines of costs, {tenants} of the victim"),
        );
        assert_eq!((spending, tenants), (0, 0));
    }
    let of_victim = pods::list(victim.scene, pods::FUNCTIONS).await.remove(0).name_any();
    let of_gateway = gateways::pods(&victim.scene.cluster, 1).await[0].name_any();
    let system = release::NAMESPACE;
    let proxy = format!("/api/v1/namespaces/{there}/pods/{of_victim}:9090/proxy/metrics");
    let attempts: [&[&str]; 13] = [
        &["logs", &of_victim, "--namespace", there],
        &["logs", &of_gateway, "--namespace", system],
        &["logs", "deployment/remoe", "--namespace", system],
        &["get", "--raw", &proxy],
        &["exec", &of_victim, "--namespace", there, "--", "true"],
        &["port-forward", &of_victim, ":9090", "--namespace", there],
        &["get", "pods", "--namespace", there],
        &["get", "secrets", "--namespace", there],
        &["get", "secrets", "--namespace", system],
        &["get", "moedeployments", "--all-namespaces"],
        &["get", "moedemands", "--namespace", there],
        &["get", "moerecords", "--namespace", there],
        &["get", "leases", "--namespace", system],
    ];
    for arguments in attempts {
        let attempt = arguments.join(" ").replace(there, "VICTIM");
        check_forbidden("read", &attempt, rival.kubectl(arguments).await);
    }
}

/// No rule of the victim's and the gateways' policies allows a pod of the rival with any labels.
async fn check_network_policies(victim: &Tenant<'_>, rival: &Tenant<'_>) {
    let cluster = &victim.scene.cluster;
    let labels = async |name: &str| {
        let namespace = Api::<Namespace>::all(cluster.client.clone()).get(name).await;
        namespace.expect("the namespace can be read").metadata.labels.unwrap_or_default()
    };
    let policies = async |namespace: &str| {
        let api = Api::<NetworkPolicy>::namespaced(cluster.client.clone(), namespace);
        api.list(&ListParams::default()).await.expect("policies can be listed").items
    };
    let of_rival = labels(&rival.scene.namespace).await;
    let gateway = gateways::pods(cluster, 1).await.remove(0);
    let mut disguises: Vec<Pod> = pods::list(rival.scene, pods::FUNCTIONS).await;
    disguises.extend(pods::list(victim.scene, pods::FUNCTIONS).await);
    disguises.push(gateway.clone());
    let system = Scene { cluster: cluster.clone(), namespace: release::NAMESPACE.to_owned() };
    disguises.extend(pods::list(&system, "app.kubernetes.io/component=operator").await);
    let (of_victim, of_system) = (labels(&victim.scene.namespace).await, labels(release::NAMESPACE).await);
    let there = policies(&victim.scene.namespace).await;
    let functions = pods::list(victim.scene, pods::FUNCTIONS).await;
    assert!(functions.len() >= 2, "a main and a remote function");
    for to in &functions {
        let name = to.labels()["remoe.dev/function"].clone();
        let to = PolicyEndpoint {
            namespace: &victim.scene.namespace,
            of_namespace: &of_victim,
            labels: to.labels(),
        };
        for port in [8000, 8081, 9000, 9001, 9090] {
            for disguise in &disguises {
                let namespace = &rival.scene.namespace;
                let from = PolicyEndpoint { namespace, of_namespace: &of_rival, labels: disguise.labels() };
                assert!(!admits(&there, from, to, port), "{name}:{port} from {:?}", disguise.labels());
            }
            print_attempt(
                "reach",
                &format!("{name}:{port} with labels of {} pods", disguises.len()),
                "refused",
            );
        }
        // The same evaluation allows gateways.
        let from = PolicyEndpoint {
            namespace: release::NAMESPACE,
            of_namespace: &of_system,
            labels: gateway.labels(),
        };
        assert_eq!(admits(&there, from, to, 8000), name == "main", "{name} for gateways");
    }
    let before = policies(release::NAMESPACE).await;
    let to =
        PolicyEndpoint { namespace: release::NAMESPACE, of_namespace: &of_system, labels: gateway.labels() };
    let empty = std::collections::BTreeMap::new();
    let from = PolicyEndpoint { namespace: &rival.scene.namespace, of_namespace: &of_rival, labels: &empty };
    assert!(!admits(&before, from, to, 9090), "the metrics of gateways");
    print_attempt("reach", "gateway:9090", "refused");
    assert!(admits(&before, from, to, 8000), "the API of gateways");
}

/// The rival does not get the name when the victim's deployment is deleted.
async fn check_name_is_not_taken_over(victim: &Tenant<'_>, gateway: SocketAddr, demo: &Deployment) {
    demo.delete().await;
    demo.wait_until_gone(victim.scene).await;
    for (model, key) in [(GRANTED, victim.key), (GRANTED, "sk-admin"), (&victim.model("demo"), victim.key)] {
        let answer = raw::ask(gateway, with_key(&chat(model, ""), key)).await;
        check_status("name", &format!("{key} asks {model} after the victim's was deleted"), &answer, 404);
    }
}

async fn install(
    alone: &mut release::Exclusive,
    cluster: &Cluster,
    victim: &Scene,
    rival: &Scene,
) -> SocketAddr {
    let keys = json!({"tenants": [
        {"name": "victim", "keys": ["sk-victim"], "namespaces": [victim.namespace], "dollarsPerDay": 1},
        {"name": "rival", "keys": ["sk-rival"], "namespaces": [rival.namespace], "dollarsPerDay": 1},
        {"name": "flood", "keys": ["sk-flood"], "namespaces": [rival.namespace], "requestsPerMinute": FLOOD},
        {"name": "admin", "keys": ["sk-admin"], "admin": true},
    ]});
    forget(cluster).await;
    let place = ["--namespace", release::NAMESPACE];
    let content = format!("--from-literal=keys.yaml={keys}");
    cluster.kubectl(&[&["create", "secret", "generic", KEYS, &content][..], &place].concat()).await;
    let keys = format!("gateway.keysSecretName={KEYS}");
    let grant = format!("gateway.shortNames.{GRANTED}={}", victim.namespace);
    alone.install(cluster, &["replicas=1", &keys, &grant]).await;
    gateways::address(&gateways::pods(cluster, 1).await[0])
}

async fn forget(cluster: &Cluster) {
    cluster
        .kubectl(&["delete", "secret", KEYS, "--ignore-not-found", "--namespace", release::NAMESPACE])
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_of_two_namespaces_cannot_reach_each_other() {
    Scene::run(TEST, async |one| {
        Scene::run(TEST, async |two| {
            let cluster = &one.cluster;
            let mut alone = release::exclusive(cluster, 1).await;
            let gateway = install(&mut alone, cluster, one, two).await;
            let (victim, rival) = (Tenant::new(one, "sk-victim").await, Tenant::new(two, "sk-rival").await);
            claim::with_demo_model(two, "models").await;
            let more = json!({"servedName": GRANTED, "scaling": {"min": 0, "idleWindow": "15s"}});
            let demo = demo::deploy(one, &more).await;
            gateways::wait_until_asleep(one, &demo).await;
            try_to_wake(&victim, &rival, gateway).await;
            try_to_take_names(&victim, &rival, gateway).await;
            try_to_bill(&rival, gateway).await;
            try_to_lock_out(&victim, &rival, gateway).await;
            try_to_read(&victim, &rival, gateway).await;
            check_network_policies(&victim, &rival).await;
            check_name_is_not_taken_over(&victim, gateway, &demo).await;
            forget(cluster).await;
        })
        .await;
    })
    .await;
}
