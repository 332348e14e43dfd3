//! Overload from two tenants with ten times the capacity of real functions: memory of the gateway and the main
//! function stays bounded, refused clients get a retry time, tenants are served in turns, and nothing remains
//! afterwards.

use remoe_test_support::deadline::{LONG, until};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::raw::{self, Connection};
use remoe_test_support::up::Up;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

/// Environment variable with the duration of the overload, in seconds.
const DURATION_VARIABLE: &str = "REMOE_OVERLOAD_SECONDS";
/// Largest number of running and waiting requests.
const MAX_REQUESTS: usize = 24;
/// Largest number of open requests of a tenant.
const MAX_OPEN_REQUESTS: usize = 100;
/// Load as a multiple of the capacity.
const LOAD_FACTOR: f64 = 10.0;
/// Share of one tenant in the load; the other sends the rest. Both exceed the capacity.
const LOUD_SHARE: f64 = 0.8;
/// Allowed growth of a process, in bytes: connection buffers and memory that the allocator keeps.
const MAX_GROWTH: u64 = 64 << 20;
const KEYS: &str = "tenants:\n- {name: loud, keys: [key-of-loud]}\n- {name: quiet, keys: [key-of-quiet]}\n";

fn request(key: &str) -> String {
    let body = json!({"prompt": [1, 2, 3, 4], "max_tokens": 48, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true});
    raw::post("/v1/completions", &body.to_string()).replacen(
        "\r\n",
        &format!("\r\nAuthorization: Bearer {key}\r\n"),
        1,
    )
}

/// Measures the capacity in requests per second, with as many clients as slots, one request after another.
async fn measure_capacity(address: SocketAddr, expected: &Value) -> f64 {
    let (started, answered) = (Instant::now(), AtomicUsize::new(0));
    let client = async || {
        while started.elapsed() < Duration::from_secs(2) {
            let answer = raw::ask(address, request("key-of-quiet")).await.ok();
            assert_eq!(answer["choices"][0]["token_ids"], *expected);
            answered.fetch_add(1, Ordering::SeqCst);
        }
    };
    tokio::join!(client(), client(), client(), client(), client(), client(), client(), client());
    answered.into_inner() as f64 / started.elapsed().as_secs_f64()
}

/// Outcomes of a tenant's requests.
#[derive(Default)]
struct Tally {
    answered: AtomicUsize,
    refused: AtomicUsize,
    /// Largest number of other tenants' answers that an answered request waited for.
    overtaken: AtomicUsize,
    /// Longest wait of an answered request, in microseconds.
    longest: AtomicU64,
}

