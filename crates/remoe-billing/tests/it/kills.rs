//! Ledgers whose writer was killed or ran out of disk space.

use proptest::prelude::*;
use remoe_billing::{
    Basis, FunctionEvent, FunctionRecord, Ledger, LedgerError, LedgerLimits, LedgerTotals, Phases, Rate,
    Record, RequestRecord, Share, export_csv, export_json, records, records_since,
};
use std::fs::OpenOptions;
use std::path::Path;

const SMALL: LedgerLimits = LedgerLimits { file_bytes: 2000, files: 1000 };

fn request(number: u64, cost: u64) -> Record {
    let share = Share {
        tier: "main".to_owned(),
        work: Phases { prefill: cost, decode: 0 },
        cost: Phases { prefill: cost, decode: 0 },
        busy: 0,
    };
    Record::Request(RequestRecord {
        at: 1_700_000_000_000_000_000 + number,
        id: format!("r-{number}"),
        model: "m".to_owned(),
        tenant: ["a", "b, \"c\""][number as usize % 2].to_owned(),
        function: "main-1".to_owned(),
        prompt_tokens: 3,
        completion_tokens: 4,
        shares: [("main-1".to_owned(), share)].into(),
        rivals: [("mix".to_owned(), 2 * cost)].into(),
        served: number,
    })
}

fn write(ledger: &Ledger, records: &[Record]) {
    records.iter().for_each(|record| ledger.append(record).unwrap());
}

/// Reads all records except the headers of files.
fn read(folder: &Path) -> Vec<Record> {
    let all = records(folder).unwrap().map(Result::unwrap);
    all.filter(|record| !matches!(record, Record::Continued { .. } | Record::Carried { .. })).collect()
}

/// Returns the path and the content of the newest file.
fn bytes(folder: &Path) -> (std::path::PathBuf, Vec<u8>) {
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
    files.sort();
    let last = files.pop().unwrap();
    let content = std::fs::read(&last).unwrap();
    (last, content)
}

/// If the writer dies within a line, the complete lines before it and all later records are read.
#[test]
fn partial_line_is_dropped_at_every_byte() {
    let written: Vec<Record> = (0..3).map(|number| request(number, 5)).collect();
    let complete_folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(complete_folder.path(), LedgerLimits::default()).unwrap();
    let mut ends = vec![0];
    for record in &written {
        ledger.append(record).unwrap();
        ends.push(bytes(complete_folder.path()).1.len());
    }
    let content = bytes(complete_folder.path()).1;
    for cut in 0..=content.len() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ledger-000001.log"), &content[..cut]).unwrap();
        let complete = ends.iter().filter(|end| **end <= cut && **end > 0).count();
        assert_eq!(read(folder.path()), written[..complete], "{cut}");
        let ledger = Ledger::open(folder.path(), LedgerLimits::default()).unwrap();
        assert_eq!(ledger.dropped_bytes(), (cut - ends[complete]) as u64, "{cut}");
        ledger.append(&request(9, 9)).unwrap();
        let expected: Vec<_> = written[..complete].iter().cloned().chain([request(9, 9)]).collect();
        assert_eq!(read(folder.path()), expected, "{cut}");
    }
}

