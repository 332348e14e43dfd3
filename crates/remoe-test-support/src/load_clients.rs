//! Clients that send requests until they are told to stop, whichever processes are killed meanwhile, and note the cost
//! of each complete answer.

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

/// Pause of a client after a connection or an answer failed: the process behind it is starting again.
const AGAIN: Duration = Duration::from_millis(20);
/// Timeout of a connection: the address of a pod that is gone does not refuse it.
const REACH: Duration = Duration::from_secs(2);

/// A request for an answer of `tokens`, by a client that wants to see what it costs in its usage and in a header, or
/// behind a stream.
#[must_use]
pub fn request(model: &str, tokens: u32, stream: bool) -> String {
    let body = json!({"model": model, "prompt": [1, 2, 3, 4, 5], "max_tokens": tokens, "temperature": 0,
        "ignore_eos": true, "include_figures": true, "stream": stream});
    let request = raw::post("/v1/completions", &body.to_string());
    request.replacen("\r\n", "\r\nx-remoe-cost: yes\r\nTE: trailers\r\n", 1)
}

/// Returns the cost that a client was told, in nano-dollars; none if the answer has another status than 200 or did not
/// come to its end.
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
    let part = |name: &str| amount(&usage[name]);
    assert_eq!(part("main") + part("remote"), part("total"), "{usage}");
    assert_eq!(part("prefill") + part("decode"), part("total"), "{usage}");
    assert_eq!(part("total"), total, "{usage}");
    Some(total)
}

/// An amount of nano-dollars, or a count.
#[must_use]
pub fn amount(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no amount"))
}

/// All requests in `lines`, which `remoe cost --export json` prints, by their ids, with what they cost.
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

/// The clients.
pub struct LoadClients {
    shared: Arc<CrowdShared>,
    clients: Vec<JoinHandle<()>>,
}

/// Requests and costs that clients have seen, by the ids of requests.
#[derive(Debug, Default)]
pub struct SeenRequests {
    /// All requests.
    pub asked: BTreeSet<String>,
    /// Costs of the requests that were answered completely.
    pub told: BTreeMap<String, u64>,
}

struct CrowdShared {
    /// Where gateways are now.
    gateways: watch::Receiver<Vec<SocketAddr>>,
    model: String,
    running: AtomicUsize,
    enough: AtomicBool,
    seen: Mutex<SeenRequests>,
}

impl LoadClients {
    /// `count` clients of `model`, each of which goes from one of the gateways to the next, and asks in turn for a
    /// whole answer and for a stream.
    #[must_use]
    pub fn start(count: usize, gateways: watch::Receiver<Vec<SocketAddr>>, model: &str) -> Self {
        let shared = Arc::new(CrowdShared {
            gateways,
            model: model.to_owned(),
            running: AtomicUsize::new(0),
            enough: AtomicBool::new(false),
            seen: Mutex::default(),
        });
        let clients = (0..count).map(|number| tokio::spawn(shared.clone().ask(number))).collect();
        Self { shared, clients }
    }

    /// How many answers came whole so far.
    ///
    /// # Panics
    /// A client has ended, which none does by itself: it was told something wrong, or got no answers for long.
    #[must_use]
    pub fn answers(&self) -> usize {
        assert!(!self.clients.iter().any(JoinHandle::is_finished), "a client has ended, as it says above");
        self.shared.seen.lock().unwrap().told.len()
    }

    /// How many requests have been sent and not been answered.
    #[must_use]
    pub fn running(&self) -> usize {
        self.shared.running.load(Ordering::SeqCst)
    }

    /// How many requests ended without a whole answer so far.
    #[must_use]
    pub fn broken(&self) -> usize {
        let seen = self.shared.seen.lock().unwrap();
        seen.asked.len().saturating_sub(seen.told.len() + self.running())
    }

    /// Lets all clients end what they have begun.
    pub async fn stop(self) -> SeenRequests {
        self.shared.enough.store(true, Ordering::SeqCst);
        for client in self.clients {
            client.await.unwrap();
        }
        std::mem::take(&mut *self.shared.seen.lock().unwrap())
    }
}

impl CrowdShared {
    async fn ask(self: Arc<Self>, number: usize) {
        let mut answered = Instant::now();
        for turn in 0.. {
            if self.enough.load(Ordering::SeqCst) {
                return;
            }
            assert!(answered.elapsed() < LONG, "client {number} gets no answers");
            let gateway = {
                let gateways = self.gateways.borrow();
                gateways[(number + turn) % gateways.len()]
            };
            let Ok(Ok(connection)) = timeout(REACH, Connection::reach(gateway)).await else {
                tokio::time::sleep(AGAIN).await;
                continue;
            };
            let id = format!("{number}-{turn}");
            self.seen.lock().unwrap().asked.insert(id.clone());
            self.running.fetch_add(1, Ordering::SeqCst);
            // Streams and whole answers at each of two gateways.
            let cost = self.answer(connection, &id, turn as u32, turn / 2 % 2 == 1).await;
            self.running.fetch_sub(1, Ordering::SeqCst);
            match cost {
                Some(cost) => {
                    self.seen.lock().unwrap().told.insert(id, cost);
                    answered = Instant::now();
                }
                None => tokio::time::sleep(AGAIN).await,
            }
        }
    }

    /// Sends one request and returns its cost; none if the answer did not come to its end.
    async fn answer(&self, mut connection: Connection, id: &str, turn: u32, stream: bool) -> Option<u64> {
        let request = request(&self.model, 1 + turn % 6, stream);
        let request = request.replacen("\r\n", &format!("\r\nX-Request-Id: {id}\r\n"), 1);
        connection.write(request).await.ok()?;
        let answer = connection.answer().await.ok()?;
        told(&answer, stream)
    }
}

impl SeenRequests {
    /// Asserts that a ledger with the requests `exported`, which adds up to `cost`, has every complete answer at the
    /// cost that its client was told, none twice, and no request that no client sent. Returns how many of its requests
    /// had no complete answer: they may be in the ledger, or not.
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
