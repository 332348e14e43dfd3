//! Load clients: they send requests until stopped, while processes may be killed, and record the cost of each
//! complete response.

use crate::deadline::LONG;
use crate::raw::{self, Connection, RawResponse};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Pause of a client after a failure, while the process restarts.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// Timeout of a connection: the address of a deleted pod does not refuse it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns a request for `tokens` tokens that asks for its cost in the usage and in a header, or in a trailer of a
/// stream.
#[must_use]
pub fn request(model: &str, tokens: u32, stream: bool) -> String {
    let body = json!({"model": model, "prompt": [1, 2, 3, 4, 5], "max_tokens": tokens, "temperature": 0,
        "ignore_eos": true, "include_figures": true, "stream": stream});
    let request = raw::post("/v1/completions", &body.to_string());
    request.replacen("\r\n", "\r\nx-remoe-cost: yes\r\nTE: trailers\r\n", 1)
}

/// Returns the reported cost of a response, in nano-dollars. Returns `None` for another status than 200 or an
/// incomplete response.
#[must_use]
pub fn told(answer: &RawResponse, stream: bool) -> Option<u64> {
    if answer.head.status != 200 {
        return None;
    }
    let (headers, usage) = if stream {
        let text = answer.text();
        let events = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
        let events: Vec<&str> = events.collect();
        if events.last() != Some(&"[DONE]") {
            return None;
        }
        let usage = events.iter().rev().nth(1).map(|event| serde_json::from_str::<Value>(event).unwrap());
        (&answer.trailers, usage.unwrap())
    } else {
        (&answer.head.headers, answer.ok())
    };
    let total =
        headers.iter().find(|(name, _)| name == "x-remoe-cost").map(|(_, total)| total.parse().unwrap());
    let (total, usage): (u64, _) = (total.unwrap(), &usage["usage"]["remoe"]["cost"]);
    let cost_of = |name: &str| amount(&usage[name]);
    assert_eq!(cost_of("main") + cost_of("remote"), cost_of("total"), "{usage}");
    assert_eq!(cost_of("prefill") + cost_of("decode"), cost_of("total"), "{usage}");
    assert_eq!(cost_of("total"), total, "{usage}");
    Some(total)
}

/// Returns a JSON value as an amount of nano-dollars or a count.
#[must_use]
pub fn amount(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no amount"))
}

/// Parses `lines` of `remoe cost --export json` into costs by request id.
#[must_use]
pub fn exported(lines: &str) -> BTreeMap<String, u64> {
    let mut requests = BTreeMap::new();
    for line in lines.lines() {
        let request: Value = serde_json::from_str(line).unwrap();
        let shares = request["shares"].as_object().unwrap().values();
        let cost =
            shares.map(|share| amount(&share["cost"]["prefill"]) + amount(&share["cost"]["decode"])).sum();
        let id = request["id"].as_str().unwrap().to_owned();
        assert!(requests.insert(id, cost).is_none(), "one request is there twice: {line}");
    }
    requests
}

/// Running load clients.
pub struct LoadClients {
    shared: Arc<SharedClientState>,
    clients: Vec<JoinHandle<()>>,
}

/// Requests of all clients with their costs, by request id.
#[derive(Debug, Default)]
pub struct SeenRequests {
    /// Ids of all sent requests.
    pub asked: BTreeSet<String>,
    /// Reported costs of requests with a complete response, in nano-dollars.
    pub told: BTreeMap<String, u64>,
}

struct SharedClientState {
    /// Present addresses of gateways.
    gateways: watch::Receiver<Vec<SocketAddr>>,
    model: String,
    running: AtomicUsize,
    is_stopping: AtomicBool,
    seen: Mutex<SeenRequests>,
}

impl LoadClients {
    /// Starts `count` clients of `model`. Each rotates through the gateways and alternates between complete responses
    /// and streams.
    #[must_use]
    pub fn start(count: usize, gateways: watch::Receiver<Vec<SocketAddr>>, model: &str) -> Self {
        let shared = Arc::new(SharedClientState {
            gateways,
            model: model.to_owned(),
            running: AtomicUsize::new(0),
            is_stopping: AtomicBool::new(false),
            seen: Mutex::default(),
        });
        let clients = (0..count).map(|number| tokio::spawn(shared.clone().run_client(number))).collect();
        Self { shared, clients }
    }

