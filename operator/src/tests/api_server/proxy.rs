//! Proxy in front of the API server that records requests and injects faults.

use crate::tests::api_server::config;
use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, TryStreamExt, stream};
use http::{Method, StatusCode, header};
use kube::{Client, Config};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// Maximum bytes of a request; an operator's are smaller.
const LARGEST_REQUEST: usize = 4 << 20;
/// Time after which watches break off while faults are injected.
const WATCH: Duration = Duration::from_millis(700);
/// One in this many requests meets a fault.
const EVERY: u64 = 5;

/// Permission that a request needs, in the terms of roles.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequiredPermission {
    pub group: String,
    /// Resource with its subresource, such as `pods/log`.
    pub resource: String,
    pub verb: String,
}

/// Fault of the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// 409: another writer was first, or the name is taken.
    Conflict,
    /// 429 with Retry-After.
    TooMany,
    /// 500.
    Internal,
    /// 504, although the write was made.
    AnswerLost,
    /// A watch that breaks off.
    WatchDropped,
    /// Stale list.
    ListStale,
}

pub const FAULTS: [Fault; 6] = [
    Fault::Conflict,
    Fault::TooMany,
    Fault::Internal,
    Fault::AnswerLost,
    Fault::WatchDropped,
    Fault::ListStale,
];

impl Fault {
    fn can_meet(self, verb: &str) -> bool {
        let writes = !matches!(verb, "get" | "list" | "watch");
        match self {
            Self::Conflict | Self::AnswerLost => writes,
            Self::TooMany | Self::Internal => verb != "watch",
            Self::WatchDropped => verb == "watch",
            Self::ListStale => verb == "list",
        }
    }
}

#[derive(Default)]
struct Day {
    /// Remaining faults.
    left: u64,
    requests: u64,
    met: BTreeMap<Fault, u64>,
}

impl Day {
    /// Returns the fault that this request meets.
    fn meet(&mut self, verb: &str) -> Option<Fault> {
        if self.left == 0 {
            return None;
        }
        self.requests += 1;
        let fault = if verb == "watch" {
            Fault::WatchDropped
        } else if self.requests.is_multiple_of(EVERY) {
            // The least used one, so that the few writes among many lists meet their faults.
            let possible = FAULTS.into_iter().filter(|fault| fault.can_meet(verb));
            let fault = possible.min_by_key(|fault| self.met.get(fault).copied().unwrap_or(0))?;
            self.left -= 1;
            fault
        } else {
            return None;
        };
        *self.met.entry(fault).or_default() += 1;
        Some(fault)
    }
}

struct RecordingProxy {
    client: Client,
    asked: Mutex<BTreeSet<RequiredPermission>>,
    day: Mutex<Day>,
    /// First answer to each list, for stale answers.
    lists: Mutex<HashMap<String, Bytes>>,
}

