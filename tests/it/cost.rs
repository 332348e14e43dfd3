//! Costs of requests, as reported to clients and as recorded in the ledger.

use remoe_test_support::binaries;
use remoe_test_support::command::remoe;
use remoe_test_support::deadline::{LONG, SOON, until};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::load_clients::{LoadClients, amount, exported, request, told};
use remoe_test_support::process::signal;
use remoe_test_support::raw::{self, Connection};
use remoe_test_support::up::{Up, all_gone};
use rustix::process::Signal;
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use tokio::sync::watch;

/// Sends `count` requests, alternately as complete responses and as streams. Returns the sum of reported costs and
/// the number of complete responses.
async fn client(address: SocketAddr, model: String, count: usize) -> (u64, u64) {
    let (mut sum, mut answers) = (0, 0);
    for turn in 0..count {
        let stream = turn % 2 == 1;
        let mut connection = Connection::open(address).await;
        connection.write(request(&model, 2 + turn as u32 % 5, stream)).await.unwrap();
        let Ok(answer) = connection.answer().await else { continue };
        let Some(cost) = told(&answer, stream) else { continue };
        sum += cost;
        answers += 1;
    }
    (sum, answers)
}

/// Sums the ledger in `folder` and checks that it reconciles.
async fn cost(folder: &Path) -> Value {
    let (code, cost) = remoe(&["cost", "--ledger", folder.to_str().unwrap(), "--reconcile"]).await;
    assert_eq!(code, Some(0), "{cost}");
    let part = |name: &str| cost[name].as_i64().unwrap();
    let parts = ["total", "earlier", "failed", "idle", "cold_start", "overlap", "overhead", "residual"];
    assert_eq!(parts.into_iter().map(part).sum::<i64>(), part("paid") + part("unknown"), "{cost}");
    for by in ["by_model", "by_tenant", "by_day"] {
        let sum: u64 = cost[by].as_object().unwrap().values().map(amount).sum();
        assert_eq!(sum, amount(&cost["total"]), "{cost}");
    }
    cost
}

/// Functions and finally `up` are killed while clients send requests: the ledger has every response at its reported
/// cost, and all paid time is accounted for.
#[tokio::test(flavor = "multi_thread")]
async fn ledger_equals_costs_reported_to_clients() {
    let model = ModelFixture::fixture("olmoe-basic");
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
        // A client that disconnects early.
        let mut connection = Connection::open(address).await;
        connection.write(request(&model.name, 60, true)).await.unwrap();
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
        assert_eq!((amount(&cost["requests"]), amount(&cost["total"])), (answers, sum), "{cost}");
        assert_eq!(cost["reconciled"], true);
    }
    assert!(answers >= 150 && sum > 0, "{answers} answers for {sum}");
    let (code, cost) = remoe(&["cost", ledger]).await;
    assert_eq!((code, amount(&cost["requests"])), (Some(0), answers));
    assert!(amount(&cost["failed"]) > 0 && amount(&cost["cold_start"]) > 0, "{cost}");
    assert!(
        ["main", "group-0", "group-1"].iter().all(|tier| amount(&cost["by_tier"][tier]["decode"]) > 0),
        "{cost}"
    );
}

