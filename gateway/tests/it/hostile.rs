//! The program with hostile main functions, and with many created and deleted deployments: its memory, metrics and
//! ledger.

use crate::api::Api;
use crate::gateway::{Gateway, main_function};
use futures_util::stream::{StreamExt, iter};
use remoe_test_support::binaries::program;
use remoe_test_support::deadline::{LONG, until, within};
use remoe_test_support::hostile::{Cases, chart_limit};
use remoe_test_support::hostile_answers::{COST, honest, hostile};
use remoe_test_support::raw;
use serde_json::Value;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;
use tokio::io::{AsyncWriteExt, copy, sink};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Number of cases in a usual test run.
const DEFAULT_CASES: usize = 300;
/// Number of concurrent clients.
const CLIENTS: usize = 16;
/// Time after which a client of the hostile function disconnects.
const CLIENT_TIMEOUT: Duration = Duration::from_millis(100);
/// Nano-dollars per hour, which is one per nanosecond.
const RATE: u64 = 3_600_000_000_000;

const KEYS: &str = "tenants:
  - {name: victim, keys: [sk-victim]}
  - {name: honest, keys: [sk-honest]}
  - {name: admin, keys: [sk-admin], admin: true}
";

/// Asserts that the process never used half of the chart's memory limit, and that it did not panic.
fn assert_unharmed(gateway: &Gateway) {
    let (now, max_resident) = gateway.process.memory();
    let limit = chart_limit("gateway") as u64;
    println!("resident: {} MiB, at most {} MiB, limit {} MiB", now >> 20, max_resident >> 20, limit >> 20);
    assert!(
        max_resident < limit / 2,
        "{max_resident} bytes were resident; the limit of the chart is {limit}"
    );
    let log = gateway.process.log();
    assert!(log.iter().all(|line| !line.contains("panicked")), "{log:?}");
}

/// Returns the number of series with a model in the gateway's metrics.
async fn series(gateway: &Gateway) -> usize {
    let (status, page) = gateway.scrape(Some("sk-admin")).await;
    assert_eq!(status, 200);
    page.lines().filter(|line| !line.starts_with('#') && line.contains("model=\"")).count()
}

