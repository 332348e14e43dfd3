//! Hostile main functions that answer with anything, beside an honest one.

use crate::stage::LONG;
use axum::body::Bytes;
use axum::http::{Method, Request, header};
use futures_util::stream::{StreamExt, iter};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use remoe_billing::Rate;
use remoe_gateway_core::{
    Backend, Billing, CostAccounting, Directive, Gateway, GatewayMetrics, GatewayOptions, Keys, Model,
    ModelOptions, PrefixIndex, ScalingPhase, WakeMarks,
};
use remoe_test_support::hostile::{Cases, chart_limit, has_grown_little, panics, resident};
use remoe_test_support::hostile_answers::{COST, honest, hostile};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Number of cases in a usual test run.
const DEFAULT_CASES: usize = 400;
/// Number of concurrent clients.
const CLIENTS: usize = 16;
/// Time after which a client of the hostile function disconnects.
const CLIENT_TIMEOUT: Duration = Duration::from_millis(100);
/// Largest number of attempts per request.
const ATTEMPTS: u64 = 3;
const TIME_SLACK: Duration = Duration::from_millis(100);

/// Makes a model whose main function is at `address` and costs a nano-dollar per nanosecond.
fn model(name: &str, address: SocketAddr, metrics: &GatewayMetrics) -> Arc<Model> {
    let options = ModelOptions {
        name: name.to_owned(),
        short_names: Vec::new(),
        context_length: 64,
        max_requests: 1000,
        waiting_bytes: 1 << 20,
        wake_limit: LONG,
    };
    let mut billing = Billing::default();
    billing.rates.0.insert("main".to_owned(), Rate(3_600_000_000_000));
    billing.functions.insert("main".to_owned(), (name.to_owned(), "main".to_owned()));
    let backend = Backend {
        id: 1,
        address,
        identity: None,
        capacity: 100,
        authorization: None,
        billing: Some(Arc::new(billing)),
    };
    let model = Model::new(options, metrics, &PrefixIndex::default());
    model.follow_directive(
        Directive { phase: ScalingPhase::Active, turn: 1 },
        vec![backend],
        WakeMarks::default(),
    );
    model
}

