//! `remoe inspect`: what a checkpoint is.

use crate::args::InspectArgs;
use crate::exit::CliError;
use crate::output::{json, table};
use remoe_model::{Checkpoint, Inspection};
use std::io::Write;

/// Reads the facts and prints them.
pub(crate) fn run(args: &InspectArgs, as_json: bool) -> Result<(), CliError> {
    let inspection = Checkpoint::open(&args.model)?.inspect()?;
    if as_json {
        json::print(&inspection)?;
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
