//! Fake API server with what gateways use: list, watch and status of MoEDemands, and Leases.

use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, patch};
use axum::{Json, Router};
use futures_util::{StreamExt, stream};
use remoe_test_support::deadline::{SOON, until};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use tokio::sync::broadcast;

/// An in-memory API server. Clones share their objects.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) address: SocketAddr,
    state: Arc<Mutex<Objects>>,
    events: broadcast::Sender<(&'static str, Value)>,
}

#[derive(Default)]
struct Objects {
    version: u64,
    /// Objects by kind, namespace and name.
    all: BTreeMap<(&'static str, String, String), Value>,
    /// Status patches of gateways by deployment, in the order of their arrival.
    reports: Vec<(String, Value)>,
}

const DEMAND: &str = "MoEDemand";
const LEASE: &str = "Lease";

impl Api {
    pub(crate) async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let api = Self { address, state: Arc::default(), events: broadcast::channel(1024).0 };
        let leases = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases";
        let demands = "/apis/remoe.dev/v1alpha1/namespaces/{namespace}/moedemands";
        let routes = Router::new()
            .route("/apis/remoe.dev/v1alpha1/moedemands", get(all_demands))
            .route(demands, get(namespaced_demands))
            .route(&format!("{demands}/{{name}}/status"), patch(report))
            .route(leases, get(namespaced_leases))
            .route(&format!("{leases}/{{name}}"), get(get_lease).patch(put_lease))
            .with_state(api.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        api
    }

    /// Writes the deployment `name` (`NAMESPACE/NAME`) with the served name `served` and the main function at `main`.
    /// It is asleep without one.
    pub(crate) fn deploy(&self, name: &str, served: &str, main: Option<SocketAddr>) {
        let (namespace, own) = name.split_once('/').unwrap();
        let mains: Vec<Value> = main
            .iter()
            .map(|main| json!({"uid": format!("{name}-main"), "pod": "main", "address": main, "room": 8}))
            .collect();
        let spec = json!({
            "servedName": served, "contextLength": 64, "turn": 1, "since": "2026-01-01T00:00:00.000000Z",
            "phase": if main.is_some() { "Active" } else { "Asleep" }, "sleeps": true, "mains": mains,
        });
        self.put(DEMAND, namespace, own, json!({"spec": spec}));
    }

    /// Writes a deployment that `main` serves and whose pod costs `rate` nano-dollars per hour.
    pub(crate) fn deploy_priced(&self, name: &str, main: SocketAddr, rate: u64) {
        let (namespace, own) = name.split_once('/').unwrap();
        let (uid, since) = (format!("{name}-main"), "2026-01-01T00:00:00.000000Z");
        let spec = json!({
            "servedName": own, "contextLength": 64, "turn": 1, "since": since, "phase": "Active", "sleeps": false,
            "mains": [{"uid": uid, "pod": "main", "address": main, "room": 100}],
            "functions": [{"uid": uid, "pod": "main", "tier": "main", "rate": rate, "started": since}],
        });
        self.put(DEMAND, namespace, own, json!({"spec": spec}));
    }

    /// Deletes a deployment.
    pub(crate) fn delete(&self, name: &str) {
        let (namespace, own) = name.split_once('/').unwrap();
        let mut state = self.state.lock().unwrap();
        let deleted = state.all.remove(&(DEMAND, namespace.to_owned(), own.to_owned())).unwrap();
        drop(self.events.send(("DELETED", deleted)));
    }

    /// Returns the largest number of waiting requests that a gateway reported for the deployment `name`. Only such
    /// reports wake it.
    pub(crate) fn max_waiting(&self, name: &str) -> u64 {
        let state = self.state.lock().unwrap();
        let of_deployment = state.reports.iter().filter(|(deployment, _)| deployment == name);
        let entries =
            of_deployment.flat_map(|(_, report)| report["status"]["gateways"].as_array().cloned().unwrap());
        entries.filter_map(|entry| entry["waiting"].as_u64()).max().unwrap_or(0)
    }

    /// Waits until a gateway has reported that a request waits for the deployment `name`.
    pub(crate) async fn wait_for_wake(&self, name: &str) {
        until(SOON, &format!("a report that wakes {name}"), async || {
            (self.max_waiting(name) > 0).then_some(())
        })
        .await;
    }

