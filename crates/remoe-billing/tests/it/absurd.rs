//! Ledgers with absurd records of a function can still be totalled.

use remoe_billing::{
    Basis, FunctionEvent, FunctionRecord, LedgerTotals, Phases, Rate, Record, RequestRecord, Share,
};

const MAX: u64 = u64::MAX;

#[test]
fn sums_stay_at_the_largest_number() {
    let phases = Phases { prefill: MAX, decode: MAX };
    let share = |tier: &str| Share { tier: tier.to_owned(), work: phases, cost: phases, busy: MAX };
    let function = |name: &str, tier: &str, basis| {
        let tier = tier.to_owned();
        let event = FunctionEvent::Started { tier, rate: Rate(MAX), basis };
        Record::Function(FunctionRecord { at: 1, model: "m".to_owned(), function: name.to_owned(), event })
    };
    let request = Record::Request(RequestRecord {
        at: 2,
        id: "id".to_owned(),
        model: "m".to_owned(),
        tenant: "t".to_owned(),
        function: "a".to_owned(),
        prompt_tokens: MAX,
        completion_tokens: MAX,
        shares: [("a", "main"), ("b", "remote"), ("stranger", "remote")]
            .map(|(name, tier)| (name.to_owned(), share(tier)))
            .into(),
        rivals: [("mix".to_owned(), MAX)].into(),
        served: MAX,
    });
    let lost = |at| Record::Lost {
        at,
        since: 0,
        estimate: MAX,
        model: "m".to_owned(),
        tenant: "t".to_owned(),
        function: "a".to_owned(),
        id: String::new(),
    };
    let records = [
        Record::Opened { at: 0, prices: String::new() },
        function("a", "main", Basis::Alive),
        function("b", "remote", Basis::Work),
        request.clone(),
        request,
        lost(MAX),
        lost(MAX),
        Record::Alive { at: MAX, overhead: MAX },
        Record::Alive { at: MAX, overhead: MAX },
    ];
    let totals = LedgerTotals::from_records(records.iter().cloned().map(Ok)).unwrap();
    assert_eq!((totals.answered.cost, totals.answered.requests, totals.lost), (MAX, 2, 2));
    assert!(totals.residual_share().is_finite());
    let several = [records.iter().cloned().map(Ok), records.iter().cloned().map(Ok)];
    assert_eq!(LedgerTotals::from_ledgers(several.into_iter()).unwrap().paid, MAX);
}

/// Ledgers of an earlier release may contain everything that main functions reported.
#[test]
fn ledger_with_many_rivals_adds_up() {
    let request = |number: u64| {
        let names = (0..20_000).map(|name| (format!("rival-{number}-{name}"), 1));
        Record::Request(RequestRecord {
            at: 2 + number,
            id: "id".to_owned(),
            model: "m".to_owned(),
            tenant: "t".to_owned(),
            function: "a".to_owned(),
            prompt_tokens: 3,
            completion_tokens: 4,
            shares: [("a".to_owned(), Share { cost: Phases { prefill: 5, decode: 6 }, ..Share::default() })]
                .into(),
            rivals: names.chain([("mix".to_owned(), 100)]).collect(),
            served: 0,
        })
    };
    let records: Vec<_> = (0..3).map(request).collect();
    let totals = LedgerTotals::from_records(records.iter().cloned().map(Ok)).unwrap();
    assert_eq!(totals.answered.cost, 33);
    assert_eq!(totals.rivals, [("mix".to_owned(), (300, 33))].into());
    let several = [records.iter().cloned().map(Ok), records.iter().cloned().map(Ok)];
    assert_eq!(LedgerTotals::from_ledgers(several.into_iter()).unwrap().rivals["mix"], (600, 66));
}

/// Functions of a model report 584 years of work. The total cost is wrong by at most an hour of each function.
#[test]
fn work_beyond_the_life_of_a_function_costs_nothing() {
    const SECOND: u64 = 1_000_000_000;
    const HOUR: u64 = 3600 * SECOND;
    let started = |name: &str, tier: &str, basis| {
        // One nano-dollar per nanosecond.
        let event = FunctionEvent::Started { tier: tier.to_owned(), rate: Rate(HOUR), basis };
        Record::Function(FunctionRecord { at: 0, model: "m".to_owned(), function: name.to_owned(), event })
    };
    let share = |tier: &str| Share { tier: tier.to_owned(), busy: MAX, ..Share::default() };
    let request = Record::Request(RequestRecord {
        at: SECOND,
        id: "id".to_owned(),
        model: "m".to_owned(),
        tenant: "t".to_owned(),
        function: "a".to_owned(),
        prompt_tokens: 1,
        completion_tokens: 1,
        shares: [("a", "main"), ("b", "remote")].map(|(name, tier)| (name.to_owned(), share(tier))).into(),
        rivals: [].into(),
        served: MAX,
    });
    let records = [
        started("a", "main", Basis::Alive),
        started("b", "remote", Basis::Work),
        request,
        Record::Alive { at: 2 * SECOND, overhead: 0 },
    ];
    let totals = LedgerTotals::from_records(records.into_iter().map(Ok)).unwrap();
    assert_eq!(totals.paid, 2 * SECOND + 2 * SECOND + HOUR);
    assert!(totals.failed <= 2 * (2 * SECOND + HOUR) && totals.idle <= 2 * SECOND + HOUR, "{totals:?}");
}
