//! `remoe cost`: cost of the requests and functions in a ledger.

use crate::exit::{CliError, CliExitCode};
use crate::output::{json, table};
use clap::{Args, ValueEnum};
use remoe_billing::{
    FunctionTotals, LOCK_FILE, LedgerError, LedgerRecords, LedgerTotals, RequestTotals, TierTotals,
    export_csv, export_json, records,
};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Debug, Args)]
pub(crate) struct CostArgs {
    /// Ledger folder of `remoe up --ledger`, or a folder of ledgers, as cluster gateways write them
    #[arg(value_name = "DIR", required_unless_present = "ledger", conflicts_with = "ledger")]
    folder: Option<PathBuf>,
    /// Same as DIR
    #[arg(long, value_name = "DIR")]
    ledger: Option<PathBuf>,
    /// Reconcile the ledger: compare the cost of all functions with the sum of requests, idle time, cold starts and
    /// other parts; fails if more than 1% is not accounted for
    #[arg(long)]
    pub(crate) reconcile: bool,
    /// Print every request instead of the summary
    #[arg(long, value_enum, value_name = "FORM", conflicts_with = "reconcile")]
    pub(crate) export: Option<ExportForm>,
}

impl CostArgs {
    /// Returns the folder of the ledger, or of several ledgers.
    pub(crate) fn ledger(&self) -> &Path {
        self.folder.as_deref().or(self.ledger.as_deref()).unwrap_or(Path::new("."))
    }
}

/// Form of the exported requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportForm {
    /// A table with a header
    Csv,
    /// One JSON object per line
    Json,
}

/// Limit of the residual of a reconciled ledger, as a share of the paid amount.
const RESIDUAL_LIMIT: f64 = 0.01;
/// Width of the longest bar, in columns.
const BAR_WIDTH: u64 = 40;

/// Summary of a ledger, with amounts in nano-dollars.
#[derive(Serialize)]
struct Report<'a> {
    requests: u64,
    /// Cost of answered requests.
    total: u64,
    idle: u64,
    cold_start: u64,
    overlap: u64,
    failed: u64,
    overhead: u64,
    residual: i64,
    /// Cost of earlier requests of the same functions, whose records were in deleted files.
    earlier: u64,
    /// Part of `total` for functions whose start the ledger does not record.
    unknown: u64,
    /// Cost of the functions' run time, and of the gateway: the sum of the amounts above, minus `unknown`.
    paid: u64,
    by_model: BTreeMap<&'a str, u64>,
    functions_by_model: &'a BTreeMap<String, FunctionTotals>,
    by_tenant: BTreeMap<&'a str, u64>,
    by_day: BTreeMap<String, u64>,
    by_tier: &'a BTreeMap<String, TierTotals>,
    /// Counterfactual cost of the same requests.
    rivals: BTreeMap<&'a str, RivalReport>,
    prompt_tokens: u64,
    completion_tokens: u64,
    /// Number of requests that ended without an answer.
    lost: u64,
    /// Number of running functions.
    alive: u64,
    /// Cost of the running functions per hour.
    per_hour: u64,
    prices: &'a str,
    /// Estimated run time of functions without a recorded end, in seconds.
    estimated_s: f64,
    /// Number of damaged lines in the ledger.
    damaged: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    reconciled: Option<bool>,
}

#[derive(Serialize)]
struct RivalReport {
    /// Counterfactual cost.
    cost: u64,
    /// Actual cost of the same requests.
    here: u64,
}

