//! `remoe inspect`: what a checkpoint is.

use crate::args::InspectArgs;
use crate::exit::CliError;
use crate::output::{json, table};
use remoe_model::Inspection;
use serde::Serialize;
use std::io::Write;

/// The facts, and the commit of the hub that they are of.
#[derive(Serialize)]
struct WithRevision<'a> {
    #[serde(flatten)]
    inspection: &'a Inspection,
    #[serde(skip_serializing_if = "Option::is_none")]
    revision: Option<&'a str>,
}

/// Reads the facts and prints them.
pub(crate) fn run(args: &InspectArgs, as_json: bool) -> Result<(), CliError> {
    let opened = args.source.open()?;
    let inspection = opened.checkpoint.inspect()?;
    if as_json {
        json::print(&WithRevision { inspection: &inspection, revision: opened.revision.as_deref() })?;
    } else {
        writeln!(anstream::stdout().lock(), "{}", for_people(&inspection))?;
    }
    Ok(())
}

fn for_people(facts: &Inspection) -> String {
    let non_expert: u64 = facts.non_expert_layer_bytes.iter().sum();
    let experts_in_all = facts.moe_layers.len() as u64 * facts.experts as u64;
    table::of_pairs(&[
        ("family", facts.family.clone()),
        ("dtype", facts.dtype.clone()),
        ("fingerprint", facts.fingerprint.clone()),
        ("layers", format!("{}, of which {} with experts", facts.layers, facts.moe_layers.len())),
        ("experts", format!("{} per layer, {} per token", facts.experts, facts.top_k)),
        ("shared experts", facts.shared_experts.to_string()),
        ("hidden size", facts.hidden_size.to_string()),
        ("vocabulary", facts.vocab_size.to_string()),
        ("context", format!("{} tokens", facts.context_length)),
        ("", String::new()),
        ("one expert", table::bytes(facts.expert_bytes)),
        ("all experts", table::bytes(experts_in_all * facts.expert_bytes)),
        ("other layer weights", table::bytes(non_expert)),
        ("embedding and head", table::bytes(facts.outside_bytes)),
        ("total", table::bytes(facts.total_bytes)),
        ("", String::new()),
        ("cache per token", table::bytes(facts.kv_bytes_per_token)),
        ("hidden state per token", table::bytes(facts.token_bytes)),
    ])
}
