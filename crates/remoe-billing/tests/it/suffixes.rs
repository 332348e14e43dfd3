//! Totals of a ledger whose oldest files were removed: the remaining records add up, and missing ones are reported.

use proptest::prelude::*;
use remoe_billing::{
    Basis, FunctionEvent, FunctionRecord, FunctionTotals, Ledger, LedgerLimits, LedgerTotals, Meter, Phases,
    Rate, Rates, Record, RequestRecord, RequestWork, WorkShare, records,
};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Nanoseconds of a second.
const SECOND: u64 = 1_000_000_000;
const SMALL: LedgerLimits = LedgerLimits { file_bytes: 1500, files: 10_000 };

/// True history of a function.
#[derive(Clone)]
struct TrueFunction {
    name: String,
    is_main: bool,
    rate: Rate,
    started: u64,
    serving: u64,
    /// End, or the time after which nothing is known of it.
    ended: Option<u64>,
    /// Working time by main function in nanoseconds.
    busy: BTreeMap<String, u64>,
}

/// Simulated deployment with all records written about it.
struct BilledDeployment {
    now: u64,
    functions: Vec<TrueFunction>,
    meter: Meter,
    log: Vec<Record>,
}

/// Event: its kind, the number of its function, and two durations.
type SimulatedEvent = (u8, usize, u64, u64);

impl BilledDeployment {
    fn new() -> Self {
        let now = 1_700_000_000 * SECOND;
        let log = vec![Record::Opened { at: now, prices: "p".to_owned() }];
        Self { now, functions: Vec::new(), meter: Meter::default(), log }
    }

    fn record_event(&mut self, name: &str, event: FunctionEvent) {
        let (model, function) = (model_of(name).to_owned(), name.to_owned());
        self.log.push(Record::Function(FunctionRecord { at: self.now, model, function, event }));
    }

    fn record_start(&mut self, function: &TrueFunction) {
        let tier = if function.is_main { "main" } else { "group-0" }.to_owned();
        let event = FunctionEvent::Started { tier, rate: function.rate, basis: Basis::Alive };
        self.record_event(&function.name, event);
    }

    fn start_function(&mut self, is_main: bool, rate: u64, load: u64) {
        let (name, started) = (format!("f-{}", self.functions.len()), self.now);
        let (rate, serving) = (Rate(rate), started + load);
        let function =
            TrueFunction { name, is_main, rate, started, serving, ended: None, busy: BTreeMap::new() };
        self.record_start(&function);
        self.now += load;
        self.record_event(&function.name, FunctionEvent::Serving);
        self.functions.push(function);
    }

    fn alive(&self, is_main: bool) -> Vec<usize> {
        let alive = |one: &&TrueFunction| one.ended.is_none() && one.is_main == is_main;
        let numbered = self.functions.iter().enumerate();
        numbered.filter(|(_, one)| alive(one)).map(|(number, _)| number).collect()
    }

    /// A main function and the first remote one work for a request.
    fn run_request(&mut self, which: usize, waited: u64, worked: u64, is_answered: bool) {
        let mains = self.alive(true);
        let Some(&main) = mains.get(which % mains.len().max(1)) else { return };
        self.now += waited + worked;
        let main_name = self.functions[main].name.clone();
        if !is_answered {
            let (since, model, tenant) = (self.now - worked, "m".to_owned(), String::new());
            let (id, function) = (String::new(), main_name);
            let lost = Record::Lost { at: self.now, since, estimate: 0, model, tenant, function, id };
            return self.log.push(lost);
        }
        let work_of = |function: &mut TrueFunction| {
            let busy = function.busy.entry(main_name.clone()).or_default();
            *busy += worked;
            WorkShare { share: Phases { prefill: worked / 3, decode: worked - worked / 3 }, busy: *busy }
        };
        let mut work = RequestWork { main: work_of(&mut self.functions[main]), ..RequestWork::default() };
        work.served = self.now - self.functions[main].serving;
        let remote = self.alive(false).first().copied();
        if let Some(remote) = remote {
            work.remote.insert("far".into(), work_of(&mut self.functions[remote]));
        }
        let mut rates = Rates([("main".to_owned(), self.functions[main].rate)].into());
        rates.0.extend(remote.map(|remote| ("far".to_owned(), self.functions[remote].rate)));
        // Fractions that the meter carries belong to one function.
        self.meter = Meter::default();
        let billed = self.meter.report(&work, &rates);
        let named = |(name, share): (String, _)| match (name.as_str(), remote) {
            ("far", Some(remote)) => (self.functions[remote].name.clone(), share),
            _ => (main_name.clone(), share),
        };
        self.log.push(Record::Request(RequestRecord {
            at: self.now,
            id: String::new(),
            model: "m".to_owned(),
            tenant: "t".to_owned(),
            function: main_name.clone(),
            prompt_tokens: 1,
            completion_tokens: 1,
            shares: billed.shares.into_iter().map(named).collect(),
            rivals: BTreeMap::new(),
            served: billed.served,
        }));
    }