/// Prints the summary of a ledger. With `--reconcile`, fails if the residual exceeds its limit.
pub(crate) fn run(args: &CostArgs, as_json: bool) -> Result<ExitCode, CliError> {
    let ledger_error = |error: &dyn std::fmt::Display| CliError {
        path: Some(args.ledger().to_owned()),
        ..CliError::arguments("--ledger", error.to_string())
    };
    let folders = ledgers(args.ledger()).map_err(|error| ledger_error(&error))?;
    if let Some(form) = args.export {
        export(&folders, form).map_err(|error| ledger_error(&error))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut entries: Vec<LedgerRecords> = folders
        .iter()
        .map(|folder| records(folder))
        .collect::<Result<_, _>>()
        .map_err(|error| ledger_error(&error))?;
    let account = match entries.as_mut_slice() {
        [single] => LedgerTotals::from_records(single),
        several => LedgerTotals::from_ledgers(several.iter_mut()),
    };
    let account = account.map_err(|error| ledger_error(&error))?;
    let damaged = entries.iter().map(LedgerRecords::damaged).sum();
    let reconciled = args.reconcile.then(|| account.residual_share() <= RESIDUAL_LIMIT);
    if as_json {
        json::print(&report(&account, damaged, reconciled))?;
    } else {
        anstream::println!("{}", text(&account, damaged, args.reconcile));
    }
    Ok(if reconciled == Some(false) { ExitCode::from(CliExitCode::Runtime as u8) } else { ExitCode::SUCCESS })
}

/// Returns `folder` if it is a ledger, else the ledgers in it, as cluster gateways write them.
fn ledgers(folder: &Path) -> Result<Vec<PathBuf>, LedgerError> {
    let failed = |error| LedgerError::Io { path: folder.to_owned(), error };
    let mut ledgers = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_dir() && path.join(LOCK_FILE).is_file() {
            ledgers.push(path);
        }
    }
    ledgers.sort();
    let is_ledger = ledgers.is_empty() || folder.join(LOCK_FILE).is_file();
    Ok(if is_ledger { vec![folder.to_owned()] } else { ledgers })
}

fn export(ledgers: &[PathBuf], form: ExportForm) -> Result<(), Box<dyn std::error::Error>> {
    let entries: Vec<LedgerRecords> =
        ledgers.iter().map(|folder| records(folder)).collect::<Result<_, _>>()?;
    let (entries, mut out) = (entries.into_iter().flatten(), io::stdout().lock());
    match form {
        ExportForm::Csv => export_csv(entries, &mut out)?,
        ExportForm::Json => export_json(entries, &mut out)?,
    }
    Ok(())
}

fn costs(amounts: &BTreeMap<String, RequestTotals>) -> BTreeMap<&str, u64> {
    amounts.iter().map(|(name, amounts)| (name.as_str(), amounts.cost)).collect()
}

fn day(number: u64) -> String {
    let second = i64::try_from(number * 86_400).unwrap_or(0);
    jiff::Timestamp::from_second(second)
        .map_or_else(|_| number.to_string(), |timestamp| timestamp.strftime("%F").to_string())
}

fn report(account: &LedgerTotals, damaged: u64, reconciled: Option<bool>) -> Report<'_> {
    Report {
        requests: account.answered.requests,
        total: account.answered.cost,
        idle: account.idle,
        cold_start: account.cold_start,
        overlap: account.overlap,
        failed: account.failed,
        overhead: account.overhead,
        residual: account.residual,
        earlier: account.earlier,
        unknown: account.unknown,
        paid: account.paid,
        by_model: costs(&account.by_model),
        functions_by_model: &account.functions_by_model,
        by_tenant: costs(&account.by_tenant),
        by_day: account.by_day.iter().map(|(number, amounts)| (day(*number), amounts.cost)).collect(),
        by_tier: &account.by_tier,
        rivals: account
            .rivals
            .iter()
            .map(|(name, (cost, here))| (name.as_str(), RivalReport { cost: *cost, here: *here }))
            .collect(),
        prompt_tokens: account.answered.prompt_tokens,
        completion_tokens: account.answered.completion_tokens,
        lost: account.lost,
        alive: account.alive,
        per_hour: account.per_hour,
        prices: &account.prices,
        estimated_s: account.estimated as f64 / 1e9,
        damaged,
        reconciled,
    }
}

/// Formats an amount in nano-dollars as dollars.
pub(super) fn dollars(amount: u64) -> String {
    remoe_planner::dollars(amount as f64 / 1e9)
}

