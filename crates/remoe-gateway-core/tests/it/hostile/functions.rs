//! Main functions that answer with anything, beside one that is honest.

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

/// Cases in every change.
const FEW: usize = 400;
/// Clients at the same time.
const CLIENTS: usize = 16;
/// A client of the hostile function leaves after this long.
const PATIENCE: Duration = Duration::from_millis(100);
/// Times that the gateway sends a request, and how much longer than that it believes it was worked on.
const ATTEMPTS: u64 = 3;
const SLACK: Duration = Duration::from_millis(100);

/// A model that the function at `address` answers for, at a nano-dollar a nanosecond.
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
    model.follow(Directive { phase: ScalingPhase::Active, turn: 1 }, vec![backend], WakeMarks::default());
    model
}

/// A gateway with the models `bad` and `good`, and the keys `v` and `h` of those who use them.
pub(super) struct HostileFixture {
    pub(super) gateway: Arc<Gateway>,
    pub(super) metrics: GatewayMetrics,
    address: SocketAddr,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl HostileFixture {
    /// The function at `bad` answers for the model of that name, an honest one for the other. The models end with the array.
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

    /// Sends a request, and reads all of its answer; none where there is none in time.
    pub(super) async fn ask(
        &self,
        (method, path): (Method, &str),
        key: &str,
        body: String,
        most: Duration,
    ) -> Option<(u16, String)> {
        let request = Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        let request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        let request = request.body(Full::from(body)).unwrap();
        let answer = async {
            let (head, body) = self.client.request(request).await.ok()?.into_parts();
            let body = body.collect().await.ok()?.to_bytes();
            Some((head.status.as_u16(), String::from_utf8_lossy(&body).into_owned()))
        };
        timeout(most, answer).await.ok()?
    }

    /// Has the model `bad` answer case `number`, or show what its function says.
    pub(super) async fn attack(&self, cases: Cases, number: usize) {
        let mut dice = cases.choices(number);
        let path = *dice.one_of(&["/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]);
        let stream = dice.once_in(2);
        let body = format!(r#"{{"model":"bad","stream":{stream},"max_tokens":7,"include_figures":true}}"#);
        let (call, body) = match dice.below(12) {
            0 => ((Method::GET, "/v1/placement?model=bad"), String::new()),
            1 => ((Method::GET, "/metrics"), String::new()),
            _ => ((Method::POST, path), body),
        };
        let _whatever = self.ask(call, "v", body, PATIENCE).await;
    }

    /// Asks the honest model.
    pub(super) async fn ask_honest(&self) -> Option<(u16, String)> {
        self.ask((Method::POST, "/v1/completions"), "h", r#"{"model":"good"}"#.to_owned(), LONG).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn generated_answers_harm_no_honest_neighbour() {
    let cases = Cases::new("answers of main functions", FEW);
    let panics = panics();
    let (fixture, [bad, good]) = HostileFixture::new(hostile(cases).await.0).await;

    let (before, begun) = (resident(), Instant::now());
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
    timeout(LONG, idle).await.expect("a request is never over");
    assert_eq!(panics.load(Ordering::SeqCst), 0);
    // All parties are in this process.
    has_grown_little(before, chart_limit("gateway"));

    let HostileFixture { gateway, metrics, .. } = fixture;
    let booked = |tenant: &str| booked(&metrics, tenant);
    assert_eq!(booked("honest"), cases.count() as u64 * COST);
    // No lie costs more than the price for the time that the function had the request.
    let most = CLIENTS as u64 * begun.elapsed().as_nanos() as u64 / 999 * 1000
        + cases.count() as u64 * ATTEMPTS * SLACK.as_nanos() as u64;
    assert!(booked("victim") <= most, "{} nano-dollars, {most} at most", booked("victim"));
    // Both models go, and all that was said of them.
    drop((bad, good));
    let gone = async {
        // The last requests end with their connections.
        while !of_models(&metrics).is_empty() {
            gateway.replace_models(Vec::new());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let over = timeout(10 * LONG, gone).await;
    over.unwrap_or_else(|_| panic!("series of models that are gone stay: {:?}", of_models(&metrics)));
}

/// A server may be polled for the first time after the models of its gateway were replaced.
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
    // On this runtime of one thread the server runs meanwhile.
    tokio::task::yield_now().await;
    gateway.replace_models(Vec::new());
    assert_eq!(Arc::strong_count(&model), 1);
    stop.cancel();
    serving.await.unwrap().unwrap();
}

/// Nano-dollars that `tenant` has to pay.
fn booked(metrics: &GatewayMetrics, tenant: &str) -> u64 {
    let families = metrics.registry().gather();
    let family = families.iter().find(|family| family.name() == "remoe_cost_nanodollars_total");
    let all = family.map(|family| family.get_metric()).unwrap_or_default().iter();
    let its = all.filter(|metric| metric.get_label().iter().any(|label| label.value() == tenant));
    its.map(|metric| metric.get_counter().get_value() as u64).sum()
}

/// Families that have series of models.
fn of_models(metrics: &GatewayMetrics) -> Vec<String> {
    let families = metrics.registry().gather();
    let has_model =
        |metric: &prometheus::proto::Metric| metric.get_label().iter().any(|label| label.name() == "model");
    let families = families.iter().filter(|family| family.get_metric().iter().any(has_model));
    families.map(|family| family.name().to_owned()).collect()
}

/// Deployments that come and go leave nothing behind.
#[tokio::test]
async fn series_of_created_and_deleted_models_are_removed() {
    let cases = Cases::new("models that come and go", FEW);
    let metrics = GatewayMetrics::new().unwrap();
    let cost_accounting = Arc::new(CostAccounting::open(None, "p", metrics.registry()).unwrap());
    let options =
        GatewayOptions { cost_accounting: Some(cost_accounting.clone()), ..GatewayOptions::default() };
    let gateway = Gateway::new(options, Vec::new(), metrics.clone());
    let before = resident();
    for number in 0..cases.count() {
        let mut dice = cases.choices(number);
        // Some come back under the name of one before.
        let name = format!("tenant/{}", dice.below(cases.count()));
        let model = model(&name, SocketAddr::from(([127, 0, 0, 1], 1)), &metrics);
        cost_accounting.costs_now(&name, "main", dice.whole() >> 1, dice.whole() >> 1);
        if !dice.once_in(4) {
            gateway.replace_models(vec![model]);
        }
    }
    gateway.replace_models(Vec::new());
    gateway.replace_models(Vec::new());
    assert_eq!(of_models(&metrics), Vec::<String>::new());
    has_grown_little(before, chart_limit("gateway"));
}