    /// The writer is killed and opens the ledger again. Functions whose numbers are multiples of `which + 1` are
    /// still alive.
    fn kill_writer(&mut self, which: usize, pause: u64) {
        let last = self.now;
        self.now += pause;
        self.log.push(Record::Opened { at: self.now, prices: "q".to_owned() });
        for number in 0..self.functions.len() {
            let function = self.functions[number].clone();
            match function.ended {
                Some(_) => {}
                None if number % (which + 1) == 0 => self.record_start(&function),
                None => self.functions[number].ended = Some(last),
            }
        }
    }

    fn apply(&mut self, (what, which, one, other): SimulatedEvent) {
        match what {
            0 => self.start_function(which % 2 == 0, 1 + other, one),
            1..=4 => self.run_request(which, one, other, true),
            5 => self.run_request(which, one, other, false),
            6 => {
                self.now += one;
                self.log.push(Record::Alive { at: self.now, overhead: other % 1000 });
            }
            7 => self.kill_writer(which, one),
            _ => {
                let alive: Vec<usize> = [self.alive(true), self.alive(false)].concat();
                let Some(&number) = alive.get(which % alive.len().max(1)) else { return };
                self.now += one;
                let name = self.functions[number].name.clone();
                self.record_event(&name, FunctionEvent::Replaced);
                self.now += other;
                self.record_event(&name, FunctionEvent::Stopped);
                self.functions[number].ended = Some(self.now);
            }
        }
    }

    fn write(&self, folder: &Path) {
        for life in self.log.chunk_by(|_, next| !matches!(next, Record::Opened { .. })) {
            let ledger = Ledger::open(folder, SMALL).unwrap();
            life.iter().for_each(|record| ledger.append(record).unwrap());
            drop(ledger);
            // As if the writer died after creating the next file, before writing its header.
            let (last, number) = (files(folder).pop().unwrap(), files(folder).len());
            if std::fs::metadata(&last).unwrap().len() >= SMALL.file_bytes {
                std::fs::write(folder.join(format!("ledger-{:06}.log", number + 1)), "").unwrap();
            }
        }
    }
}

/// Returns the model of a function. Pairs of functions alternate between two models.
fn model_of(function: &str) -> &'static str {
    if function.ends_with(['0', '1', '4', '5', '8', '9']) { "m" } else { "n" }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
    files.sort();
    files
}

fn sum_costs(records: &[Record], functions: &BTreeSet<&str>) -> u64 {
    let shares = records.iter().filter_map(|record| match record {
        Record::Request(request) => Some(request.shares.iter()),
        _ => None,
    });
    let known = shares.flatten().filter(|(name, _)| functions.contains(name.as_str()));
    known.map(|(_, share)| share.cost.sum()).sum()
}

