//! What clients are told that their requests cost, and what the ledger says.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use remoe_tests::binaries;
use remoe_tests::command::remoe;
use remoe_tests::deadline::{LONG, SOON, until, within};
use remoe_tests::fixture::Model;
use remoe_tests::process::signal;
use remoe_tests::raw::{self, Answer, Connection};
use remoe_tests::up::{Up, all_gone};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;

fn body(model: &str, tokens: u32, stream: bool) -> String {
    json!({"model": model, "prompt": [1, 2, 3, 4, 5], "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
        "include_figures": true, "stream": stream})
    .to_string()
}

fn post(model: &str, tokens: u32, stream: bool) -> String {
    // The client wants to see what it costs in a header as well, or behind a stream.
    let request = raw::post("/v1/completions", &body(model, tokens, stream));
    request.replacen("\r\n", "\r\nx-remoe-cost: yes\r\nTE: trailers\r\n", 1)
}

/// What a client was told of the cost; none where its answer did not come to its end.
fn told(answer: &Answer, stream: bool) -> Option<u64> {
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
    let part = |name: &str| number(&usage[name]);
    assert_eq!(part("main") + part("remote"), part("total"), "{usage}");
    assert_eq!(part("prefill") + part("decode"), part("total"), "{usage}");
    // Main functions do not know what those cost that joined while the request ran.
    assert!(part("total") <= total, "{usage} of {total}");
    Some(total)
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no amount"))
}

/// Asks `count` times, in turn whole and as a stream; the sum of what was told, and how often.
async fn client(address: SocketAddr, model: String, count: usize) -> (u64, u64) {
    let (mut sum, mut answers) = (0, 0);
    for turn in 0..count {
        let stream = turn % 2 == 1;
        let mut connection = Connection::open(address).await;
        connection.write(post(&model, 2 + turn as u32 % 5, stream)).await.unwrap();
        let Ok(answer) = connection.answer().await else { continue };
        let Some(cost) = told(&answer, stream) else { continue };
        sum += cost;
        answers += 1;
    }
    (sum, answers)
}

/// The ledger of `folder` added up, which is whole.
async fn cost(folder: &Path) -> Value {
    let (code, cost) = remoe(&["cost", "--ledger", folder.to_str().unwrap(), "--reconcile"]).await;
    assert_eq!(code, Some(0), "{cost}");
    let part = |name: &str| cost[name].as_i64().unwrap();
    let parts = ["total", "earlier", "failed", "idle", "cold_start", "overlap", "overhead", "residual"];
    assert_eq!(parts.into_iter().map(part).sum::<i64>(), part("paid") + part("unknown"), "{cost}");
    for by in ["by_model", "by_tenant", "by_day"] {
        let sum: u64 = cost[by].as_object().unwrap().values().map(number).sum();
        assert_eq!(sum, number(&cost["total"]), "{cost}");
    }
    cost
}