/// Returns the cost of each request in the ledger of `folder`, by id.
fn requests(folder: &str) -> BTreeMap<String, u64> {
    let program = binaries::program("remoe");
    let out =
        std::process::Command::new(program).args(["cost", folder, "--export", "json"]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    exported(&String::from_utf8(out.stdout).unwrap())
}

/// The main function, remote functions and the gateway with its launcher are killed repeatedly during requests, and
/// restarted on the same ledger. The ledger has every complete response once, at its reported cost, and only requests
/// that clients sent. `REMOE_COST_REQUESTS` is the number of responses.
#[tokio::test(flavor = "multi_thread")]
async fn every_complete_answer_is_in_the_ledger_after_any_kill() {
    let count = std::env::var("REMOE_COST_REQUESTS").map_or(240, |count| count.parse().unwrap());
    // Each of the four kinds of kills occurs at least once.
    let kills = (count / 250_usize).max(4);
    let model = ModelFixture::demo();
    let folder = tempfile::tempdir().unwrap();
    let ledger = folder.path().to_str().unwrap();
    let arguments = ["--remote-ratio", "0.5", "--groups", "2", "--replicas", "1", "--ledger", ledger];
    let mut up = Up::start_with(&model.folder, &arguments).await;
    let mut ready = up.ready.clone();
    let (gateway_sender, gateways) = watch::channel(vec![ready.http()]);
    let clients = LoadClients::start(16, gateways, &ready.model);
    let wait_for_requests =
        async |what: &str| until(LONG, what, async || (clients.running() > 0).then_some(())).await;
    for kill in 0..kills {
        let due = (kill + 1) * count / (kills + 1);
        until(LONG, "answers", async || (clients.answers() >= due).then_some(())).await;
        let (main, remote) = (ready.main().pid.unwrap(), ready.remote_pids());
        let victims = match kill % 4 {
            0 => vec![main],
            1 => vec![remote[kill % remote.len()]],
            2 => [vec![main], remote].concat(),
            _ => {
                wait_for_requests("requests of the gateway").await;
                signal(up.process.pid(), Signal::KILL);
                up.process.end(LONG).await;
                all_gone(&ready.pids(), SOON).await;
                // The ledger is consistent after each kill.
                cost(folder.path()).await;
                drop(up);
                up = Up::start_with(&model.folder, &arguments).await;
                ready = up.ready.clone();
                gateway_sender.send_replace(vec![ready.http()]);
                continue;
            }
        };
        wait_for_requests("requests of the victims").await;
        victims.iter().for_each(|victim| signal(*victim, Signal::KILL));
        ready = up.whole_without(&victims).await;
    }
    until(LONG, "the last answers", async || (clients.answers() >= count).then_some(())).await;
    let outcome = clients.stop().await;
    signal(up.process.pid(), Signal::INT);
    up.process.end(LONG).await;

    let (cost, exported) = (cost(folder.path()).await, requests(ledger));
    assert!(outcome.told.len() >= count);
    let others = outcome.are_in(&exported, &cost);
    assert_eq!(amount(&cost["damaged"]), 0, "{cost}");
    let (paid, residual) = (amount(&cost["paid"]), cost["residual"].as_i64().unwrap());
    // In a short run, one millisecond of clock difference about a killed process is a larger share.
    assert!(count < 10_000 || residual.unsigned_abs() * 1000 <= paid, "{cost}");
    println!(
        "{} whole answers of {} requests, {others} in the ledger that no client had whole, {kills} kills; {residual} of \
         {paid} n$ are not accounted for",
        outcome.told.len(),
        outcome.asked.len(),
    );
}

/// Sends `count` requests, alternately as complete responses and as streams. Returns the number of responses and
/// their total cost by usages and headers.
async fn send_and_sum(address: SocketAddr, model: String, count: usize) -> [u64; 3] {
    let mut sums = [0; 3];
    for turn in 0..count {
        let stream = turn % 2 == 1;
        let mut connection = Connection::open(address).await;
        connection.write(request(&model, 20 + turn as u32 % 20, stream)).await.unwrap();
        let answer = connection.answer().await.unwrap();
        let header = told(&answer, stream).unwrap();
        let text = answer.text();
        let (_, usage) = text.rsplit_once("\"cost\":{\"total\":").unwrap();
        let usage = usage.split_once(',').unwrap().0.parse::<u64>().unwrap();
        for (sum, amount) in sums.iter_mut().zip([1, usage, header]) {
            *sum += amount;
        }
    }
    sums
}

/// One of two replicas is killed and replaced during requests: all requests are answered, and usages, headers and the
/// ledger agree.
#[tokio::test(flavor = "multi_thread")]
async fn killed_replica_leaves_usage_header_and_ledger_equal() {
    let model = ModelFixture::demo();
    let folder = tempfile::tempdir().unwrap();
    let ledger = folder.path().to_str().unwrap();
    let arguments = ["--remote-ratio", "0.5", "--replicas", "2", "--ledger", ledger];
    let mut up = Up::start_with(&model.folder, &arguments).await;
    let (address, name) = (up.ready.http(), up.ready.model.clone());
    let clients: Vec<_> = (0..4).map(|_| tokio::spawn(send_and_sum(address, name.clone(), 50))).collect();
    until(LONG, "requests that run", async || {
        let status = raw::ask(address, raw::get("/status")).await.ok();
        (amount(&status["models"][0]["in_flight"]) > 0).then_some(())
    })
    .await;
    let victim = up.ready.remote_pids()[0];
    signal(victim, Signal::KILL);
    let mut told = [0; 3];
    for client in clients {
        let sums = client.await.unwrap();
        told = [0, 1, 2].map(|of| told[of] + sums[of]);
    }
    up.whole_without(&[victim]).await;
    signal(up.process.pid(), Signal::INT);
    up.process.end(LONG).await;
    let cost = cost(folder.path()).await;
    let [answers, usages, headers] = told;
    assert_eq!((answers, usages), (200, headers), "{cost}");
    assert_eq!((amount(&cost["requests"]), amount(&cost["total"])), (200, usages), "{cost}");
}

async fn metrics(address: SocketAddr, key: &str) -> String {
    let request = raw::get("/metrics").replacen("\r\n", &format!("\r\nAuthorization: Bearer {key}\r\n"), 1);
    raw::ask(address, request).await.text()
}

fn value(page: &str, sample: &str) -> f64 {
    let line = page.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{sample} is missing in\n{page}")).parse().unwrap()
}

/// A tenant is refused once its budget is exhausted. A model that scaled to zero costs nothing.
#[tokio::test(flavor = "multi_thread")]
async fn budgets_end_and_sleep_is_free() {
    let model = ModelFixture::fixture("olmoe-basic");
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
    let ask = async |key: &str| raw::ask(address, with(request(&model.name, 30, false), key)).await;
    assert_eq!(ask("sk-rich").await.head.status, 200);
    // The request that exceeds the budget still runs.
    let mut refused = ask("sk-poor").await;
    for _ in 0..20 {
        assert_eq!(refused.head.header("retry-after").is_empty(), refused.head.status == 200);
        if refused.head.status == 429 {
            break;
        }
        refused = ask("sk-poor").await;
    }
    assert!(refused.text().contains("Daily budget of tenant poor exhausted: $"), "{}", refused.text());
    assert_eq!(ask("sk-rich").await.head.status, 200);
    // A client that disconnects pays about for the tokens computed until then.
    let mut connection = Connection::open(address).await;
    connection.write(with(request(&model.name, 60, true), "sk-hasty")).await.unwrap();
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
    // A disconnected client is counted here only if its answer ended before the gateway noticed.
    assert!(["poor", "rich"].iter().all(|tenant| amount(&cost["by_tenant"][tenant]) > 0), "{cost}");
    assert_eq!((amount(&cost["alive"]), amount(&cost["per_hour"])), (0, 0), "{cost}");
}
