//! Overhead of accounting for every request's cost.

use crate::context::BenchContext;
use crate::error::{BenchError, ErrorContext, Result};
use crate::pace::TimeShare;
use crate::report::{Bar, BenchSection};
use crate::series::Series;
use remoe_billing::{
    Attribution, Basis, BilledRequest, FunctionEvent, Ledger, LedgerLimits, Meter, PairCounts, Phase, Phases,
    Rate, Rates, ReportedCost, RequestWork, WorkShare,
};
use remoe_gateway_core::{Billing, CompletedRequest, CostAccounting, GatewayMetrics};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

const NAME: &str = "Accounting of requests";
const ROUNDS: usize = 20;
/// Requests of a round, and iterations.
const REQUESTS: usize = 2000;
/// Requests in an iteration, each with one token.
const BATCH: usize = 8;
/// Remote functions that work for each, and experts of a token in a layer.
const REMOTE: usize = 8;
/// As many as the largest models have.
const LAYERS: usize = 58;
const MAIN: &str = "main";
const RIVALS: [&str; 4] = ["mix", "cpu", "gpu", "fetch"];
/// Nano-dollars an hour.
const RATE: Rate = Rate(44_000_000);

/// Microseconds.
const REQUEST_BAR: Bar = Bar::AtMost(20.0);
const TOKEN_BAR: Bar = Bar::AtMost(1.0);

pub(super) fn measure(context: &BenchContext, share: &TimeShare) -> Result<BenchSection> {
    let addresses: Vec<Arc<str>> =
        (0..REMOTE).map(|port| format!("127.0.0.1:{}", 4000 + port).into()).collect();
    let (mut requests, mut tokens) = (Series::default(), Series::default());
    let ending = share.rounds(NAME, context.rounds(ROUNDS), |number| {
        let request = request(&addresses)?;
        let token = token(&addresses);
        // The first round warms up.
        if number > 0 {
            requests.push(request);
            tokens.push(token);
        }
        Ok(())
    });
    let shape = json!({"remote_functions": REMOTE, "requests_in_an_iteration": BATCH, "layers": LAYERS});
    let mut part = BenchSection::new(NAME, shape);
    part.add_with_bar(
        "a request: price, report, send, count, sum, write to the ledger",
        "µs",
        &requests,
        REQUEST_BAR,
    );
    part.add_with_bar(
        "a token: count its pairs, and its share of an iteration of all functions",
        "µs",
        &tokens,
        TOKEN_BAR,
    );
    part.note("The ledger is in the folder of temporary files; a record is one write to the page cache.");
    part.conclude(ending);
    Ok(part)
}

/// Microseconds of one request of many, from what its functions did to a record that the system has.
fn request(addresses: &[Arc<str>]) -> Result<f64> {
    let writing = || "writing a ledger";
    let folder = tempfile::tempdir().doing(writing)?;
    let ledger = Ledger::open(folder.path(), LedgerLimits::default()).doing(writing)?;
    let metrics = GatewayMetrics::new().doing(writing)?;
    let books = CostAccounting::open(Some(ledger), "prices", metrics.registry()).doing(writing)?;
    let names = addresses.iter().map(|address| address.to_string()).chain([MAIN.to_owned()]);
    let tier = |name: &str| if name == MAIN { MAIN.to_owned() } else { format!("group-{name}") };
    let billing = Billing {
        rates: Rates(names.clone().map(|name| (name, RATE)).collect()),
        functions: names.map(|name| (name.clone(), (format!("pod-{name}"), tier(&name)))).collect(),
        restarts: 0,
    };
    for (function, tier) in billing.functions.values() {
        let event = FunctionEvent::Started { tier: tier.clone(), rate: RATE, basis: Basis::Alive };
        books.record_function_event(CostAccounting::now(), "m", function, event);
    }
    let meter = Meter::default();
    let worked = WorkShare { share: Phases { prefill: 12_345_678, decode: 87_654_321 }, busy: 1 << 40 };
    let remote = addresses.iter().map(|address| (address.clone(), worked)).collect();
    let work = RequestWork { main: worked, remote, served: 1 << 41 };
    let rivals: BTreeMap<String, u64> = RIVALS.map(|rival| (rival.to_owned(), 1_000_000)).into();
    let started = Instant::now();
    for number in 0..REQUESTS {
        // The gateway says what functions cost, the main function what it was of that, and the gateway keeps it.
        let rates: Rates = billing.rates.to_string().parse().doing(writing)?;
        let told = ReportedCost { rivals: rivals.clone(), ..meter.report(&work, &rates) };
        let header = serde_json::to_string(&told).doing(writing)?;
        let told = serde_json::from_str(&header).doing(writing)?;
        let (prompt_tokens, completion_tokens) = (100, 100);
        let id = format!("{number:032x}");
        let answered = CompletedRequest {
            id: &id,
            model: "m",
            tenant: "t",
            prompt_tokens,
            completion_tokens,
            reported: told,
        };
        std::hint::black_box(books.record_answer(answered, &billing, None));
    }
    let took = started.elapsed().as_secs_f64() * 1e6 / REQUESTS as f64;
    // Serving goes on where a ledger takes nothing: that would be quick.
    let kept = books.totals().doing(writing)?.answered.requests;
    if kept != REQUESTS as u64 {
        return Err(BenchError::new(writing(), format!("expected {REQUESTS} requests, got {kept}")));
    }
    Ok(took)
}

struct AccountedRequest(RequestWork);

impl BilledRequest for AccountedRequest {
    fn work(&mut self) -> (&mut RequestWork, Phase) {
        (&mut self.0, Phase::Decode)
    }
}

/// Microseconds of one token's share of iterations.
fn token(addresses: &[Arc<str>]) -> f64 {
    let mut requests: Vec<AccountedRequest> =
        (0..BATCH).map(|_| AccountedRequest(RequestWork::default())).collect();
    // One expert of each token in each remote function.
    let slots: Vec<Vec<u32>> = (0..REMOTE as u32)
        .map(|link| (0..BATCH as u32).map(|row| row * REMOTE as u32 + link).collect())
        .collect();
    let (mut pairs, begun) = (PairCounts::default(), Instant::now());
    let mut attribution = Attribution::new(begun);
    attribution.set_links(addresses.iter().map(|address| &**address), begun);
    let started = Instant::now();
    for iteration in 0..REQUESTS as u64 {
        pairs.begin(BATCH, REMOTE);
        for _ in 0..LAYERS {
            for (link, slots) in slots.iter().enumerate() {
                pairs.count(link, slots, REMOTE);
            }
        }
        let passed = attribution.end_iteration(begun + Duration::from_millis(10 * (iteration + 1)));
        attribution.attribute(passed, &mut requests, (0..BATCH).map(|row| row..row + 1), &pairs);
    }
    std::hint::black_box(&requests);
    started.elapsed().as_secs_f64() * 1e6 / (REQUESTS * BATCH) as f64
}