    /// Returns the number of complete responses so far.
    ///
    /// # Panics
    /// A client ended because of a wrong or missing response.
    #[must_use]
    pub fn answers(&self) -> usize {
        assert!(!self.clients.iter().any(JoinHandle::is_finished), "a client has ended, as it says above");
        self.shared.seen.lock().unwrap().told.len()
    }

    /// Returns the number of open requests.
    #[must_use]
    pub fn running(&self) -> usize {
        self.shared.running.load(Ordering::SeqCst)
    }

    /// Returns the number of requests that ended without a complete response.
    #[must_use]
    pub fn broken(&self) -> usize {
        let seen = self.shared.seen.lock().unwrap();
        seen.asked.len().saturating_sub(seen.told.len() + self.running())
    }

    /// Stops all clients after their present requests.
    pub async fn stop(self) -> SeenRequests {
        self.shared.is_stopping.store(true, Ordering::SeqCst);
        for client in self.clients {
            client.await.unwrap();
        }
        std::mem::take(&mut *self.shared.seen.lock().unwrap())
    }
}

impl SharedClientState {
    async fn run_client(self: Arc<Self>, number: usize) {
        let mut last_response = Instant::now();
        for turn in 0.. {
            if self.is_stopping.load(Ordering::SeqCst) {
                return;
            }
            assert!(last_response.elapsed() < LONG, "client {number} gets no answers");
            let gateway = {
                let gateways = self.gateways.borrow();
                gateways[(number + turn) % gateways.len()]
            };
            let Ok(Ok(connection)) = timeout(CONNECT_TIMEOUT, Connection::reach(gateway)).await else {
                tokio::time::sleep(RETRY_PAUSE).await;
                continue;
            };
            let id = format!("{number}-{turn}");
            self.seen.lock().unwrap().asked.insert(id.clone());
            self.running.fetch_add(1, Ordering::SeqCst);
            // Both forms at each of two gateways.
            let cost = self.send(connection, &id, turn as u32, turn / 2 % 2 == 1).await;
            self.running.fetch_sub(1, Ordering::SeqCst);
            match cost {
                Some(cost) => {
                    self.seen.lock().unwrap().told.insert(id, cost);
                    last_response = Instant::now();
                }
                None => tokio::time::sleep(RETRY_PAUSE).await,
            }
        }
    }

    /// Sends one request and returns its cost. Returns `None` if the response is incomplete.
    async fn send(&self, mut connection: Connection, id: &str, turn: u32, stream: bool) -> Option<u64> {
        let request = request(&self.model, 1 + turn % 6, stream);
        let request = request.replacen("\r\n", &format!("\r\nX-Request-Id: {id}\r\n"), 1);
        connection.write(request).await.ok()?;
        let answer = connection.answer().await.ok()?;
        told(&answer, stream)
    }
}

impl SeenRequests {
    /// Asserts that a ledger with the requests `exported` and the total `cost` has every complete response once, at
    /// its reported cost, and only requests that clients sent. Returns the number of its requests without a complete
    /// response, which may or may not be in the ledger.
    pub fn are_in(&self, exported: &BTreeMap<String, u64>, cost: &Value) -> usize {
        for (id, told) in &self.told {
            assert_eq!(exported.get(id), Some(told), "{id}: {cost}");
        }
        let others = exported.keys().filter(|id| !self.told.contains_key(*id));
        assert!(others.clone().all(|id| self.asked.contains(id)), "{cost}");
        assert_eq!(amount(&cost["requests"]), exported.len() as u64, "{cost}");
        assert_eq!(amount(&cost["total"]), exported.values().sum::<u64>(), "{cost}");
        assert_eq!([&cost["unknown"], &cost["earlier"]].map(amount), [0; 2], "{cost}");
        others.count()
    }
}