/// Sends `rate` requests per second with `key` while `is_loading` is true.
async fn send_load(
    (address, key): (SocketAddr, &'static str),
    rate: f64,
    (total_answers, is_loading): (&Arc<AtomicUsize>, &AtomicBool),
    expected: &Value,
) -> Tally {
    let tally = Arc::new(Tally::default());
    let mut ticks = interval(Duration::from_secs_f64(1.0 / rate));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let open_requests = Arc::new(Semaphore::new(MAX_OPEN_REQUESTS));
    let mut tasks = JoinSet::new();
    while is_loading.load(Ordering::SeqCst) {
        ticks.tick().await;
        let permit = open_requests.clone().acquire_owned().await.unwrap();
        let (tally, total_answers, expected) = (tally.clone(), total_answers.clone(), expected.clone());
        tasks.spawn(async move {
            let _until_answered = permit;
            let (before, started) = (total_answers.load(Ordering::SeqCst), Instant::now());
            let mut connection = Connection::open(address).await;
            connection.write(request(key)).await.unwrap();
            let answer = connection.answer().await.unwrap();
            match answer.head.status {
                200 => {
                    assert_eq!(answer.ok()["choices"][0]["token_ids"], expected);
                    let answers_meanwhile = total_answers.fetch_add(1, Ordering::SeqCst) - before;
                    tally.answered.fetch_add(1, Ordering::SeqCst);
                    tally.overtaken.fetch_max(answers_meanwhile, Ordering::SeqCst);
                    let elapsed = u64::try_from(started.elapsed().as_micros()).unwrap();
                    tally.longest.fetch_max(elapsed, Ordering::SeqCst);
                }
                status => {
                    assert!(matches!(status, 429 | 503), "{}", answer.text());
                    let after: u32 = answer.head.header("retry-after").parse().unwrap();
                    assert!((1..=60).contains(&after), "come back after {after} s");
                    tally.refused.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        while tasks.try_join_next().map(Result::unwrap).is_some() {}
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
    Arc::into_inner(tally).expect("all clients are done")
}

/// Returns the resident memory of the process, in bytes.
fn resident_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[tokio::test(flavor = "multi_thread")]
async fn tenfold_overload_is_shared_shed_and_recovers() {
    let seconds = std::env::var(DURATION_VARIABLE).map_or(6, |text| text.parse().unwrap());
    let model = ModelFixture::fixture("olmoe-basic");
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.yaml");
    std::fs::write(&keys, KEYS).unwrap();
    let max_requests = MAX_REQUESTS.to_string();
    let arguments =
        ["--remote-ratio", "0.5", "--keys", keys.to_str().unwrap(), "--max-requests", &max_requests];
    let up = Up::start_with(&model.folder, &[&arguments[..], &["--max-batch", "8"]].concat()).await;
    let address = up.ready.http();
    let expected = raw::ask(address, request("key-of-quiet")).await.ok()["choices"][0]["token_ids"].clone();
    let rate = measure_capacity(address, &expected).await;

    let processes = [up.process.pid(), up.ready.main().pid.unwrap()];
    let before = processes.map(resident_bytes);
    let (total_answers, is_loading) = (Arc::new(AtomicUsize::new(0)), AtomicBool::new(true));
    let watch_memory = async {
        let (started, mut largest) = (Instant::now(), before);
        while started.elapsed() < Duration::from_secs(seconds) {
            tokio::time::sleep(Duration::from_millis(100)).await;
            for (largest, process) in largest.iter_mut().zip(processes) {
                *largest = resident_bytes(process).max(*largest);
            }
        }
        is_loading.store(false, Ordering::SeqCst);
        largest
    };
    let tenant = |key, share: f64| {
        send_load((address, key), share * LOAD_FACTOR * rate, (&total_answers, &is_loading), &expected)
    };
    let started = Instant::now();
    let (loud, quiet, largest) = tokio::join!(
        tenant("key-of-loud", LOUD_SHARE),
        tenant("key-of-quiet", 1.0 - LOUD_SHARE),
        watch_memory
    );
    let elapsed = started.elapsed().as_secs_f64();

    let load = |count: &AtomicUsize| count.load(Ordering::SeqCst);
    eprintln!(
        "{rate:.1} requests/s can be answered; {:.1} were, for {elapsed:.1} s",
        load(&total_answers) as f64 / elapsed
    );
    for (name, tally) in [("loud", &loud), ("quiet", &quiet)] {
        let (answered, refused, overtaken) =
            (load(&tally.answered), load(&tally.refused), load(&tally.overtaken));
        let longest = tally.longest.load(Ordering::SeqCst) as f64 / 1e6;
        eprintln!(
            "{name}: {:.1} requests/s, {answered} answered within {longest:.2} s (all that may wait take {:.2} s), none after \
             more than {overtaken} others, {refused} refused",
            (answered + refused) as f64 / elapsed,
            MAX_REQUESTS as f64 / rate,
        );
        assert!(10 * answered >= 4 * load(&total_answers), "{name}: {answered} of {}", load(&total_answers));
        assert!(refused > 0, "{name}");
        // Tenants take turns: each earlier request of its own is paired with at most one of the other tenant. A
        // client starts counting before its admission, so requests open at that time may come first.
        assert!(
            overtaken <= 2 * MAX_REQUESTS + 2 * MAX_OPEN_REQUESTS,
            "{name}: {overtaken} others were answered meanwhile"
        );
    }
    for ((name, before), largest) in ["gateway", "main function"].into_iter().zip(before).zip(largest) {
        eprintln!("{name}: {} MiB before, {} MiB at most", before >> 20, largest >> 20);
        assert!(largest.saturating_sub(before) < MAX_GROWTH, "{name}: {before} bytes, then {largest}");
    }

    // After the overload no request waits, the same functions serve, and no request is refused.
    let status = async || {
        let get = raw::get("/status").replacen("\r\n", "\r\nAuthorization: Bearer key-of-loud\r\n", 1);
        raw::ask(address, get).await.ok()["models"][0].clone()
    };
    until(LONG, "no request to wait", async || {
        let status = status().await;
        let left = ["waiting", "in_flight", "waiting_bytes"].map(|field| status[field].as_u64().unwrap());
        (left == [0; 3]).then_some(())
    })
    .await;
    let after = measure_capacity(address, &expected).await;
    eprintln!("afterwards {after:.1} requests/s can be answered");
    assert_eq!(status().await["functions"][0]["pid"].as_u64(), up.ready.main().pid.map(u64::from));
}
