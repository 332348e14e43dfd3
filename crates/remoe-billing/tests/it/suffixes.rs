//! A ledger whose oldest files are gone adds up what is left, or says what it lacks.

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

/// A function as it really was.
#[derive(Clone)]
struct TrueFunction {
    name: String,
    is_main: bool,
    rate: Rate,
    started: u64,
    serving: u64,
    /// Time from which it is unknown.
    ended: Option<u64>,
    /// How long it has worked, by main function.
    busy: BTreeMap<String, u64>,
}

/// A deployment, and all that was written about it.
struct BilledDeployment {
    now: u64,
    functions: Vec<TrueFunction>,
    meter: Meter,
    log: Vec<Record>,
}

/// Next event: its kind, its function, and two durations.
type Move = (u8, usize, u64, u64);

impl BilledDeployment {
    fn new() -> Self {
        let now = 1_700_000_000 * SECOND;
        let log = vec![Record::Opened { at: now, prices: "p".to_owned() }];
        Self { now, functions: Vec::new(), meter: Meter::default(), log }
    }

    fn says(&mut self, name: &str, event: FunctionEvent) {
        let (model, function) = (model_of(name).to_owned(), name.to_owned());
        self.log.push(Record::Function(FunctionRecord { at: self.now, model, function, event }));
    }

    fn declares(&mut self, function: &TrueFunction) {
        let tier = if function.is_main { "main" } else { "group-0" }.to_owned();
        let event = FunctionEvent::Started { tier, rate: function.rate, basis: Basis::Alive };
        self.says(&function.name, event);
    }

    fn starts(&mut self, is_main: bool, rate: u64, load: u64) {
        let (name, started) = (format!("f-{}", self.functions.len()), self.now);
        let (rate, serving) = (Rate(rate), started + load);
        let function =
            TrueFunction { name, is_main, rate, started, serving, ended: None, busy: BTreeMap::new() };
        self.declares(&function);
        self.now += load;
        self.says(&function.name, FunctionEvent::Serving);
        self.functions.push(function);
    }

    fn alive(&self, is_main: bool) -> Vec<usize> {
        let alive = |one: &&TrueFunction| one.ended.is_none() && one.is_main == is_main;
        let numbered = self.functions.iter().enumerate();
        numbered.filter(|(_, one)| alive(one)).map(|(number, _)| number).collect()
    }

    /// A main function works for a request, and the first remote one with it.
    fn works(&mut self, which: usize, waited: u64, worked: u64, is_answered: bool) {
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
        let of = |function: &mut TrueFunction| {
            let busy = function.busy.entry(main_name.clone()).or_default();
            *busy += worked;
            WorkShare { share: Phases { prefill: worked / 3, decode: worked - worked / 3 }, busy: *busy }
        };
        let mut work = RequestWork { main: of(&mut self.functions[main]), ..RequestWork::default() };
        work.served = self.now - self.functions[main].serving;
        let remote = self.alive(false).first().copied();
        if let Some(remote) = remote {
            work.remote.insert("far".into(), of(&mut self.functions[remote]));
        }
        let mut rates = Rates([("main".to_owned(), self.functions[main].rate)].into());
        rates.0.extend(remote.map(|remote| ("far".to_owned(), self.functions[remote].rate)));
        // Fractions that one function carries are not another's.
        self.meter = Meter::default();
        let told = self.meter.report(&work, &rates);
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
            shares: told.shares.into_iter().map(named).collect(),
            rivals: BTreeMap::new(),
            served: told.served,
        }));
    }

    /// The writer is killed and opens the ledger again; functions whose numbers are multiples of `which` live on.
    fn killed(&mut self, which: usize, pause: u64) {
        let last = self.now;
        self.now += pause;
        self.log.push(Record::Opened { at: self.now, prices: "q".to_owned() });
        for number in 0..self.functions.len() {
            let function = self.functions[number].clone();
            match function.ended {
                Some(_) => {}
                None if number % (which + 1) == 0 => self.declares(&function),
                None => self.functions[number].ended = Some(last),
            }
        }
    }

    fn makes(&mut self, (what, which, one, other): Move) {
        match what {
            0 => self.starts(which % 2 == 0, 1 + other, one),
            1..=4 => self.works(which, one, other, true),
            5 => self.works(which, one, other, false),
            6 => {
                self.now += one;
                self.log.push(Record::Alive { at: self.now, overhead: other % 1000 });
            }
            7 => self.killed(which, one),
            _ => {
                let alive: Vec<usize> = [self.alive(true), self.alive(false)].concat();
                let Some(&number) = alive.get(which % alive.len().max(1)) else { return };
                self.now += one;
                let name = self.functions[number].name.clone();
                self.says(&name, FunctionEvent::Replaced);
                self.now += other;
                self.says(&name, FunctionEvent::Stopped);
                self.functions[number].ended = Some(self.now);
            }
        }
    }

    fn write(&self, folder: &Path) {
        for life in self.log.chunk_by(|_, next| !matches!(next, Record::Opened { .. })) {
            let ledger = Ledger::open(folder, SMALL).unwrap();
            life.iter().for_each(|record| ledger.append(record).unwrap());
            drop(ledger);
            // The next file was begun, and its head did not fit.
            let (last, number) = (files(folder).pop().unwrap(), files(folder).len());
            if std::fs::metadata(&last).unwrap().len() >= SMALL.file_bytes {
                std::fs::write(folder.join(format!("ledger-{:06}.log", number + 1)), "").unwrap();
            }
        }
    }
}