fn sum(totals: &LedgerTotals) -> i128 {
    let parts = [
        totals.answered.cost,
        totals.earlier,
        totals.failed,
        totals.idle,
        totals.cold_start,
        totals.overlap,
        totals.overhead,
    ];
    parts.iter().map(|part| i128::from(*part)).sum::<i128>() + i128::from(totals.residual)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Whichever files remain, requests are those in them, and functions known to them are paid for from start to
    /// end.
    #[test]
    fn remaining_files_add_up(moves in prop::collection::vec((0_u8..9, 0_usize..6, 0..SECOND * 20, 0..SECOND * 9), 1..80)) {
        let folder = tempfile::tempdir().unwrap();
        let mut deployment = BilledDeployment::new();
        deployment.start_function(true, 44_000_000, SECOND);
        deployment.start_function(false, 9_000_000, SECOND);
        moves.into_iter().for_each(|each| deployment.apply(each));
        deployment.write(folder.path());
        for oldest in files(folder.path()) {
            let remaining: Vec<Record> = records(folder.path()).unwrap().map(Result::unwrap).collect();
            let totals = LedgerTotals::from_records(remaining.iter().cloned().map(Ok)).unwrap();
            let known: BTreeSet<&str> = remaining.iter().filter_map(|record| match record {
                Record::Carried { function, .. } => Some(function.as_str()),
                Record::Function(FunctionRecord { function, event: FunctionEvent::Started { .. }, .. }) => {
                    Some(function.as_str())
                }
                _ => None,
            }).collect();
            let lived = deployment.functions.iter().filter(|function| known.contains(function.name.as_str()));
            let mut cost_by_model = BTreeMap::from([("m", 0), ("n", 0)]);
            for one in lived {
                let cost = one.rate.cost(one.ended.unwrap_or(deployment.now) - one.started);
                *cost_by_model.get_mut(model_of(&one.name)).unwrap() += cost;
            }
            let lived: u64 = cost_by_model.values().sum();
            prop_assert_eq!((totals.unknown, totals.paid), (0, lived + totals.overhead), "{:?}", remaining);
            prop_assert_eq!(i128::from(totals.paid), sum(&totals));
            for (model, lived) in cost_by_model {
                let paid = totals.functions_by_model.get(model).map_or(0, |functions| functions.paid);
                prop_assert_eq!(paid, lived, "{}", model);
            }
            // Each request loses up to one nano-dollar to rounding, in its prompt and in its answer.
            let requests = remaining.len() as i64 + deployment.log.len() as i64;
            prop_assert!(totals.residual.abs() <= requests, "{}", totals.residual);
            prop_assert_eq!(totals.answered.cost, sum_costs(&remaining, &known));
            prop_assert_eq!(totals.answered.cost + totals.earlier, sum_costs(&deployment.log, &known));
            std::fs::remove_file(oldest).unwrap();
        }
    }

    /// Two gateways record the same functions, and each its own requests. Together they equal the ledger of a single
    /// gateway. The second one writes nothing after the first one was killed.
    #[test]
    fn several_ledgers_equal_a_single_one(moves in prop::collection::vec((0_u8..9, 0_usize..6, 0..SECOND * 20, 0..SECOND * 9), 1..80)) {
        let mut deployment = BilledDeployment::new();
        deployment.start_function(true, 44_000_000, SECOND);
        deployment.start_function(false, 9_000_000, SECOND);
        moves.into_iter().for_each(|each| deployment.apply(each));
        deployment.now += 60 * SECOND;
        deployment.log.push(Record::Alive { at: deployment.now, overhead: 1 });
        let killed = deployment.log[1..].iter().position(|record| matches!(record, Record::Opened { .. }));
        let last = killed.map_or(deployment.log.len() - 2, |at| at);
        let records_of = |which: usize| {
            let numbered = deployment.log.iter().enumerate();
            let written = numbered.filter(move |(number, record)| match record {
                _ if *number > last => which == 0,
                Record::Request(_) | Record::Lost { .. } | Record::Alive { .. } => number % 2 == which,
                _ => true,
            });
            written.map(|(_, record)| Ok(record.clone()))
        };
        let one = LedgerTotals::from_records(deployment.log.iter().cloned().map(Ok)).unwrap();
        let several = LedgerTotals::from_ledgers([0, 1].into_iter().map(records_of)).unwrap();
        prop_assert_eq!((several.paid, several.answered, several.unknown), (one.paid, one.answered, 0));
        prop_assert_eq!((several.alive, several.per_hour), (one.alive, one.per_hour));
        let is_any = |(_, functions): &(_, FunctionTotals)| *functions != FunctionTotals::default();
        let without_idle = |totals: &LedgerTotals| -> Vec<(String, FunctionTotals)> {
            let all = totals.functions_by_model.clone().into_iter();
            all.map(|(model, functions)| (model, FunctionTotals { idle: 0, ..functions })).filter(is_any).collect()
        };
        prop_assert_eq!(without_idle(&several), without_idle(&one));
        prop_assert_eq!(several.functions_by_model.values().map(|functions| functions.idle).sum::<u64>(), several.idle);
        prop_assert_eq!(several.estimated, one.estimated);
        prop_assert_eq!((several.cold_start, several.overlap), (one.cold_start, one.overlap));
        prop_assert_eq!(i128::from(several.paid), sum(&several));
        prop_assert!(several.residual.abs() <= 2 * deployment.log.len() as i64, "{}", several.residual);
    }

    /// Costs of functions whose start is missing are reported as unknown.
    #[test]
    fn missing_starts_are_reported_as_unknown_cost(answers in 1_u64..40) {
        let mut deployment = BilledDeployment::new();
        deployment.start_function(true, 44_000_000, SECOND);
        (0..answers).for_each(|_| deployment.run_request(0, SECOND, SECOND, true));
        let remaining = deployment.log.split_off(deployment.log.len() - answers as usize);
        let totals = LedgerTotals::from_records(remaining.into_iter().map(Ok)).unwrap();
        prop_assert_eq!((totals.paid, totals.unknown), (0, totals.answered.cost));
        prop_assert_eq!(i128::from(totals.unknown), sum(&totals));
        prop_assert!(totals.residual_share() > 0.99);
    }
}
