//! Under every kind of fault, usage, header and ledger state the same cost.

mod client;
mod function;
mod script;

use crate::stage::{LONG, Stage};
use client::{ClientResult, send_scripted};
use function::{MainProcess, SharedState};
use remoe_billing::{Ledger, LedgerLimits, LedgerTotals, Rate, Record, RequestRecord, records};
use remoe_gateway_core::{
    Backend, Billing, CostAccounting, GatewayMetrics, GatewayOptions, Model, RunningFunctions, WakeMarks,
};
use script::{Fault, Script, SeededChoices};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const REQUESTS: u64 = 10_000;
/// Number of concurrent clients.
const CLIENTS: u64 = 48;
/// Number of main functions.
const MAIN_FUNCTIONS: usize = 3;

/// Main functions and remote functions that are killed and replaced all the time.
struct Churn {
    shared: Arc<SharedState>,
    model: Arc<Model>,
    mains: Vec<(String, MainProcess)>,
    choices: SeededChoices,
    started: u64,
}

impl Churn {
    async fn new(shared: Arc<SharedState>, model: Arc<Model>) -> Self {
        let mut churn = Self { shared, model, mains: Vec::new(), choices: SeededChoices::new(0), started: 0 };
        for _ in 0..2 {
            churn.replace_remote();
        }
        for index in 0..MAIN_FUNCTIONS {
            churn.replace_main(index).await;
        }
        churn.publish();
        churn
    }

    fn next_number(&mut self) -> u64 {
        self.started += 1;
        self.started
    }

    async fn replace_main(&mut self, index: usize) {
        let name = format!("main-{}", self.next_number());
        let main = (name, MainProcess::start(self.shared.clone()).await);
        match self.mains.get_mut(index) {
            Some(before) => *before = main,
            None => self.mains.push(main),
        }
    }

    /// Replaces one remote function by another.
    fn replace_remote(&mut self) {
        let address = format!("10.0.0.1:{}", self.next_number());
        let mut remote = self.shared.remote.lock().unwrap();
        if remote.len() > 1 {
            remote.remove(0);
        }
        remote.push(address);
    }

    /// Reports the running functions to the model.
    fn publish(&self) {
        let remote = self.shared.remote.lock().unwrap().clone();
        let backends = self.mains.iter().map(|(name, process)| {
            let mut billing = Billing::default();
            // Slightly more than a nano-dollar per microsecond, so that fractions occur.
            billing.rates.0.insert("main".to_owned(), Rate(3_600_000_007));
            billing.functions.insert("main".to_owned(), (name.clone(), "main".to_owned()));
            for address in &remote {
                billing.rates.0.insert(address.clone(), Rate(1_234_567_891));
                billing.functions.insert(address.clone(), (format!("f-{address}"), "group-0".to_owned()));
            }
            Backend {
                id: u64::from(process.address.port()) << 32 | name[5..].parse::<u64>().unwrap(),
                address: process.address,
                identity: None,
                capacity: 32,
                authorization: None,
                billing: Some(Arc::new(billing)),
            }
        });
        let (order, backends) = (self.model.launcher_orders().borrow().order, backends.collect());
        self.model.set_running_functions(RunningFunctions {
            order,
            backends,
            wake: WakeMarks::default(),
            functions: Vec::new(),
        });
    }

    /// Reports for a moment that nothing runs, so that streams begin before there is an answer.
    async fn outage(&self) {
        let order = self.model.launcher_orders().borrow().order;
        self.model.set_running_functions(RunningFunctions { order, ..RunningFunctions::default() });
        tokio::time::sleep(Duration::from_millis(3)).await;
    }

    async fn run(mut self) {
        loop {
            tokio::time::sleep(Duration::from_millis(4)).await;
            match self.choices.below(10) {
                0 => self.outage().await,
                1..=4 => {
                    let index = self.choices.below(MAIN_FUNCTIONS as u64) as usize;
                    self.replace_main(index).await;
                }
                _ => self.replace_remote(),
            }
            self.publish();
        }
    }
}

/// Reads the ledger in `folder`. Returns answered requests, and the numbers of lost ones. Asserts that no request is
/// answered twice.
fn read_ledger(folder: &Path) -> (BTreeMap<u64, RequestRecord>, BTreeSet<u64>) {
    let (mut answered, mut lost) = (BTreeMap::new(), BTreeSet::new());
    for record in records(folder).unwrap() {
        match record.unwrap() {
            Record::Request(request) => {
                let number = request.id.parse().unwrap();
                assert_eq!(answered.insert(number, request), None, "request {number} is booked twice");
            }
            Record::Lost { id, .. } => drop(lost.insert(id.parse().unwrap())),
            _ => {}
        }
    }
    (answered, lost)
}