fn share(part: u64, whole: u64) -> String {
    if whole == 0 { String::new() } else { format!("{:.1} %", part as f64 / whole as f64 * 100.0) }
}

fn text(account: &LedgerTotals, damaged: u64, reconcile: bool) -> String {
    let mut blocks = vec![parts_table(account)];
    if account.answered.requests > 0 {
        blocks.push(amounts_table("model", &account.by_model, |name| name.to_owned()));
        blocks.push(amounts_table("tenant", &account.by_tenant, |name| {
            if name.is_empty() { "(no keys)".to_owned() } else { name.to_owned() }
        }));
        let days: BTreeMap<String, RequestTotals> =
            account.by_day.iter().map(|(number, amounts)| (day(*number), *amounts)).collect();
        blocks.push(amounts_table("day", &days, |name| name.to_owned()));
    }
    if !account.functions_by_model.is_empty() {
        blocks.push(functions_table(&account.functions_by_model));
    }
    if !account.by_tier.is_empty() {
        blocks.push(tiers_table(&account.by_tier));
    }
    if !account.rivals.is_empty() {
        blocks.push(rivals_table(account));
    }
    let LedgerTotals { alive, per_hour, prices, .. } = account;
    blocks.push(format!("now: {}/hour, functions alive: {alive}; price list: {prices}", dollars(*per_hour)));
    if account.unknown > 0 {
        blocks.push(format!(
            "ledger incomplete: {} belongs to functions whose start it does not record",
            dollars(account.unknown)
        ));
    }
    if damaged > 0 {
        blocks.push(format!("skipped damaged ledger lines: {damaged}"));
    }
    if reconcile {
        let LedgerTotals { paid, residual, estimated, .. } = account;
        blocks.push(format!(
            "reconciliation: paid {paid} n$ = requests {} + failed {} + idle {} + cold starts {} + overlap {} + \
             overhead {} + residual {residual} + earlier requests {} - unknown {}: {:.4} % not accounted for; {:.1} s estimated",
            account.answered.cost,
            account.failed,
            account.idle,
            account.cold_start,
            account.overlap,
            account.overhead,
            account.earlier,
            account.unknown,
            account.residual_share() * 100.0,
            *estimated as f64 / 1e9,
        ));
    }
    blocks.join("\n\n")
}

fn bar(part: u64, whole: u64) -> String {
    let columns = if whole == 0 { 0 } else { u128::from(part) * u128::from(BAR_WIDTH) / u128::from(whole) };
    "█".repeat(columns as usize)
}

/// Formats the parts of the paid amount.
fn parts_table(account: &LedgerTotals) -> String {
    let parts = [
        ("requests", account.answered.cost),
        ("failed work", account.failed),
        ("idle", account.idle),
        ("cold starts", account.cold_start),
        ("overlap", account.overlap),
        ("gateway", account.overhead),
        ("earlier requests", account.earlier),
        ("not accounted for", account.residual.unsigned_abs()),
        ("paid", account.paid),
    ];
    let rows = parts.map(|(name, amount)| {
        let bar = if name == "paid" { String::new() } else { bar(amount, account.paid) };
        vec![name.to_owned(), dollars(amount), share(amount, account.paid), bar]
    });
    table::with_header(&["part", "cost", "share", ""], rows.into())
}

fn amounts_table(
    name: &str,
    amounts: &BTreeMap<String, RequestTotals>,
    label: impl Fn(&str) -> String,
) -> String {
    let total: u64 = amounts.values().map(|amounts| amounts.cost).sum();
    let rows = amounts.iter().map(|(name, amounts)| {
        let tokens = amounts.prompt_tokens + amounts.completion_tokens;
        let per_million = (amounts.cost as u128 * 1_000_000).checked_div(tokens.into()).unwrap_or(0);
        vec![
            label(name),
            amounts.requests.to_string(),
            tokens.to_string(),
            dollars(amounts.cost),
            dollars(u64::try_from(per_million).unwrap_or(u64::MAX)),
            bar(amounts.cost, total),
        ]
    });
    table::with_header(&[name, "requests", "tokens", "cost", "per million tokens", ""], rows.collect())
}

