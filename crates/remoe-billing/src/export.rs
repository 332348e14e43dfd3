//! Export of a ledger's requests as JSON lines or CSV.

use crate::read::LedgerError;
use crate::record::{Record, RequestRecord};
use std::collections::BTreeMap;
use std::io::{self, Write};

type RecordResult = Result<Record, LedgerError>;

/// Writes every request as one line of JSON.
///
/// # Errors
/// Writing to `out` failed, or the ledger cannot be read.
pub fn export_json(records: impl Iterator<Item = RecordResult>, out: &mut impl Write) -> io::Result<()> {
    for record in records {
        if let Record::Request(request) = record.map_err(io::Error::other)? {
            serde_json::to_writer(&mut *out, &request)?;
            out.write_all(b"\n")?;
        }
    }
    out.flush()
}

/// Writes every request as one line of CSV below a header. The cost of all remote functions is one column.
///
/// # Errors
/// Writing to `out` failed, or the ledger cannot be read.
pub fn export_csv(records: impl Iterator<Item = RecordResult>, out: &mut impl Write) -> io::Result<()> {
    const HEADER: [&str; 12] = [
        "unix_ns",
        "id",
        "model",
        "tenant",
        "function",
        "prompt_tokens",
        "completion_tokens",
        "total_nanodollars",
        "main_nanodollars",
        "remote_nanodollars",
        "prefill_nanodollars",
        "rivals_nanodollars",
    ];
    let mut table = csv::Writer::from_writer(out);
    table.write_record(HEADER)?;
    for record in records {
        if let Record::Request(request) = record.map_err(io::Error::other)? {
            let RequestRecord { at, id, model, tenant, function, prompt_tokens, completion_tokens, .. } =
                &request;
            let is_main_share = |share: &&crate::share::Share| share.tier == "main";
            let main_cost: u64 =
                request.shares.values().filter(is_main_share).map(|share| share.cost.sum()).sum();
            let prefill: u64 = request.shares.values().map(|share| share.cost.prefill).sum();
            let rivals: &BTreeMap<String, u64> = &request.rivals;
            let rivals: Vec<_> = rivals.iter().map(|(name, cost)| format!("{name}={cost}")).collect();
            table.serialize((
                (at, id, model, tenant, function, prompt_tokens, completion_tokens),
                (request.total(), main_cost, request.total() - main_cost, prefill, rivals.join(";")),
            ))?;
        }
    }
    table.flush()
}