/// Running proxy; dropping it stops it.
pub struct Proxy {
    address: SocketAddr,
    between: Arc<RecordingProxy>,
    serving: JoinHandle<()>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Proxy {
    /// Starts a proxy in front of the tests' API server, without faults.
    pub async fn start() -> Self {
        let mut config = config().await;
        // Answers are forwarded unchanged.
        config.default_retry = false;
        let between = Arc::new(RecordingProxy {
            client: Client::try_from(config).unwrap(),
            asked: Mutex::default(),
            day: Mutex::default(),
            lists: Mutex::default(),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().fallback(pass).with_state(between.clone());
        let serving = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, between, serving }
    }

    /// Returns a client that uses the proxy.
    pub fn config(&self) -> Config {
        Config::new(format!("http://{}", self.address).parse().unwrap())
    }

    /// Starts to inject `faults`, and to break watches until these are used up.
    pub fn corrupt(&self, faults: u64) {
        self.between.lists.lock().unwrap().clear();
        self.between.day.lock().unwrap().left = faults;
    }

    /// Returns the number of requests that met each fault.
    pub fn met(&self) -> BTreeMap<Fault, u64> {
        self.between.day.lock().unwrap().met.clone()
    }

    /// Returns the permissions that requests needed.
    pub fn asked(&self) -> BTreeSet<RequiredPermission> {
        self.between.asked.lock().unwrap().clone()
    }
}

async fn pass(State(between): State<Arc<RecordingProxy>>, request: Request) -> Response {
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let asked = asked(&method, uri.path(), uri.query().unwrap_or_default());
    let fault = asked.as_ref().and_then(|asked| between.day.lock().unwrap().meet(&asked.verb));
    between.asked.lock().unwrap().extend(asked.clone());
    match fault {
        Some(Fault::Conflict) => return status(StatusCode::CONFLICT, "AlreadyExists"),
        Some(Fault::TooMany) => {
            let answer = status(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests");
            return ([(header::RETRY_AFTER, "1")], answer).into_response();
        }
        Some(Fault::Internal) => return status(StatusCode::INTERNAL_SERVER_ERROR, "InternalError"),
        _ => {}
    }
    let (mut parts, body) = request.into_parts();
    parts.headers.remove(header::HOST);
    parts.headers.remove(header::CONTENT_LENGTH);
    let body = to_bytes(body, LARGEST_REQUEST).await.unwrap();
    let sent = between.client.send(http::Request::from_parts(parts, body.into())).await;
    let Ok(answer) = sent else { return status(StatusCode::BAD_GATEWAY, "NoAnswer") };
    let (mut parts, body) = answer.into_parts();
    // The forwarded body may differ, so its length is set again.
    parts.headers.remove(header::CONTENT_LENGTH);
    parts.headers.remove(header::TRANSFER_ENCODING);
    let verb = asked.as_ref().map_or("", |asked| asked.verb.as_str());
    // Applying a missing object creates it, so the API server checks both permissions.
    if let (Some(asked), "patch", StatusCode::CREATED) = (&asked, verb, parts.status) {
        between
            .asked
            .lock()
            .unwrap()
            .insert(RequiredPermission { verb: "create".to_owned(), ..asked.clone() });
    }
    if fault == Some(Fault::AnswerLost) {
        return status(StatusCode::GATEWAY_TIMEOUT, "Timeout");
    }
    if fault == Some(Fault::WatchDropped) {
        let events = Body::new(body).into_data_stream().map_err(io::Error::other);
        let broken = stream::once(async { Err(io::Error::other("the way was cut")) });
        let events = events.take_until(sleep(WATCH)).chain(broken);
        return Response::from_parts(parts, Body::from_stream(events));
    }
    if verb != "list" || !parts.status.is_success() {
        return Response::from_parts(parts, Body::new(body));
    }
    let Ok(list) = to_bytes(Body::new(body), usize::MAX).await else {
        return status(StatusCode::BAD_GATEWAY, "NoAnswer");
    };
    let before = between.lists.lock().unwrap().entry(uri.to_string()).or_insert(list.clone()).clone();
    let list = if fault == Some(Fault::ListStale) { before } else { list };
    Response::from_parts(parts, Body::from(list))
}

/// Returns the permission that a request needs; absent if it concerns no object.
fn asked(method: &Method, path: &str, query: &str) -> Option<RequiredPermission> {
    let mut parts = path.trim_matches('/').split('/');
    let group = match parts.next()? {
        "api" => String::new(),
        "apis" => parts.next()?.to_owned(),
        _ => return None,
    };
    let _version = parts.next()?;
    let mut rest: Vec<&str> = parts.collect();
    if rest.first() == Some(&"namespaces") && rest.len() > 2 {
        rest.drain(..2);
    }
    let (kind, name) = (rest.first()?, rest.get(1));
    let resource = rest.get(2).map_or_else(|| (*kind).to_owned(), |part| format!("{kind}/{part}"));
    let watches = query.split('&').any(|pair| matches!(pair, "watch=true" | "watch=1"));
    let verb = match method.as_str() {
        "GET" if watches => "watch",
        "GET" if name.is_some() => "get",
        "GET" => "list",
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" if name.is_some() => "delete",
        _ => "deletecollection",
    };
    Some(RequiredPermission { group, resource, verb: verb.to_owned() })
}

fn status(code: StatusCode, reason: &str) -> Response {
    let said = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code.as_u16(),
        "message": format!("{reason}: a test does so"),
    });
    (code, [(header::CONTENT_TYPE, "application/json")], said.to_string()).into_response()
}

#[test]
fn requests_are_what_roles_say() {
    let of = |method: Method, path: &str, query: &str| {
        let asked = asked(&method, path, query).unwrap();
        format!("{} {} {}", asked.verb, asked.group, asked.resource)
    };
    assert_eq!(of(Method::GET, "/api/v1/namespaces/a/pods", "labelSelector=x"), "list  pods");
    assert_eq!(of(Method::GET, "/api/v1/pods", "x=y&watch=true"), "watch  pods");
    assert_eq!(of(Method::GET, "/api/v1/namespaces/a/pods/b/log", ""), "get  pods/log");
    let path = "/apis/remoe.dev/v1alpha1/namespaces/a/moedeployments/b/status";
    assert_eq!(of(Method::PATCH, path, "force=true"), "patch remoe.dev moedeployments/status");
    assert_eq!(of(Method::DELETE, "/api/v1/namespaces/a/pods/b", ""), "delete  pods");
}