/// Functions and at last `up` itself are killed while clients ask: the ledger has every answer at the cost that its
/// client was told, and all that was paid is accounted for.
#[tokio::test(flavor = "multi_thread")]
async fn the_ledger_is_what_clients_were_told() {
    let model = Model::fixture("olmoe-basic");
    let folder = tempfile::tempdir().unwrap();
    let ledger = folder.path().to_str().unwrap();
    let arguments = ["--remote-ratio", "0.5", "--groups", "2", "--replicas", "1", "--ledger", ledger];
    let (mut sum, mut answers) = (0, 0);
    for round in 0..2 {
        let mut up = Up::start_with(&model.folder, &arguments).await;
        let address = up.ready.http();
        let clients: Vec<_> = (0..4).map(|_| tokio::spawn(client(address, model.name.clone(), 25))).collect();
        let victim = if round == 0 { up.ready.main().pid.unwrap() } else { up.ready.remote_pids()[0] };
        signal(victim, Signal::KILL);
        up.whole_without(&[victim]).await;
        for client in clients {
            let (cost, count) = client.await.unwrap();
            (sum, answers) = (sum + cost, answers + count);
        }
        // One who does not wait for the end.
        let mut connection = Connection::open(address).await;
        connection.write(post(&model.name, 60, true)).await.unwrap();
        connection.head().await.unwrap();
        drop(connection);
        let (more, count) = client(address, model.name.clone(), 4).await;
        (sum, answers) = (sum + more, answers + count);
        assert_eq!(count, 4);
        let pids = up.ready.pids();
        signal(up.process.pid(), if round == 0 { Signal::INT } else { Signal::KILL });
        up.process.end(LONG).await;
        all_gone(&pids, SOON).await;
        let cost = cost(folder.path()).await;
        assert_eq!((number(&cost["requests"]), number(&cost["total"])), (answers, sum), "{cost}");
        assert_eq!(cost["reconciled"], true);
    }
    assert!(answers >= 150 && sum > 0, "{answers} answers for {sum}");
    let (code, cost) = remoe(&["cost", ledger]).await;
    assert_eq!((code, number(&cost["requests"])), (Some(0), answers));
    assert!(number(&cost["failed"]) > 0 && number(&cost["cold_start"]) > 0, "{cost}");
    assert!(
        ["main", "group-0", "group-1"].iter().all(|tier| number(&cost["by_tier"][tier]["decode"]) > 0),
        "{cost}"
    );
}

/// Clients that ask until enough of them have whole answers, whoever is killed meanwhile.
struct Crowd {
    /// Where the gateway is now.
    gateway: watch::Receiver<SocketAddr>,
    model: String,
    /// Whole answers that are wanted.
    wanted: usize,
    seen: Mutex<Seen>,
}

/// By the ids of requests.
#[derive(Default)]
struct Seen {
    asked: BTreeSet<String>,
    /// What those cost that were answered whole.
    told: BTreeMap<String, u64>,
}

impl Crowd {
    fn answers(&self) -> usize {
        self.seen.lock().unwrap().told.len()
    }

    /// The client `number`, who asks in turn for a whole answer and for a stream.
    async fn ask(self: Arc<Self>, number: usize) {
        let mut gateway = self.gateway.clone();
        for turn in 0.. {
            if self.answers() >= self.wanted {
                return;
            }
            assert!(turn < 100 * self.wanted, "client {number} gets no answers");
            let address = *gateway.borrow_and_update();
            let Ok(connection) = Connection::reach(address).await else {
                within(LONG, "another gateway", gateway.changed()).await.unwrap();
                continue;
            };
            let id = format!("{number}-{turn}");
            self.seen.lock().unwrap().asked.insert(id.clone());
            let Some(cost) = self.answer(connection, &id, turn).await else {
                // Whoever broke it off is starting again.
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            };
            self.seen.lock().unwrap().told.insert(id, cost);
        }
    }

    /// What a request cost; none where its answer did not come to its end.
    async fn answer(&self, mut connection: Connection, id: &str, turn: usize) -> Option<u64> {
        let stream = turn % 2 == 1;
        let request = post(&self.model, 1 + turn as u32 % 6, stream);
        let request = request.replacen("\r\n", &format!("\r\nX-Request-Id: {id}\r\n"), 1);
        connection.write(request).await.ok()?;
        let answer = connection.answer().await.ok()?;
        told(&answer, stream)
    }
}