/// Functions are of two models in turn.
fn model_of(function: &str) -> &'static str {
    if function.ends_with(['0', '1', '4', '5', '8', '9']) { "m" } else { "n" }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
    files.sort();
    files
}

fn told(records: &[Record], functions: &BTreeSet<&str>) -> u64 {
    let shares = records.iter().filter_map(|record| match record {
        Record::Request(request) => Some(request.shares.iter()),
        _ => None,
    });
    let of = shares.flatten().filter(|(name, _)| functions.contains(name.as_str()));
    of.map(|(_, share)| share.cost.sum()).sum()
}

fn sum(account: &LedgerTotals) -> i128 {
    let parts = [
        account.answered.cost,
        account.earlier,
        account.failed,
        account.idle,
        account.cold_start,
        account.overlap,
        account.overhead,
    ];
    parts.iter().map(|part| i128::from(*part)).sum::<i128>() + i128::from(account.residual)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Whichever files are left: requests are those in them, and functions that were alive are paid for from their
    /// starts to their ends.
    #[test]
    fn what_is_left_adds_up(moves in prop::collection::vec((0_u8..9, 0_usize..6, 0..SECOND * 20, 0..SECOND * 9), 1..80)) {
        let folder = tempfile::tempdir().unwrap();
        let mut deployment = BilledDeployment::new();
        deployment.starts(true, 44_000_000, SECOND);
        deployment.starts(false, 9_000_000, SECOND);
        moves.into_iter().for_each(|each| deployment.makes(each));
        deployment.write(folder.path());
        for oldest in files(folder.path()) {
            let left: Vec<Record> = records(folder.path()).unwrap().map(Result::unwrap).collect();
            let account = LedgerTotals::from_records(left.iter().cloned().map(Ok)).unwrap();
            let known: BTreeSet<&str> = left.iter().filter_map(|record| match record {
                Record::Carried { function, .. } => Some(function.as_str()),
                Record::Function(FunctionRecord { function, event: FunctionEvent::Started { .. }, .. }) => {
                    Some(function.as_str())
                }
                _ => None,
            }).collect();
            let lived = deployment.functions.iter().filter(|function| known.contains(function.name.as_str()));
            let mut by_model = BTreeMap::from([("m", 0), ("n", 0)]);
            for one in lived {
                let cost = one.rate.cost(one.ended.unwrap_or(deployment.now) - one.started);
                *by_model.get_mut(model_of(&one.name)).unwrap() += cost;
            }
            let lived: u64 = by_model.values().sum();
            prop_assert_eq!((account.unknown, account.paid), (0, lived + account.overhead), "{:?}", left);
            prop_assert_eq!(i128::from(account.paid), sum(&account));
            for (model, lived) in by_model {
                let paid = account.functions_by_model.get(model).map_or(0, |functions| functions.paid);
                prop_assert_eq!(paid, lived, "{}", model);
            }
            // Each request's fraction of a nano-dollar was lost, in prompts and in answers.
            let requests = left.len() as i64 + deployment.log.len() as i64;
            prop_assert!(account.residual.abs() <= requests, "{}", account.residual);
            prop_assert_eq!(account.answered.cost, told(&left, &known));
            prop_assert_eq!(account.answered.cost + account.earlier, told(&deployment.log, &known));
            std::fs::remove_file(oldest).unwrap();
        }
    }

    /// Two gateways write the same functions down, and each its own requests: together they are what one would have.
    /// The second one is never heard of again when the first one is killed.
    #[test]
    fn several_ledgers_are_one(moves in prop::collection::vec((0_u8..9, 0_usize..6, 0..SECOND * 20, 0..SECOND * 9), 1..80)) {
        let mut deployment = BilledDeployment::new();
        deployment.starts(true, 44_000_000, SECOND);
        deployment.starts(false, 9_000_000, SECOND);
        moves.into_iter().for_each(|each| deployment.makes(each));
        deployment.now += 60 * SECOND;
        deployment.log.push(Record::Alive { at: deployment.now, overhead: 1 });
        let killed = deployment.log[1..].iter().position(|record| matches!(record, Record::Opened { .. }));
        let last = killed.map_or(deployment.log.len() - 2, |at| at);
        let of = |which: usize| {
            let numbered = deployment.log.iter().enumerate();
            let written = numbered.filter(move |(number, record)| match record {
                _ if *number > last => which == 0,
                Record::Request(_) | Record::Lost { .. } | Record::Alive { .. } => number % 2 == which,
                _ => true,
            });
            written.map(|(_, record)| Ok(record.clone()))
        };
        let one = LedgerTotals::from_records(deployment.log.iter().cloned().map(Ok)).unwrap();
        let several = LedgerTotals::from_ledgers([0, 1].into_iter().map(of)).unwrap();
        prop_assert_eq!((several.paid, several.answered, several.unknown), (one.paid, one.answered, 0));
        prop_assert_eq!((several.alive, several.per_hour), (one.alive, one.per_hour));
        let is_any = |(_, functions): &(_, FunctionTotals)| *functions != FunctionTotals::default();
        let here = |account: &LedgerTotals| -> Vec<(String, FunctionTotals)> {
            let all = account.functions_by_model.clone().into_iter();
            all.map(|(model, functions)| (model, FunctionTotals { idle: 0, ..functions })).filter(is_any).collect()
        };
        prop_assert_eq!(here(&several), here(&one));
        prop_assert_eq!(several.functions_by_model.values().map(|its| its.idle).sum::<u64>(), several.idle);
        prop_assert_eq!(several.estimated, one.estimated);
        prop_assert_eq!((several.cold_start, several.overlap), (one.cold_start, one.overlap));
        prop_assert_eq!(i128::from(several.paid), sum(&several));
        prop_assert!(several.residual.abs() <= 2 * deployment.log.len() as i64, "{}", several.residual);
    }

    /// Without the heads of files what is unknown is said.
    #[test]
    fn what_is_not_known_is_said(answers in 1_u64..40) {
        let mut deployment = BilledDeployment::new();
        deployment.starts(true, 44_000_000, SECOND);
        (0..answers).for_each(|_| deployment.works(0, SECOND, SECOND, true));
        let left = deployment.log.split_off(deployment.log.len() - answers as usize);
        let account = LedgerTotals::from_records(left.into_iter().map(Ok)).unwrap();
        prop_assert_eq!((account.paid, account.unknown), (0, account.answered.cost));
        prop_assert_eq!(i128::from(account.unknown), sum(&account));
        prop_assert!(account.residual_share() > 0.99);
    }
}
