//! Cost of idle functions: their rates while they run, and nothing after they stopped.

use remoe_billing::{Basis, FunctionEvent, FunctionRecord, LedgerTotals, Rate, Record};

const HOUR: u64 = 3_600_000_000_000;
const BEGIN: u64 = 1_700_000_000_000_000_000;

fn function(at: u64, name: &str, event: FunctionEvent) -> Record {
    let (model, function) = ("m".to_owned(), name.to_owned());
    Record::Function(FunctionRecord { at: BEGIN + at, model, function, event })
}

/// Returns the starts of a main function at 40 million nano-dollars per hour and of a remote one at 7 million. The
/// remote one is billed by `basis`; both serve at once.
fn started(basis: Basis) -> Vec<Record> {
    let start = |name, tier: &str, rate, basis| {
        let event = FunctionEvent::Started { tier: tier.to_owned(), rate: Rate(rate), basis };
        [function(0, name, event), function(0, name, FunctionEvent::Serving)]
    };
    [start("a", "main", 40_000_000, Basis::Alive), start("b", "group-0", 7_000_000, basis)].concat()
}

fn totals(records: &[Record], until: u64) -> LedgerTotals {
    let mut totals = LedgerTotals::default();
    records.iter().for_each(|record| totals.add(record).unwrap());
    totals.until(BEGIN + until)
}

#[test]
fn idle_hour_costs_the_rates_of_running_functions() {
    let records = started(Basis::Alive);
    for hours in 1..4 {
        let totals = totals(&records, hours * HOUR);
        assert_eq!((totals.paid, totals.idle), (hours * 47_000_000, hours * 47_000_000));
        assert_eq!((totals.alive, totals.per_hour), (2, 47_000_000));
        assert_eq!([totals.failed, totals.cold_start, totals.overlap, totals.overhead], [0; 4]);
        assert_eq!(
            (totals.by_tier["main"].idle, totals.by_tier["group-0"].idle),
            (hours * 40_000_000, hours * 7_000_000)
        );
    }
}

#[test]
fn idle_function_billed_by_work_costs_nothing() {
    let totals = totals(&started(Basis::Work), HOUR);
    assert_eq!((totals.paid, totals.idle), (40_000_000, 40_000_000));
}

#[test]
fn stopped_functions_cost_nothing() {
    let mut records = started(Basis::Alive);
    records.extend(["a", "b"].map(|name| function(HOUR, name, FunctionEvent::Stopped)));
    for hours in 1..4 {
        let totals = totals(&records, hours * HOUR);
        assert_eq!((totals.paid, totals.idle), (47_000_000, 47_000_000), "after {hours} hours");
        assert_eq!((totals.alive, totals.per_hour), (0, 0));
    }
}
