//! Money told is money booked: under every kind of fault usage, header and ledger state one cost.

mod client;
mod function;
mod script;

use crate::stage::{LONG, Stage};
use client::{ClientView, ask};
use function::{Process, World};
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
/// Clients at the same time.
const CLIENTS: u64 = 48;
/// Main functions.
const MAINS: usize = 3;

/// Functions that are killed and replaced all the time.
struct Churn {
    world: Arc<World>,
    model: Arc<Model>,
    mains: Vec<(String, Process)>,
    dice: SeededChoices,
    started: u64,
}

impl Churn {
    async fn new(world: Arc<World>, model: Arc<Model>) -> Self {
        let mut churn = Self { world, model, mains: Vec::new(), dice: SeededChoices::new(0), started: 0 };
        for _ in 0..2 {
            churn.replace_remote();
        }
        for place in 0..MAINS {
            churn.replace_main(place).await;
        }
        churn.tell();
        churn
    }

    fn number(&mut self) -> u64 {
        self.started += 1;
        self.started
    }

    async fn replace_main(&mut self, place: usize) {
        let name = format!("main-{}", self.number());
        let main = (name, Process::start(self.world.clone()).await);
        match self.mains.get_mut(place) {
            Some(before) => *before = main,
            None => self.mains.push(main),
        }
    }

    /// One remote function is gone, and another one there.
    fn replace_remote(&mut self) {
        let address = format!("10.0.0.1:{}", self.number());
        let mut remote = self.world.remote.lock().unwrap();
        if remote.len() > 1 {
            remote.remove(0);
        }
        remote.push(address);
    }

    /// Tells the model what runs now.
    fn tell(&self) {
        let remote = self.world.remote.lock().unwrap().clone();
        let backends = self.mains.iter().map(|(name, process)| {
            let mut billing = Billing::default();
            // A nano-dollar a microsecond, and a fraction.
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
        let (order, backends) = (self.model.want().borrow().order, backends.collect());
        self.model.runs(RunningFunctions {
            order,
            backends,
            wake: WakeMarks::default(),
            functions: Vec::new(),
        });
    }

    /// Nothing runs for a moment: streams begin before there is an answer.
    async fn outage(&self) {
        let order = self.model.want().borrow().order;
        self.model.runs(RunningFunctions { order, ..RunningFunctions::default() });
        tokio::time::sleep(Duration::from_millis(3)).await;
    }

    async fn run(mut self) {
        loop {
            tokio::time::sleep(Duration::from_millis(4)).await;
            match self.dice.below(10) {
                0 => self.outage().await,
                1..=4 => {
                    let place = self.dice.below(MAINS as u64) as usize;
                    self.replace_main(place).await;
                }
                _ => self.replace_remote(),
            }
            self.tell();
        }
    }
}

/// The ledger in `folder`: answered requests, none of which is there twice, and those that were lost.
fn booked(folder: &Path) -> (BTreeMap<u64, RequestRecord>, BTreeSet<u64>) {
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

/// Asserts that a client that saw `sight` was told what `record` says. Returns what it was told.
fn is_booked(
    number: u64,
    script: &Script,
    sight: &ClientView,
    record: Option<&RequestRecord>,
) -> Option<u64> {
    let context =
        || format!("request {number}: {script:?}, {record:?}, {}", String::from_utf8_lossy(&sight.bytes));
    let cost = record.map(|record| record.cost(record.function.as_str()));
    let total = cost.as_ref().map(|cost| cost.total);
    if sight.header.is_some() {
        assert_eq!(sight.header, total, "{}", context());
    }
    if sight.usage.is_some() {
        assert_eq!(sight.usage, cost, "{}", context());
    }
    if sight.is_whole && record.is_some() {
        let has_header = script.has_header && (!script.is_stream || script.takes_trailers);
        assert_eq!(sight.header.is_some(), has_header, "{}", context());
        assert_eq!(sight.usage.is_some(), script.has_figures && script.api.has_figures(), "{}", context());
    }
    sight.header.or(sight.usage.as_ref().map(|usage| usage.total))
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_and_header_state_what_ledger_has_under_every_fault() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path(), LedgerLimits::default()).unwrap();
    let metrics = GatewayMetrics::new().unwrap();
    let cost_accounting = Arc::new(CostAccounting::open(Some(ledger), "p", metrics.registry()).unwrap());
    let options = GatewayOptions { cost_accounting: Some(cost_accounting), ..GatewayOptions::default() };
    let mut stage = Stage::new(options, |model| model.max_requests = 1000, 8, None).await;
    stage.takes_over().await;
    let world = Arc::new(World::default());
    let churn = tokio::spawn(Churn::new(world.clone(), stage.model.clone()).await.run());

    let next = Arc::new(AtomicU64::new(0));
    let gateway = stage.address;
    let clients = (0..CLIENTS).map(|_| {
        let next = next.clone();
        tokio::spawn(async move {
            let mut sights = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= REQUESTS {
                    return sights;
                }
                let script = Script::of(number);
                let sight = tokio::time::timeout(LONG, ask(gateway, number, &script)).await;
                let sight = sight.unwrap_or_else(|_| panic!("request {number} gets no answer"));
                sights.push((number, sight));
            }
        })
    });
    let mut sights: Vec<(u64, ClientView)> = Vec::new();
    for client in clients.collect::<Vec<_>>() {
        sights.extend(client.await.unwrap());
    }
    stage.until(|stage| stage.model.load() == (0, 0)).await;
    churn.abort();

    let (answered, lost) = booked(folder.path());
    let (mut told, mut whole, mut sum) = (0, 0, 0);
    let seen = world.seen.lock().unwrap();
    for (number, sight) in &sights {
        let script = Script::of(*number);
        let record = answered.get(number);
        if let Some(amount) = is_booked(*number, &script, sight, record) {
            (told, sum) = (told + 1, sum + amount);
            assert_eq!(record.map(RequestRecord::total), Some(amount));
        }
        let tells = |fault| matches!(fault, Fault::TellsNothing | Fault::TellsNonsense);
        let is_untold = script.faults.into_iter().any(tells);
        if sight.is_whole {
            whole += 1;
            assert!(record.is_some() || is_untold, "request {number} is not booked: {script:?} {sight:?}");
        }
        let text = String::from_utf8_lossy(&sight.bytes);
        let placeholder = seen.placeholders.get(number);
        assert!(placeholder.is_none_or(|placeholder| !text.contains(placeholder)), "{number}: {text}");
        // What clients cannot see is in the ledger all the same.
        if seen.had.contains(number) {
            assert!(record.is_some() || lost.contains(number), "request {number} left no trace: {script:?}");
        }
    }
    assert!(answered.keys().all(|number| seen.had.contains(number)), "the ledger has what no function had");
    let account = LedgerTotals::of(records(folder.path()).unwrap()).unwrap();
    let totals: u64 = answered.values().map(RequestRecord::total).sum();
    assert_eq!((account.answered.requests, account.answered.cost), (answered.len() as u64, totals));
    println!(
        "{whole} whole answers of {REQUESTS}, {told} told {sum} n$; {} answered for {totals} n$, {} lost, {} with functions that \
         joined",
        answered.len(),
        lost.len(),
        seen.joined
    );
    // Every kind of fault has happened, and most answers came through.
    assert!(
        whole > REQUESTS / 2 && told > REQUESTS / 4 && lost.len() as u64 > REQUESTS / 20 && seen.joined > 50
    );
}