/// Sends a request and reads the answer until the connection ends. Returns its number of bytes.
async fn attack(gateway: SocketAddr, request: String) -> std::io::Result<u64> {
    let mut stream = TcpStream::connect(gateway).await?;
    stream.write_all(request.as_bytes()).await?;
    copy(&mut stream, &mut sink()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_beside_hostile_function_stays_small_and_bills_right() {
    let cases = Cases::new("answers to the program", DEFAULT_CASES);
    let api = Api::start().await;
    let folder = tempfile::tempdir().unwrap();
    let ledger = format!("--ledger={}", folder.path().display());
    let gateway = Gateway::start(&api, "one", Some(KEYS), &[&ledger]).await;
    let before = series(&gateway).await;
    let (bad, sent) = hostile(cases).await;
    api.deploy_priced("bad/demo", bad, RATE);
    api.deploy_priced("good/demo", honest(2).await, RATE);
    for name in ["bad/demo", "good/demo"] {
        until(LONG, "the deployments", async || {
            gateway.get("/v1/models", Some("sk-admin")).await.1.contains(name).then_some(())
        })
        .await;
    }
    let key = |request: &str, key: &str| {
        request.replacen("\r\n", &format!("\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n"), 1)
    };
    iter(0..cases.count())
        .for_each_concurrent(CLIENTS, |number| {
            let gateway = &gateway;
            async move {
                let mut choices = cases.choices(number);
                let path =
                    *choices.one_of(&["/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]);
                let stream = choices.once_in(2);
                let body = format!(
                    r#"{{"model":"bad/demo","stream":{stream},"max_tokens":7,"include_figures":true}}"#
                );
                let request = match choices.below(12) {
                    0 => raw::get("/v1/placement?model=bad/demo"),
                    1 => raw::get("/metrics"),
                    _ => raw::post(path, &body),
                };
                let attack = timeout(CLIENT_TIMEOUT, attack(gateway.address, key(&request, "sk-victim")));
                let ask = gateway.ask(Some("sk-honest"), Some("good/demo"));
                let (_any_outcome, answer) = tokio::join!(attack, ask);
                assert_eq!(answer, (200, "{}".to_owned()), "beside case {number}");
            }
        })
        .await;
    println!("{} bytes were sent", sent.load(std::sync::atomic::Ordering::Relaxed));
    assert_unharmed(&gateway);

    // The costs of the honest tenant, in the metrics and by `remoe cost`.
    let expected = cases.count() as u64 * COST;
    let (_, page) = gateway.scrape(Some("sk-admin")).await;
    let of_honest = page.lines().filter(|line| {
        line.starts_with("remoe_cost_nanodollars_total{") && line.contains("tenant=\"honest\"")
    });
    let counted: u64 = of_honest.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum();
    assert_eq!(counted, expected);
    until(LONG, "the ledger", async || {
        let mut remoe = Command::new(program("remoe"));
        let output = remoe.arg("cost").arg(folder.path()).args(["--export", "json"]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let requests = String::from_utf8(output.stdout).unwrap();
        let requests = requests.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let of_honest = requests.filter(|request| request["tenant"] == "honest");
        let paid = of_honest.map(|request| {
            let shares = request["shares"].as_object().unwrap().values();
            shares
                .map(|share| {
                    ["prefill", "decode"]
                        .iter()
                        .map(|phase| share["cost"][phase].as_u64().unwrap())
                        .sum::<u64>()
                })
                .sum::<u64>()
        });
        (paid.sum::<u64>() == expected).then_some(())
    })
    .await;

    for name in ["bad/demo", "good/demo"] {
        api.delete(name);
    }
    until(LONG, "the series of both to be gone", async || (series(&gateway).await == before).then_some(()))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_deployments_leave_no_series_and_no_memory() {
    let cases = Cases::new("deployments of the program", DEFAULT_CASES);
    let api = Api::start().await;
    let gateway = Gateway::start(&api, "one", Some(KEYS), &[]).await;
    let main = main_function("any").await;
    // A permanent deployment is served throughout.
    api.deploy("permanent/demo", "demo", Some(main));
    let wait_until_served = async |name: &str| {
        let condition = format!("{name} to be served");
        until(LONG, &condition, async || {
            (gateway.ask(Some("sk-honest"), Some(name)).await.0 == 200).then_some(())
        })
        .await;
    };
    wait_until_served("permanent/demo").await;
    let (resident, _) = gateway.process.memory();
    let mut alive: Vec<String> = Vec::new();
    for number in 0..cases.count() {
        let mut choices = cases.choices(number);
        // Some have the name of an earlier one.
        let name = format!("tenant/{}", choices.below(cases.count()));
        if !alive.contains(&name) {
            api.deploy(&name, "demo", choices.once_in(2).then_some(main));
            alive.push(name);
        }
        if alive.len() > 20 {
            let deleted = alive.swap_remove(choices.below(20));
            api.delete(&deleted);
        }
        if number % 50 == 0 {
            within(LONG, "the permanent deployment", wait_until_served("permanent/demo")).await;
            // A real API server ends a watch that is far behind, and the gateway lists again. The fake one loses
            // deletions instead.
            until(LONG, "the gateway to know of all", async || {
                let listed = gateway.get("/v1/models", Some("sk-admin")).await.1;
                let listed: Value = serde_json::from_str(&listed).unwrap();
                (listed["data"].as_array().unwrap().len() == alive.len() + 1).then_some(())
            })
            .await;
        }
    }
    for name in alive {
        api.delete(&name);
    }
    // The permanent deployment may have more series by now.
    let remaining_series = async || {
        let page = gateway.scrape(Some("sk-admin")).await.1;
        page.lines().filter(|line| line.contains("model=\"tenant/")).map(str::to_owned).collect::<Vec<_>>()
    };
    let removal = timeout(LONG, async {
        while !remaining_series().await.is_empty() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    if removal.await.is_err() {
        panic!("series of deployments that are gone: {:?}", remaining_series().await);
    }
    let (now, _) = gateway.process.memory();
    println!("resident: {} KiB before, {} KiB after", resident >> 10, now >> 10);
    assert_unharmed(&gateway);
}