fn functions_table(functions: &BTreeMap<String, FunctionTotals>) -> String {
    let total: u64 = functions.values().map(|functions| functions.paid).sum();
    let rows = functions.iter().map(|(name, FunctionTotals { paid, idle, alive, per_hour })| {
        let per_hour = dollars(*per_hour);
        vec![name.clone(), dollars(*paid), dollars(*idle), alive.to_string(), per_hour, bar(*paid, total)]
    });
    let header = ["model", "paid", "idle", "alive", "per hour", ""];
    table::with_header(&header, rows.collect())
}

fn tiers_table(tiers: &BTreeMap<String, TierTotals>) -> String {
    let rows = tiers.iter().map(|(name, tier)| {
        vec![name.clone(), dollars(tier.prefill), dollars(tier.decode), dollars(tier.idle)]
    });
    table::with_header(&["tier", "prefill", "decode", "idle"], rows.collect())
}

fn rivals_table(account: &LedgerTotals) -> String {
    let rows = account.rivals.iter().map(|(name, (cost, here))| {
        let saved = 1.0 - *here as f64 / (*cost).max(1) as f64;
        vec![name.clone(), dollars(*cost), dollars(*here), format!("{:.1} %", saved * 100.0)]
    });
    table::with_header(&["baseline", "counterfactual cost", "actual cost", "saving"], rows.collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use remoe_billing::{Basis, FunctionEvent, FunctionRecord, Phases, Rate, Record, RequestRecord, Share};

    const DAY: u64 = 86_400_000_000_000;

    /// Returns the record of a request of `tenant` on day `day` since 1970, with a third of its cost in `group-0`.
    fn request(day: u64, tenant: &str, cost: u64) -> Record {
        let share = |tier: &str, cost| Share {
            tier: tier.to_owned(),
            cost: Phases { prefill: 0, decode: cost },
            ..Share::default()
        };
        let shares = [("main", cost - cost / 3), ("group-0", cost / 3)];
        Record::Request(RequestRecord {
            at: day * DAY + 1,
            id: String::new(),
            model: "m".to_owned(),
            tenant: tenant.to_owned(),
            function: "main".to_owned(),
            prompt_tokens: 10,
            completion_tokens: 10,
            shares: shares.map(|(tier, cost)| (tier.to_owned(), share(tier, cost))).into(),
            rivals: [("mix".to_owned(), 2 * cost)].into(),
            served: 0,
        })
    }

    #[test]
    fn summary_shows_parts_with_bars() {
        let started = |tier: &str| {
            let event = FunctionEvent::Started { tier: tier.to_owned(), rate: Rate(0), basis: Basis::Work };
            let (model, function) = ("m".to_owned(), tier.to_owned());
            Record::Function(FunctionRecord { at: 20_000 * DAY, model, function, event })
        };
        let requests = [request(20_000, "few", 3_000), request(20_001, "many", 9_000)];
        let records = [started("main"), started("group-0")].into_iter().chain(requests);
        let account = LedgerTotals::from_records(records.map(Ok)).unwrap();
        let text = text(&account, 0, true);
        let row = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        for (name, bars) in [("few", 10), ("many", 30), ("2024-10-04", 10), ("2024-10-05", 30), ("m ", 40)] {
            assert_eq!(row(name).matches('█').count(), bars, "{name}: {text}");
        }
        assert!(row("few").contains("$0.00000300") && row("few").contains("$0.150"), "{text}");
        assert!(row("main").contains("$0.00000800") && row("group-0").contains("$0.00000400"), "{text}");
        assert!(row("mix").contains("50.0 %"), "{text}");
        assert!(row("paid").contains("$0.0000120"), "{text}");
        assert!(text.ends_with("0.0000 % not accounted for; 0.0 s estimated"), "{text}");
    }
}