/// These include bits that turn a digit of a checksum into upper case.
#[test]
fn every_flipped_bit_is_detected() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path(), LedgerLimits::default()).unwrap();
    write(&ledger, &[request(1, 1), request(2, 2), request(3, 3)]);
    let (path, content) = bytes(folder.path());
    for (at, bit) in (0..content.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
        let mut damaged = content.clone();
        damaged[at] ^= 1 << bit;
        std::fs::write(&path, damaged).unwrap();
        let mut entries = records(folder.path()).unwrap();
        entries.by_ref().for_each(drop);
        assert!(entries.damaged() > 0, "byte {at}, bit {bit}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// A flipped byte damages its line and at most the next one. No other record is lost or changed.
    #[test]
    fn damaged_byte_is_detected(at in 0.0_f64..1.0, flip in 1_u8..=255) {
        let folder = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(folder.path(), LedgerLimits::default()).unwrap();
        let written: Vec<Record> = (0..20).map(|number| request(number, number)).collect();
        write(&ledger, &written);
        let (path, mut content) = bytes(folder.path());
        let at = (at * content.len() as f64) as usize;
        content[at] ^= flip;
        std::fs::write(path, &content).unwrap();
        let mut entries = records(folder.path()).unwrap();
        let found: Vec<Record> = entries.by_ref().map(Result::unwrap).collect();
        prop_assert!(found.len() >= written.len() - 2 && found.iter().all(|record| written.contains(record)));
        prop_assert!(entries.damaged() > 0, "byte {at} by {flip}");
    }

    /// For any sequence of events, the paid amount is the sum of its parts.
    #[test]
    fn parts_add_up_to_the_paid_amount(
        rate in 1_u64..1 << 40,
        start in 0_u64..1 << 40,
        idle in prop::collection::vec((0_u64..1 << 36, 0_u64..1 << 36, prop::bool::ANY), 0..20),
        tail in 0_u64..1 << 40,
        overlap in 0_u64..1 << 36,
    ) {
        let begin = 1_700_000_000_000_000_000;
        let function = |at, event| Record::Function(FunctionRecord {
            at, model: "m".to_owned(), function: "main-1".to_owned(), event,
        });
        let rate = Rate(rate);
        let mut log = vec![
            function(begin, FunctionEvent::Started { tier: "main".to_owned(), rate, basis: Basis::Alive }),
            function(begin + start, FunctionEvent::Serving),
        ];
        let (mut now, mut busy, mut charged) = (begin + start, 0, 0);
        let meter = remoe_billing::Meter::default();
        let rates = remoe_billing::Rates([("main".to_owned(), rate)].into());
        for (waited, worked, answered) in &idle {
            now += waited + worked;
            busy += worked;
            if !answered {
                log.push(Record::Lost {
                    at: now, since: now - worked, estimate: 0, model: "m".to_owned(), tenant: String::new(),
                    function: "main-1".to_owned(), id: String::new(),
                });
                continue;
            }
            let share = Phases { prefill: *worked, decode: 0 };
            let work = remoe_billing::RequestWork {
                main: remoe_billing::WorkShare { share, busy },
                served: now - begin - start,
                ..Default::default()
            };
            let mut share = meter.report(&work, &rates).shares["main"].clone();
            share.tier = "main".to_owned();
            charged += share.cost.sum();
            let Record::Request(request) = request(now - 1_700_000_000_000_000_000, 0) else { unreachable!() };
            log.push(Record::Request(RequestRecord {
                shares: [("main-1".to_owned(), share)].into(), served: now - begin - start, ..request
            }));
        }
        log.push(function(now + tail, FunctionEvent::Replaced));
        log.push(function(now + tail + overlap, FunctionEvent::Stopped));
        let totals = LedgerTotals::from_records(log.into_iter().map(Ok)).unwrap();
        prop_assert_eq!(totals.answered.cost, charged);
        prop_assert_eq!(totals.paid, rate.cost(start + now - begin - start + tail + overlap));
        prop_assert_eq!(totals.residual, 0);
        prop_assert_eq!(
            totals.paid,
            charged + totals.failed + totals.idle + totals.cold_start + totals.overlap
        );
        prop_assert!(totals.overlap.abs_diff(rate.cost(overlap)) <= 1);
        prop_assert!(totals.cold_start.abs_diff(rate.cost(start)) <= 1);
        let last = idle.iter().rposition(|(.., answered)| *answered).map_or(0, |at| at + 1);
        let failed: u64 = idle[..last].iter().filter(|(.., answered)| !answered).map(|(_, worked, _)| *worked).sum();
        let lost: u64 = idle[last..].iter().map(|(_, worked, _)| *worked).sum();
        prop_assert!(totals.failed.abs_diff(rate.cost(failed + lost)) <= 2);
    }
}

/// A remote function outlives its main function. The next main function counts its work from zero.
#[test]
fn remote_function_works_for_several_main_functions() {
    let second = 1_000_000_000;
    let begin = 1_700_000_000 * second;
    let function = |at: u64, name: &str, event| {
        let (model, function) = ("m".to_owned(), name.to_owned());
        Record::Function(FunctionRecord { at: begin + at * second, model, function, event })
    };
    let start = |at, name, tier: &str| {
        let rate = Rate(3600 * second);
        function(at, name, FunctionEvent::Started { tier: tier.to_owned(), rate, basis: Basis::Alive })
    };
    let answer = |at: u64, main: &str, served: u64, work: u64| {
        let share = |tier: &str| Share {
            tier: tier.to_owned(),
            work: Phases { prefill: work * second, decode: 0 },
            cost: Phases { prefill: work * second, decode: 0 },
            busy: work * second,
        };
        let Record::Request(request) = request(0, 0) else { unreachable!() };
        let shares = [(main.to_owned(), share("main")), ("far".to_owned(), share("group-0"))].into();
        let (function, served) = (main.to_owned(), served * second);
        Record::Request(RequestRecord { at: begin + at * second, function, served, shares, ..request })
    };
    let log = [
        start(0, "one", "main"),
        start(0, "far", "group-0"),
        function(1, "one", FunctionEvent::Serving),
        function(1, "far", FunctionEvent::Serving),
        answer(11, "one", 10, 7),
        function(12, "one", FunctionEvent::Stopped),
        start(12, "two", "main"),
        function(13, "two", FunctionEvent::Serving),
        answer(23, "two", 10, 6),
        function(30, "two", FunctionEvent::Stopped),
        function(30, "far", FunctionEvent::Stopped),
    ];
    let totals = LedgerTotals::from_records(log.into_iter().map(Ok)).unwrap();
    let seconds = |amount: u64| amount / second;
    assert_eq!((seconds(totals.paid), totals.residual), (12 + 18 + 30, 0));
    assert_eq!((seconds(totals.answered.cost), totals.failed), (26, 0));
    assert_eq!((seconds(totals.cold_start), seconds(totals.idle)), (3, 60 - 26 - 3));
}

#[test]
fn files_are_rotated_and_the_oldest_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path(), SMALL).unwrap();
    let written: Vec<Record> = (0..100).map(|number| request(number, number)).collect();
    write(&ledger, &written);
    assert_eq!(read(folder.path()), written);
    assert!(std::fs::read_dir(folder.path()).unwrap().count() > 10);
    let since = records_since(folder.path(), written[90].at()).unwrap().map(Result::unwrap);
    let since: Vec<Record> = since.filter(|record| matches!(record, Record::Request(_))).collect();
    assert!(since.len() < 20 && since.ends_with(&written[90..]), "{}", since.len());
    assert!(matches!(Ledger::open(folder.path(), SMALL), Err(LedgerError::InUse { .. })));
    drop(ledger);
    let ledger = Ledger::open(folder.path(), LedgerLimits { files: 2, ..SMALL }).unwrap();
    write(&ledger, &(100..120).map(|number| request(number, 1)).collect::<Vec<_>>());
    let remaining = read(folder.path());
    assert!(remaining.len() < 20 && remaining.last() == Some(&request(119, 1)), "{}", remaining.len());
}