    fn put(&self, kind: &'static str, namespace: &str, name: &str, object: Value) -> Value {
        let mut state = self.state.lock().unwrap();
        state.version += 1;
        let version = state.version;
        let key = (kind, namespace.to_owned(), name.to_owned());
        let known = state.all.get(&key);
        let (event, uid) = match known {
            Some(known) => ("MODIFIED", known["metadata"]["uid"].clone()),
            None => ("ADDED", json!(format!("{kind}-{version}"))),
        };
        let mut object = object;
        object["apiVersion"] =
            json!(if kind == LEASE { "coordination.k8s.io/v1" } else { "remoe.dev/v1alpha1" });
        object["kind"] = json!(kind);
        for (field, value) in [
            ("namespace", json!(namespace)),
            ("name", json!(name)),
            ("uid", uid),
            ("resourceVersion", json!(version.to_string())),
        ] {
            object["metadata"][field] = value;
        }
        state.all.insert(key, object.clone());
        drop(self.events.send((event, object.clone())));
        object
    }

    fn list_or_watch(&self, kind: &'static str, namespace: Option<&str>, uri: &Uri) -> Response {
        let is_listed = |object: &Value| {
            object["kind"] == kind
                && namespace.is_none_or(|namespace| object["metadata"]["namespace"] == namespace)
        };
        let state = self.state.lock().unwrap();
        if parameter(uri, "watch") != Some("true") {
            let items: Vec<&Value> = state.all.values().filter(|object| is_listed(object)).collect();
            let version = state.version.to_string();
            return Json(json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": version}, "items": items}))
                .into_response();
        }
        // First the objects written since the list, then all later events.
        let since: u64 = parameter(uri, "resourceVersion").unwrap().parse().unwrap();
        let is_newer = |object: &&Value| {
            object["metadata"]["resourceVersion"].as_str().unwrap().parse::<u64>().unwrap() > since
        };
        let newer: Vec<_> =
            state.all.values().filter(|object| is_listed(object)).filter(is_newer).cloned().collect();
        let later = self.events.subscribe();
        drop(state);
        let namespace = namespace.map(str::to_owned);
        let later = stream::unfold(later, |mut later| async move { Some((later.recv().await.ok()?, later)) });
        let later = later.filter(move |(_, object)| {
            let is_watched = object["kind"] == kind
                && namespace.as_ref().is_none_or(|namespace| object["metadata"]["namespace"] == **namespace);
            std::future::ready(is_watched)
        });
        let events = stream::iter(newer.into_iter().map(|object| ("MODIFIED", object))).chain(later);
        let lines = events.map(|(event, object)| {
            Ok::<_, std::io::Error>(format!("{}\n", json!({"type": event, "object": object})))
        });
        Body::from_stream(lines).into_response()
    }
}

fn parameter<'a>(uri: &'a Uri, name: &str) -> Option<&'a str> {
    let mut pairs = uri.query()?.split('&').filter_map(|pair| pair.split_once('='));
    pairs.find_map(|(key, value)| (key == name).then_some(value))
}

async fn all_demands(State(api): State<Api>, uri: Uri) -> Response {
    api.list_or_watch(DEMAND, None, &uri)
}

async fn namespaced_demands(State(api): State<Api>, Path(namespace): Path<String>, uri: Uri) -> Response {
    api.list_or_watch(DEMAND, Some(&namespace), &uri)
}

async fn namespaced_leases(State(api): State<Api>, Path(namespace): Path<String>, uri: Uri) -> Response {
    api.list_or_watch(LEASE, Some(&namespace), &uri)
}

async fn get_lease(
    State(api): State<Api>,
    Path((namespace, name)): Path<(String, String)>,
) -> Result<Json<Value>, (StatusCode, Json<Value>)> {
    let state = api.state.lock().unwrap();
    state.all.get(&(LEASE, namespace, name)).cloned().map(Json).ok_or_else(|| {
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound",
            "message": "", "code": 404});
        (StatusCode::NOT_FOUND, Json(status))
    })
}

async fn put_lease(
    State(api): State<Api>,
    Path((namespace, name)): Path<(String, String)>,
    body: Bytes,
) -> Json<Value> {
    let applied: Value = serde_json::from_slice(&body).unwrap();
    Json(api.put(LEASE, &namespace, &name, applied))
}

async fn report(
    State(api): State<Api>,
    Path((namespace, name)): Path<(String, String)>,
    body: Bytes,
) -> Json<Value> {
    let applied: Value = serde_json::from_slice(&body).unwrap();
    let mut state = api.state.lock().unwrap();
    state.reports.push((format!("{namespace}/{name}"), applied));
    Json(state.all[&(DEMAND, namespace, name)].clone())
}
