//! Fuzz tests: random headers of gateways, and of clients that pretend to be one.

use super::{TestServer, figures, text_events};
use crate::engine::request::{Event, FinishReason};
use axum::body::Body;
use axum::http::{HeaderValue, Request};
use remoe_test_support::hostile::{Cases, SeededChoices};

/// Cases of the default run.
const DEFAULT_CASES: usize = 600;
/// Most bytes of trailers: clients fail on more than 16 KiB.
const MAX_TRAILER_BYTES: usize = 16 << 10;

const HEADERS: [&str; 8] = [
    "x-remoe-tenant",
    "x-remoe-timing",
    "x-remoe-rates",
    "x-remoe-cost-placeholder",
    "x-remoe-activations",
    "x-remoe-resolved",
    "x-request-id",
    "traceparent",
];

fn value(dice: &mut SeededChoices, name: &str) -> Vec<u8> {
    match name {
        "x-remoe-rates" if !dice.once_in(3) => {
            let rates: Vec<_> =
                (0..*dice.one_of(&[1, 3, 2000])).map(|place| format!("a{place}={}", dice.number())).collect();
            format!("main={},{}", dice.number(), rates.join(",")).into_bytes()
        }
        "x-remoe-timing" if !dice.once_in(3) => {
            let part = dice.one_of(&["decide", "schedule", "start", "load", "ready", "first"]);
            format!("{part};dur={}, load;dur={}", dice.number(), dice.number()).into_bytes()
        }
        _ => dice.header_value(),
    }
}

#[tokio::test]
async fn random_gateway_headers_cause_no_failure() {
    let cases = Cases::new("headers of gateways", DEFAULT_CASES);
    let server = TestServer::with(|options| {
        options.api_key = Some("client".into());
        options.gateway_key = Some("gateway".into());
    });
    let serve = server.engine.serve(|request| {
        let mut events = text_events(0, "x", FinishReason::Stop);
        events.push(Event::Done(figures(request)));
        events
    });
    let ask = async {
        for number in 0..cases.count() {
            let mut dice = cases.choices(number);
            let path = *dice.one_of(&["/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]);
            let key = *dice.one_of(&["Bearer client", "Bearer gateway"]);
            let mut request = Request::post(path).header("authorization", key);
            for _ in 0..=dice.below(5) {
                let name = *dice.one_of(&HEADERS);
                if let Ok(value) = HeaderValue::from_bytes(&value(&mut dice, name)) {
                    request = request.header(name, value);
                }
            }
            let body = match dice.below(3) {
                0 => dice.json(6),
                1 => format!(
                    r#"{{"prompt":"a","input":"a","messages":[],"max_tokens":{},"n":{}}}"#,
                    dice.number(),
                    dice.number()
                ),
                _ => {
                    let stream = dice.one_of(&["true", "false"]);
                    format!(r#"{{"prompt":"a","max_tokens":1,"include_figures":true,"stream":{stream}}}"#)
                }
            };
            let reply = server.send(request.body(Body::from(body)).unwrap()).await;
            let told: usize =
                reply.headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
            assert!(reply.status.as_u16() < 500 && told <= MAX_TRAILER_BYTES, "case {number}: {reply:?}");
        }
    };
    tokio::select! {
        () = ask => {}
        () = serve => unreachable!("the engine serves for ever"),
    }
}