/// No record is lost if an old file cannot be removed.
#[test]
fn failed_removal_of_an_old_file_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path(), LedgerLimits { files: 1, ..SMALL }).unwrap();
    let oldest = folder.path().join("ledger-000000.log");
    std::fs::create_dir(&oldest).unwrap();
    write(&ledger, &(0..20).map(|number| request(number, 1)).collect::<Vec<_>>());
    std::fs::remove_dir(oldest).unwrap();
    assert_eq!(read(folder.path()).last(), Some(&request(19, 1)));
}

#[test]
fn writer_continues_after_a_full_disk() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path(), SMALL).unwrap();
    write(&ledger, &[request(1, 1)]);
    drop(ledger);
    // The state after a file system was full in the middle of a line.
    let (path, content) = bytes(folder.path());
    let mut file = OpenOptions::new().append(true).open(&path).unwrap();
    std::io::Write::write_all(&mut file, &content[..40]).unwrap();
    std::io::Write::write_all(&mut file, b"\n").unwrap();
    let ledger = Ledger::open(folder.path(), SMALL).unwrap();
    write(&ledger, &[request(2, 2)]);
    let mut entries = records(folder.path()).unwrap();
    assert_eq!(entries.by_ref().map(Result::unwrap).collect::<Vec<_>>(), [request(1, 1), request(2, 2)]);
    assert_eq!(entries.damaged(), 1);
}

#[test]
fn requests_are_exported() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path(), SMALL).unwrap();
    write(&ledger, &(0..5).map(|number| request(number, 7)).collect::<Vec<_>>());
    let (mut json, mut table) = (Vec::new(), Vec::new());
    export_json(records(folder.path()).unwrap(), &mut json).unwrap();
    export_csv(records(folder.path()).unwrap(), &mut table).unwrap();
    assert_eq!(json.iter().filter(|byte| **byte == b'\n').count(), 5);
    let mut rows = csv::Reader::from_reader(table.as_slice());
    let rows: Vec<csv::StringRecord> = rows.records().map(Result::unwrap).collect();
    assert_eq!(rows.len(), 5);
    assert_eq!((&rows[1][3], &rows[1][7], &rows[1][11]), ("b, \"c\"", "7", "mix=14"));
}
