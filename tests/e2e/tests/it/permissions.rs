//! Rights of the release's service accounts at the API server: those in charts/permissions.

use remoe_e2e::cluster::Cluster;
use remoe_e2e::release::{self, ACCOUNT, GATEWAY_ACCOUNT, NAMESPACE};
use remoe_e2e::scene::Scene;
use remoe_e2e::tool;
use remoe_test_support::binaries::workspace;
use std::collections::BTreeSet;

/// Account without roles, whose rights every account has.
const STRANGER: &str = "system:serviceaccount:remoe-system:stranger";

/// Returns the rights of `account` in `namespace`, one `RESOURCE.GROUP NAME VERB` for each.
async fn granted_rules(cluster: &Cluster, account: &str, namespace: &str) -> BTreeSet<String> {
    let listed =
        cluster.kubectl(&["auth", "can-i", "--list", "--no-headers", "--as", account, "-n", namespace]).await;
    let lists = |line: &str| {
        let parts: Vec<String> = line.split(['[', ']']).map(|part| part.trim().to_owned()).collect();
        // RESOURCE [URLS] [NAMES] [VERBS]
        let [resource, _urls, _, names, _, verbs, ..] = &parts[..] else { panic!("{line:?} is not a right") };
        (resource.clone(), names.clone(), verbs.clone())
    };
    let mut rights = BTreeSet::new();
    for line in listed.lines().filter(|line| !line.starts_with(' ') && !line.trim().is_empty()) {
        let (resource, names, verbs) = lists(line);
        let names: Vec<&str> = if names.is_empty() { vec!["*"] } else { names.split(' ').collect() };
        for name in names {
            rights.extend(verbs.split(' ').map(|verb| format!("{resource} {name} {verb}")));
        }
    }
    rights
}

/// Returns the rights of `account` in the file's `scopes`, in the same form.
fn expected_rules(file: &str, account: &str, scopes: &[&str]) -> BTreeSet<String> {
    let path = workspace().join("charts/permissions").join(file);
    let text = std::fs::read_to_string(&path).expect("the file of rights can be read");
    let mut rights = BTreeSet::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = line.split(' ').collect();
        let [of, within, group, resource, names, verbs] = fields[..] else {
            panic!("{line:?} has not six fields")
        };
        if of != account || !scopes.contains(&within) {
            continue;
        }
        let resource = if group == "core" { resource.to_owned() } else { of_group(resource, group) };
        for name in names.split(',') {
            rights.extend(verbs.split(',').map(|verb| format!("{resource} {name} {verb}")));
        }
    }
    rights
}

/// Returns a resource of a group as kubectl prints it, with the subresource last.
fn of_group(resource: &str, group: &str) -> String {
    match resource.split_once('/') {
        Some((resource, part)) => format!("{resource}.{group}/{part}"),
        None => format!("{resource}.{group}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn accounts_have_the_rights_of_the_golden_file() {
    Scene::run("accounts_have_the_rights_of_the_golden_file", async |scene| {
        let cluster = &scene.cluster;
        let mut installed = release::exclusive(cluster, 1).await;
        let list = format!("watchNamespaces={{{}}}", scene.namespace);
        installed.install(cluster, &["replicas=1", &list, "identity.allNamespaces=false"]).await;
        for (account, name) in [(ACCOUNT, "operator"), (GATEWAY_ACCOUNT, "gateway")] {
            let scopes = [(scene.namespace.as_str(), "models"), (NAMESPACE, NAMESPACE), ("default", "none")];
            for (namespace, scope) in scopes {
                let common = granted_rules(cluster, STRANGER, namespace).await;
                let rights = granted_rules(cluster, account, namespace).await;
                let own: BTreeSet<String> = rights.difference(&common).cloned().collect();
                assert_eq!(own, expected_rules("namespaces.txt", name, &[scope]), "{name} in {namespace}");
            }
        }
        // Pods are written and logs are read only in the listed namespaces.
        let list = format!("identity.namespaces={{{}}}", scene.namespace);
        installed.install(cluster, &["replicas=1", &list, "identity.allNamespaces=false"]).await;
        for (namespace, scopes) in
            [(scene.namespace.as_str(), &["cluster", "default"][..]), ("default", &["cluster"])]
        {
            let common = granted_rules(cluster, STRANGER, namespace).await;
            let rights = granted_rules(cluster, ACCOUNT, namespace).await;
            let own: BTreeSet<String> = rights.difference(&common).cloned().collect();
            assert_eq!(own, expected_rules("cluster.txt", "operator", scopes), "operator in {namespace}");
        }
        // A gateway cannot acquire the operators' Lease.
        let kubectl = cluster.tool("kubectl");
        for verb in ["get", "patch", "update", "delete"] {
            let asked =
                ["auth", "can-i", verb, "leases/remoe-operator", "--as", GATEWAY_ACCOUNT, "-n", NAMESPACE];
            assert!(tool::attempt(&kubectl, &cluster.kubeconfig, &asked).await.is_err(), "{verb}");
        }
    })
    .await;
}
