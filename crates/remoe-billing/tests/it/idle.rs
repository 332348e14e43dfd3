//! Cost of idle functions: what an hour of them costs, and nothing once they are gone.

use remoe_billing::{Basis, FunctionEvent, FunctionRecord, LedgerTotals, Rate, Record};

const HOUR: u64 = 3_600_000_000_000;
const BEGIN: u64 = 1_700_000_000_000_000_000;

fn function(at: u64, name: &str, event: FunctionEvent) -> Record {
    let (model, function) = ("m".to_owned(), name.to_owned());
    Record::Function(FunctionRecord { at: BEGIN + at, model, function, event })
}

/// A main function at 40 million nano-dollars an hour and a remote one at 7, which is billed by `basis`; both serve
/// at once.
fn started(basis: Basis) -> Vec<Record> {
    let start = |name, tier: &str, rate, basis| {
        let event = FunctionEvent::Started { tier: tier.to_owned(), rate: Rate(rate), basis };
        [function(0, name, event), function(0, name, FunctionEvent::Serving)]
    };
    [start("a", "main", 40_000_000, Basis::Alive), start("b", "group-0", 7_000_000, basis)].concat()
}

fn account(records: &[Record], until: u64) -> LedgerTotals {
    let mut account = LedgerTotals::default();
    records.iter().for_each(|record| account.add(record).unwrap());
    account.until(BEGIN + until)
}

#[test]
fn an_idle_hour_costs_what_runs_in_it() {
    let records = started(Basis::Alive);
    for hours in 1..4 {
        let account = account(&records, hours * HOUR);
        assert_eq!((account.paid, account.idle), (hours * 47_000_000, hours * 47_000_000));
        assert_eq!((account.alive, account.per_hour), (2, 47_000_000));
        assert_eq!([account.failed, account.cold_start, account.overlap, account.overhead], [0; 4]);
        assert_eq!(
            (account.by_tier["main"].idle, account.by_tier["group-0"].idle),
            (hours * 40_000_000, hours * 7_000_000)
        );
    }
}

#[test]
fn what_is_billed_by_its_work_costs_nothing_while_it_has_none() {
    let account = account(&started(Basis::Work), HOUR);
    assert_eq!((account.paid, account.idle), (40_000_000, 40_000_000));
}

#[test]
fn what_sleeps_costs_nothing() {
    let mut records = started(Basis::Alive);
    records.extend(["a", "b"].map(|name| function(HOUR, name, FunctionEvent::Stopped)));
    for hours in 1..4 {
        let account = account(&records, hours * HOUR);
        assert_eq!((account.paid, account.idle), (47_000_000, 47_000_000), "after {hours} hours");
        assert_eq!((account.alive, account.per_hour), (0, 0));
    }
}