/// All requests of the ledger in `folder`, by their ids, with what they cost.
fn exported(folder: &str) -> BTreeMap<String, u64> {
    let program = binaries::program("remoe");
    let out =
        std::process::Command::new(program).args(["cost", folder, "--export", "json"]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let mut requests = BTreeMap::new();
    for line in String::from_utf8(out.stdout).unwrap().lines() {
        let request: Value = serde_json::from_str(line).unwrap();
        let shares = request["shares"].as_object().unwrap().values();
        let cost =
            shares.map(|share| number(&share["cost"]["prefill"]) + number(&share["cost"]["decode"])).sum();
        let id = request["id"].as_str().unwrap().to_owned();
        assert!(requests.insert(id, cost).is_none(), "one request is there twice: {line}");
    }
    requests
}

/// While many ask, the main function, remote functions and the gateway with its launcher are killed again and again, in the
/// middle of answers, and started again on the same ledger. It has every whole answer at the cost that its client was
/// told, none twice and none of nobody, and adds up. `REMOE_COST_REQUESTS` says how many answers there are.
#[tokio::test(flavor = "multi_thread")]
async fn every_whole_answer_is_in_the_ledger_whoever_is_killed() {
    let count = std::env::var("REMOE_COST_REQUESTS").map_or(240, |count| count.parse().unwrap());
    // Each of the four kinds of kills at least once.
    let kills = (count / 250_usize).max(4);
    let model = Model::demo();
    let folder = tempfile::tempdir().unwrap();
    let ledger = folder.path().to_str().unwrap();
    let arguments = ["--remote-ratio", "0.5", "--groups", "2", "--replicas", "1", "--ledger", ledger];
    let mut up = Up::start_with(&model.folder, &arguments).await;
    let mut now = up.ready.clone();
    let (tell, gateway) = watch::channel(now.http());
    let crowd = Arc::new(Crowd { gateway, model: now.model.clone(), wanted: count, seen: Mutex::default() });
    let clients: Vec<_> = (0..16).map(|number| tokio::spawn(crowd.clone().ask(number))).collect();
    for kill in 0..kills {
        let due = (kill + 1) * count / (kills + 1);
        until(LONG, "answers", async || (crowd.answers() >= due).then_some(())).await;
        let (main, remote) = (now.main().pid.unwrap(), now.remote_pids());
        let victims = match kill % 4 {
            0 => vec![main],
            1 => vec![remote[kill % remote.len()]],
            2 => [vec![main], remote].concat(),
            _ => {
                signal(up.process.pid(), Signal::KILL);
                up.process.end(LONG).await;
                all_gone(&now.pids(), SOON).await;
                // What is left is whole at any moment.
                cost(folder.path()).await;
                drop(up);
                up = Up::start_with(&model.folder, &arguments).await;
                now = up.ready.clone();
                tell.send_replace(now.http());
                continue;
            }
        };
        victims.iter().for_each(|victim| signal(*victim, Signal::KILL));
        now = up.whole_without(&victims).await;
    }
    for client in clients {
        client.await.unwrap();
    }
    signal(up.process.pid(), Signal::INT);
    up.process.end(LONG).await;

    let Seen { asked, told } = std::mem::take(&mut *crowd.seen.lock().unwrap());
    let (cost, exported) = (cost(folder.path()).await, exported(ledger));
    assert!(told.len() >= count);
    for (id, told) in &told {
        assert_eq!(exported.get(id), Some(told), "{id}");
    }
    // Whoever did not get the whole of an answer may be there, or not.
    let others = exported.keys().filter(|id| !told.contains_key(*id));
    assert!(others.clone().all(|id| asked.contains(id)));
    assert_eq!(number(&cost["requests"]), exported.len() as u64, "{cost}");
    assert_eq!(number(&cost["total"]), exported.values().sum::<u64>(), "{cost}");
    assert_eq!([&cost["unknown"], &cost["earlier"], &cost["damaged"]].map(number), [0; 3], "{cost}");
    let (paid, residual) = (number(&cost["paid"]), cost["residual"].as_i64().unwrap());
    // Of a short run a millisecond in which two clocks contradict each other about one who is killed is more.
    assert!(count < 10_000 || residual.unsigned_abs() * 1000 <= paid, "{cost}");
    println!(
        "{} whole answers of {} requests, {} in the ledger that nobody had whole, {kills} kills; {residual} of {paid} n$ \
         are not accounted for",
        told.len(),
        asked.len(),
        others.count(),
    );
}

async fn metrics(address: SocketAddr, key: &str) -> String {
    let request = raw::get("/metrics").replacen("\r\n", &format!("\r\nAuthorization: Bearer {key}\r\n"), 1);
    raw::ask(address, request).await.text()
}

fn value(page: &str, sample: &str) -> f64 {
    let line = page.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{sample} is missing in\n{page}")).parse().unwrap()
}

/// A tenant is refused when its budget is spent; a model that sleeps costs nothing.
#[tokio::test(flavor = "multi_thread")]
async fn budgets_end_and_sleep_is_free() {
    let model = Model::fixture("olmoe-basic");
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.yaml");
    std::fs::write(
        &keys,
        "tenants: [{name: poor, keys: [sk-poor], dollarsPerDay: 0.000000001}, {name: rich, keys: [sk-rich]}, \
         {name: hasty, keys: [sk-hasty], dollarsPerDay: 1}]",
    )
    .unwrap();
    let ledger = folder.path().join("ledger");
    let arguments = ["--remote-ratio", "0.5", "--idle", "1s", "--api-key", "sk-all", "--keys"];
    let files = [keys.to_str().unwrap(), "--ledger", ledger.to_str().unwrap()];
    let arguments: Vec<&str> = arguments.into_iter().chain(files).collect();
    let mut up = Up::start_with(&model.folder, &arguments).await;
    let address = up.ready.http();
    let with = |request: String, key: &str| {
        request.replacen("\r\n", &format!("\r\nAuthorization: Bearer {key}\r\n"), 1)
    };
    let ask = async |key: &str| raw::ask(address, with(post(&model.name, 30, false), key)).await;
    assert_eq!(ask("sk-rich").await.head.status, 200);
    // The one that exceeds the budget runs.
    let mut refused = ask("sk-poor").await;
    for _ in 0..20 {
        assert_eq!(refused.head.header("retry-after").is_empty(), refused.head.status == 200);
        if refused.head.status == 429 {
            break;
        }
        refused = ask("sk-poor").await;
    }
    assert!(refused.text().contains("the budget of the tenant poor is spent"), "{}", refused.text());
    assert_eq!(ask("sk-rich").await.head.status, 200);
    // Who leaves before the end of an answer pays about what there was of it.
    let mut connection = Connection::open(address).await;
    connection.write(with(post(&model.name, 60, true), "sk-hasty")).await.unwrap();
    connection.head().await.unwrap();
    drop(connection);
    until(SOON, "a charge for who left", async || {
        let page = metrics(address, "sk-all").await;
        (value(&page, "remoe_budget_spent_nanodollars{model=\"\",tenant=\"hasty\"}") > 0.0).then_some(())
    })
    .await;
    let page = metrics(address, "sk-all").await;
    let rate = |page: &str, tier| {
        let labels = format!("{{model=\"{}\",tier=\"{tier}\"}}", model.name);
        value(page, &format!("remoe_cost_rate_nanodollars_per_hour{labels}"))
    };
    assert!(rate(&page, "main") > 0.0 && rate(&page, "group-0") > 0.0);
    assert!(value(&page, "remoe_budget_refusals_total{model=\"\",tenant=\"poor\"}") >= 1.0);
    up.next("asleep").await;
    until(SOON, "the price of sleep", async || {
        let page = metrics(address, "sk-all").await;
        (rate(&page, "main") + rate(&page, "group-0") == 0.0).then_some(())
    })
    .await;
    signal(up.process.pid(), Signal::INT);
    up.process.end(LONG).await;
    let cost = cost(&ledger).await;
    // Who left stands here only where its answer ended before the gateway saw it leave.
    assert!(["poor", "rich"].iter().all(|tenant| number(&cost["by_tenant"][tenant]) > 0), "{cost}");
    assert_eq!((number(&cost["alive"]), number(&cost["per_hour"])), (0, 0), "{cost}");
}
