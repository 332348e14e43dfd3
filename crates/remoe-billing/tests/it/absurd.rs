//! Absurd records of a function do not stop a ledger from being added up.

use remoe_billing::{
    Basis, FunctionEvent, FunctionRecord, LedgerTotals, Phases, Rate, Record, RequestRecord, Share,
};

const MOST: u64 = u64::MAX;

#[test]
fn sums_stay_at_the_largest_number() {
    let phases = Phases { prefill: MOST, decode: MOST };
    let share = |tier: &str| Share { tier: tier.to_owned(), work: phases, cost: phases, busy: MOST };
    let function = |name: &str, tier: &str, basis| {
        let tier = tier.to_owned();
        let event = FunctionEvent::Started { tier, rate: Rate(MOST), basis };
        Record::Function(FunctionRecord { at: 1, model: "m".to_owned(), function: name.to_owned(), event })
    };
    let request = Record::Request(RequestRecord {
        at: 2,
        id: "id".to_owned(),
        model: "m".to_owned(),
        tenant: "t".to_owned(),
        function: "a".to_owned(),
        prompt_tokens: MOST,
        completion_tokens: MOST,
        shares: [("a", "main"), ("b", "remote"), ("stranger", "remote")]
            .map(|(name, tier)| (name.to_owned(), share(tier)))
            .into(),
        rivals: [("mix".to_owned(), MOST)].into(),
        served: MOST,
    });
    let lost = |at| Record::Lost {
        at,
        since: 0,
        estimate: MOST,
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
        lost(MOST),
        lost(MOST),
        Record::Alive { at: MOST, overhead: MOST },
        Record::Alive { at: MOST, overhead: MOST },
    ];
    let account = LedgerTotals::from_records(records.iter().cloned().map(Ok)).unwrap();
    assert_eq!((account.answered.cost, account.answered.requests, account.lost), (MOST, 2, 2));
    assert!(account.residual_share().is_finite());
    let several = [records.iter().cloned().map(Ok), records.iter().cloned().map(Ok)];
    assert_eq!(LedgerTotals::from_ledgers(several.into_iter()).unwrap().paid, MOST);
}

/// A ledger of a release that wrote whatever main functions told.
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
    let account = LedgerTotals::from_records(records.iter().cloned().map(Ok)).unwrap();
    assert_eq!(account.answered.cost, 33);
    assert_eq!(account.rivals, [("mix".to_owned(), (300, 33))].into());
    let several = [records.iter().cloned().map(Ok), records.iter().cloned().map(Ok)];
    assert_eq!(LedgerTotals::from_ledgers(several.into_iter()).unwrap().rivals["mix"], (600, 66));
}

/// Functions of one model say that they worked for 584 years. What all models cost is right but for an hour of each.
#[test]
fn work_beyond_the_life_of_a_function_costs_nothing() {
    const SECOND: u64 = 1_000_000_000;
    const HOUR: u64 = 3600 * SECOND;
    let started = |name: &str, tier: &str, basis| {
        // A nano-dollar a nanosecond.
        let event = FunctionEvent::Started { tier: tier.to_owned(), rate: Rate(HOUR), basis };
        Record::Function(FunctionRecord { at: 0, model: "m".to_owned(), function: name.to_owned(), event })
    };
    let share = |tier: &str| Share { tier: tier.to_owned(), busy: MOST, ..Share::default() };
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
        served: MOST,
    });
    let records = [
        started("a", "main", Basis::Alive),
        started("b", "remote", Basis::Work),
        request,
        Record::Alive { at: 2 * SECOND, overhead: 0 },
    ];
    let account = LedgerTotals::from_records(records.into_iter().map(Ok)).unwrap();
    assert_eq!(account.paid, 2 * SECOND + 2 * SECOND + HOUR);
    assert!(account.failed <= 2 * (2 * SECOND + HOUR) && account.idle <= 2 * SECOND + HOUR, "{account:?}");
}