/// Gateway with the models `bad` and `good`, and the keys `v` and `h` of their users.
pub(super) struct HostileFixture {
    pub(super) gateway: Arc<Gateway>,
    pub(super) metrics: GatewayMetrics,
    address: SocketAddr,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl HostileFixture {
    /// Makes a gateway whose model `bad` is served by the function at `bad`, and whose model `good` by an honest one.
    /// The models end when the array is dropped.
    pub(super) async fn new(bad: SocketAddr) -> (Self, [Arc<Model>; 2]) {
        let metrics = GatewayMetrics::new().unwrap();
        let cost_accounting = Arc::new(CostAccounting::open(None, "p", metrics.registry()).unwrap());
        let keys = Keys::none().with_key("honest", "h").unwrap().with_key("victim", "v").unwrap();
        let options =
            GatewayOptions { cost_accounting: Some(cost_accounting), keys, ..GatewayOptions::default() };
        let gateway = Gateway::new(options, Vec::new(), metrics.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(gateway.clone().serve(listener, CancellationToken::new()));
        let models =
            [("bad", bad), ("good", honest(2).await)].map(|(name, address)| model(name, address, &metrics));
        gateway.replace_models(models.to_vec());
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http();
        (Self { gateway, metrics, address, client }, models)
    }

    /// Sends a request and reads its complete answer. Returns `None` if that takes longer than `max_wait`.
    pub(super) async fn ask(
        &self,
        (method, path): (Method, &str),
        key: &str,
        body: String,
        max_wait: Duration,
    ) -> Option<(u16, String)> {
        let request = Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        let request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        let request = request.body(Full::from(body)).unwrap();
        let answer = async {
            let (head, body) = self.client.request(request).await.ok()?.into_parts();
            let body = body.collect().await.ok()?.to_bytes();
            Some((head.status.as_u16(), String::from_utf8_lossy(&body).into_owned()))
        };
        timeout(max_wait, answer).await.ok()?
    }

    /// Sends a request of case `number` to the model `bad`, or fetches a page with its function's metrics or
    /// placement.
    pub(super) async fn attack(&self, cases: Cases, number: usize) {
        let mut choices = cases.choices(number);
        let path = *choices.one_of(&["/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]);
        let stream = choices.once_in(2);
        let body = format!(r#"{{"model":"bad","stream":{stream},"max_tokens":7,"include_figures":true}}"#);
        let (call, body) = match choices.below(12) {
            0 => ((Method::GET, "/v1/placement?model=bad"), String::new()),
            1 => ((Method::GET, "/metrics"), String::new()),
            _ => ((Method::POST, path), body),
        };
        let _any_outcome = self.ask(call, "v", body, CLIENT_TIMEOUT).await;
    }

    /// Sends a request to the honest model.
    pub(super) async fn ask_honest(&self) -> Option<(u16, String)> {
        self.ask((Method::POST, "/v1/completions"), "h", r#"{"model":"good"}"#.to_owned(), LONG).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn generated_answers_harm_no_honest_neighbour() {
    let cases = Cases::new("answers of main functions", DEFAULT_CASES);
    let panics = panics();
    let (fixture, [bad, good]) = HostileFixture::new(hostile(cases).await.0).await;

    let (before, started) = (resident(), Instant::now());
    iter(0..cases.count())
        .for_each_concurrent(CLIENTS, |number| {
            let fixture = &fixture;
            async move {
                let ((), answer) = tokio::join!(fixture.attack(cases, number), fixture.ask_honest());
                assert_eq!(answer, Some((200, "{}".to_owned())), "beside case {number}");
            }
        })
        .await;
    let idle = async {
        while (bad.load(), good.load()) != ((0, 0), (0, 0)) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, idle).await.expect("a request never ends");
    assert_eq!(panics.load(Ordering::SeqCst), 0);
    // The process contains the gateway, the functions and the clients.
    has_grown_little(before, chart_limit("gateway"));

    let HostileFixture { gateway, metrics, .. } = fixture;
    let cost_of_tenant = |tenant: &str| cost_of_tenant(&metrics, tenant);
    assert_eq!(cost_of_tenant("honest"), cases.count() as u64 * COST);
    // No false report costs more than the price for the time that the function had the request.
    let max_cost = CLIENTS as u64 * started.elapsed().as_nanos() as u64 / 999 * 1000
        + cases.count() as u64 * ATTEMPTS * TIME_SLACK.as_nanos() as u64;
    assert!(
        cost_of_tenant("victim") <= max_cost,
        "{} nano-dollars, {max_cost} at most",
        cost_of_tenant("victim")
    );
    // Both models are removed, and all their series with them.
    drop((bad, good));
    let removal = async {
        // The last requests end with their connections.
        while !families_with_models(&metrics).is_empty() {
            gateway.replace_models(Vec::new());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let removed = timeout(10 * LONG, removal).await;
    removed
        .unwrap_or_else(|_| panic!("series of removed models remain: {:?}", families_with_models(&metrics)));
}

/// A server future may be polled for the first time after the models of its gateway were replaced.
#[tokio::test]
async fn serve_keeps_no_model_that_came_after_its_call() {
    let metrics = GatewayMetrics::new().unwrap();
    let gateway = Gateway::new(GatewayOptions::default(), Vec::new(), metrics.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stop = CancellationToken::new();
    let serving = gateway.clone().serve(listener, stop.clone());
    let model = model("later", SocketAddr::from(([127, 0, 0, 1], 1)), &metrics);
    gateway.replace_models(vec![model.clone()]);
    let serving = tokio::spawn(serving);
    // The runtime has one thread, so the server runs now.
    tokio::task::yield_now().await;
    gateway.replace_models(Vec::new());
    assert_eq!(Arc::strong_count(&model), 1);
    stop.cancel();
    serving.await.unwrap().unwrap();
}

/// Returns the cost of `tenant`'s requests in nano-dollars.
fn cost_of_tenant(metrics: &GatewayMetrics, tenant: &str) -> u64 {
    let families = metrics.registry().gather();
    let family = families.iter().find(|family| family.name() == "remoe_cost_nanodollars_total");
    let all = family.map(|family| family.get_metric()).unwrap_or_default().iter();
    let of_tenant = all.filter(|metric| metric.get_label().iter().any(|label| label.value() == tenant));
    of_tenant.map(|metric| metric.get_counter().get_value() as u64).sum()
}

/// Returns the names of metric families with series of models.
fn families_with_models(metrics: &GatewayMetrics) -> Vec<String> {
    let families = metrics.registry().gather();
    let has_model =
        |metric: &prometheus::proto::Metric| metric.get_label().iter().any(|label| label.name() == "model");
    let families = families.iter().filter(|family| family.get_metric().iter().any(has_model));
    families.map(|family| family.name().to_owned()).collect()
}

/// Created and deleted deployments leave no series and no memory.
#[tokio::test]
async fn series_of_created_and_deleted_models_are_removed() {
    let cases = Cases::new("models that come and go", DEFAULT_CASES);
    let metrics = GatewayMetrics::new().unwrap();
    let cost_accounting = Arc::new(CostAccounting::open(None, "p", metrics.registry()).unwrap());
    let options =
        GatewayOptions { cost_accounting: Some(cost_accounting.clone()), ..GatewayOptions::default() };
    let gateway = Gateway::new(options, Vec::new(), metrics.clone());
    let before = resident();
    for number in 0..cases.count() {
        let mut choices = cases.choices(number);
        // Some have the name of an earlier one.
        let name = format!("tenant/{}", choices.below(cases.count()));
        let model = model(&name, SocketAddr::from(([127, 0, 0, 1], 1)), &metrics);
        cost_accounting.set_current_cost(&name, "main", choices.whole() >> 1, choices.whole() >> 1);
        if !choices.once_in(4) {
            gateway.replace_models(vec![model]);
        }
    }
    gateway.replace_models(Vec::new());
    gateway.replace_models(Vec::new());
    assert_eq!(families_with_models(&metrics), Vec::<String>::new());
    has_grown_little(before, chart_limit("gateway"));
}