/// Asserts that the costs in `result`, which a client saw, equal that of `record`. Returns the cost that the client
/// saw.
fn check_costs(
    number: u64,
    script: &Script,
    result: &ClientResult,
    record: Option<&RequestRecord>,
) -> Option<u64> {
    let context =
        || format!("request {number}: {script:?}, {record:?}, {}", String::from_utf8_lossy(&result.bytes));
    let cost = record.map(|record| record.cost(record.function.as_str()));
    let total = cost.as_ref().map(|cost| cost.total);
    if result.header.is_some() {
        assert_eq!(result.header, total, "{}", context());
    }
    if result.usage.is_some() {
        assert_eq!(result.usage, cost, "{}", context());
    }
    if result.is_complete && record.is_some() {
        let has_header = script.has_header && (!script.is_stream || script.takes_trailers);
        assert_eq!(result.header.is_some(), has_header, "{}", context());
        assert_eq!(result.usage.is_some(), script.has_figures && script.api.has_figures(), "{}", context());
    }
    result.header.or(result.usage.as_ref().map(|usage| usage.total))
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_and_header_state_what_ledger_has_under_every_fault() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path(), LedgerLimits::default()).unwrap();
    let metrics = GatewayMetrics::new().unwrap();
    let cost_accounting = Arc::new(CostAccounting::open(Some(ledger), "p", metrics.registry()).unwrap());
    let options = GatewayOptions { cost_accounting: Some(cost_accounting), ..GatewayOptions::default() };
    let mut stage = Stage::new(options, |model| model.max_requests = 1000, 8, None).await;
    stage.stop_launcher().await;
    let shared = Arc::new(SharedState::default());
    let churn = tokio::spawn(Churn::new(shared.clone(), stage.model.clone()).await.run());

    let next = Arc::new(AtomicU64::new(0));
    let gateway = stage.address;
    let clients = (0..CLIENTS).map(|_| {
        let next = next.clone();
        tokio::spawn(async move {
            let mut results = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= REQUESTS {
                    return results;
                }
                let script = Script::for_request(number);
                let result = tokio::time::timeout(LONG, send_scripted(gateway, number, &script)).await;
                let result = result.unwrap_or_else(|_| panic!("request {number} gets no answer"));
                results.push((number, result));
            }
        })
    });
    let mut results: Vec<(u64, ClientResult)> = Vec::new();
    for client in clients.collect::<Vec<_>>() {
        results.extend(client.await.unwrap());
    }
    stage.until(|stage| stage.model.load() == (0, 0)).await;
    churn.abort();

    let (answered, lost) = read_ledger(folder.path());
    let (mut reported, mut whole, mut sum) = (0, 0, 0);
    let log = shared.log.lock().unwrap();
    for (number, result) in &results {
        let script = Script::for_request(*number);
        let record = answered.get(number);
        if let Some(amount) = check_costs(*number, &script, result, record) {
            (reported, sum) = (reported + 1, sum + amount);
            assert_eq!(record.map(RequestRecord::total), Some(amount));
        }
        let is_unreported = |fault| matches!(fault, Fault::OmitsCost | Fault::SendsInvalidCost);
        let is_cost_missing = script.faults.into_iter().any(is_unreported);
        if result.is_complete {
            whole += 1;
            assert!(
                record.is_some() || is_cost_missing,
                "request {number} is not booked: {script:?} {result:?}"
            );
        }
        let text = String::from_utf8_lossy(&result.bytes);
        let placeholder = log.placeholders.get(number);
        assert!(placeholder.is_none_or(|placeholder| !text.contains(placeholder)), "{number}: {text}");
        // Requests whose cost no client saw are in the ledger, too.
        if log.had.contains(number) {
            assert!(record.is_some() || lost.contains(number), "request {number} left no trace: {script:?}");
        }
    }
    assert!(answered.keys().all(|number| log.had.contains(number)), "the ledger has what no function had");
    let totals_of_ledger = LedgerTotals::from_records(records(folder.path()).unwrap()).unwrap();
    let totals: u64 = answered.values().map(RequestRecord::total).sum();
    assert_eq!(
        (totals_of_ledger.answered.requests, totals_of_ledger.answered.cost),
        (answered.len() as u64, totals)
    );
    println!(
        "{whole} whole answers of {REQUESTS}, {reported} told {sum} n$; {} answered for {totals} n$, {} lost, {} with functions that \
         joined",
        answered.len(),
        lost.len(),
        log.joined
    );
    // Every kind of fault has happened, and most answers came through.
    assert!(
        whole > REQUESTS / 2
            && reported > REQUESTS / 4
            && lost.len() as u64 > REQUESTS / 20
            && log.joined > 50
    );
}
