//! What knowing the cost of every request costs.

use crate::context::Context;
use crate::error::{Result, While};
use crate::pace::Share;
use crate::report::{Bar, Part};
use crate::series::Series;
use remoe_ledger::{
    Account, Basis, FunctionEvent, FunctionRecord, Ledger, LedgerLimits, Meter, Phases, Rate, Rates, Record,
    RequestRecord, Told, Work, Worked, split,
};
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;

const NAME: &str = "Accounting of requests";
const ROUNDS: usize = 20;
/// Requests of a round, and iterations.
const REQUESTS: usize = 2000;
/// Requests in an iteration, each with one token.
const BATCH: usize = 8;
/// Remote functions that work for each.
const REMOTE: usize = 8;

/// Microseconds.
const REQUEST_BAR: Bar = Bar::AtMost(20.0);
const TOKEN_BAR: Bar = Bar::AtMost(1.0);

pub(super) fn measure(context: &Context, share: &Share) -> Result<Part> {
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
    let mut part = Part::new(NAME, json!({"remote_functions": REMOTE, "requests_in_an_iteration": BATCH}));
    part.add_with_bar(
        "a request: told, handed over, added up, written to the ledger",
        "µs",
        &requests,
        REQUEST_BAR,
    );
    part.add_with_bar("a token: its share of an iteration of all functions", "µs", &tokens, TOKEN_BAR);
    part.note("The ledger is in the folder of temporary files; a record is one write to the page cache.");
    part.conclude(ending);
    Ok(part)
}

/// Microseconds of one request of many.
fn request(addresses: &[Arc<str>]) -> Result<f64> {
    let writing = || "writing a ledger";
    let folder = tempfile::tempdir().doing(writing)?;
    let ledger = Ledger::open(folder.path(), LedgerLimits::default()).doing(writing)?;
    let names = addresses.iter().map(|address| address.to_string()).chain(["main".to_owned()]);
    let rates = Rates(names.clone().map(|name| (name, Rate(44_000_000))).collect());
    let mut account = Account::default();
    for function in names {
        let event =
            FunctionEvent::Started { tier: "main".to_owned(), rate: Rate(44_000_000), basis: Basis::Alive };
        account
            .add(&Record::Function(FunctionRecord { at: 0, model: "m".to_owned(), function, event }))
            .doing(writing)?;
    }
    let meter = Meter::default();
    let worked = Worked { share: Phases { prefill: 12_345_678, decode: 87_654_321 }, busy: 1 << 40 };
    let remote = addresses.iter().map(|address| (address.clone(), worked)).collect();
    let work = Work { main: worked, remote, served: 1 << 41 };
    let started = Instant::now();
    for number in 0..REQUESTS {
        let header = serde_json::to_string(&meter.tell(&work, &rates)).doing(writing)?;
        let told: Told = serde_json::from_str(&header).doing(writing)?;
        let record = Record::Request(RequestRecord {
            at: number as u64,
            id: format!("{number:032x}"),
            model: "m".to_owned(),
            tenant: "t".to_owned(),
            function: "main".to_owned(),
            prompt_tokens: 100,
            completion_tokens: 100,
            shares: told.shares,
            rivals: told.rivals,
            served: told.served,
        });
        ledger.append(&record).doing(writing)?;
        account.add(&record).doing(writing)?;
    }
    Ok(started.elapsed().as_secs_f64() * 1e6 / REQUESTS as f64)
}

/// Microseconds of one token's share of iterations.
fn token(addresses: &[Arc<str>]) -> f64 {
    let mut works = vec![Work::default(); BATCH];
    let started = Instant::now();
    for iteration in 0..REQUESTS as u64 {
        let nanoseconds = 10_000_000 + iteration;
        for (work, share) in works.iter_mut().zip(split(nanoseconds, [1; BATCH].into_iter())) {
            work.main.share.decode += share;
            work.main.busy += nanoseconds;
        }
        for address in addresses {
            let pairs = (0..BATCH as u64).map(|row| row * 7 + iteration);
            for (work, share) in works.iter_mut().zip(split(nanoseconds, pairs)) {
                let worked = work.remote.entry(address.clone()).or_default();
                worked.share.decode += share;
                worked.busy += nanoseconds;
            }
        }
    }
    std::hint::black_box(&works);
    started.elapsed().as_secs_f64() * 1e6 / (REQUESTS * BATCH) as f64
}
