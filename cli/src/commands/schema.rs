//! `remoe schema`: JSON schemas of the files that planning reads.

use crate::exit::CliError;
use crate::output::{json, table};
use crate::workload::Workload;
use clap::{Args, ValueEnum};
use remoe_hardware::{NodeList, Prices, Profile};
use remoe_planner::{Problem, plan_file_schema};
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema};
use serde::Serialize;

#[derive(Debug, Args)]
pub(crate) struct SchemaArgs {
    /// Kind of file; without it the kinds are listed
    #[arg(value_enum, value_name = "NAME")]
    pub(crate) name: Option<SchemaKind>,
}

/// Kinds of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SchemaKind {
    /// Model, workload, prices and limits: `plan --problem`
    Problem,
    /// Remote experts and the functions that host them: `up --plan`, `plan --evaluate`
    Plan,
    /// Measured times of a model on a machine: `--profile`
    Profile,
    /// Nodes with their prices: `plan --nodes`
    Nodes,
    /// Prices of cores, memory and GPUs: `--pricing`
    Prices,
    /// Requests to plan for: `--workload`
    Workload,
}

impl SchemaKind {
    pub(crate) fn schema(self) -> Schema {
        match self {
            Self::Problem => schema_of::<Problem>(),
            Self::Plan => plan_file_schema(),
            Self::Profile => schema_of::<Profile>(),
            Self::Nodes => schema_of::<NodeList>(),
            Self::Prices => schema_of::<Prices>(),
            Self::Workload => schema_of::<Workload>(),
        }
    }
}

fn schema_of<T: JsonSchema>() -> Schema {
    SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<T>()
}

/// Prints the schema of a kind of file, or lists the kinds.
pub(crate) fn run(args: &SchemaArgs, as_json: bool) -> Result<(), CliError> {
    match args.name {
        Some(kind) if as_json => json::print(&kind.schema())?,
        Some(kind) => {
            let text = serde_json::to_string_pretty(&kind.schema())
                .map_err(|error| CliError::runtime(format!("cannot write the schema: {error}")))?;
            anstream::println!("{text}");
        }
        None if as_json => json::print(&serde_json::json!({ "schemas": SchemaKind::value_variants() }))?,
        None => {
            let rows =
                SchemaKind::value_variants().iter().filter_map(SchemaKind::to_possible_value).map(|value| {
                    let help = value.get_help().map(ToString::to_string).unwrap_or_default();
                    vec![value.get_name().to_owned(), help]
                });
            anstream::println!("{}", table::of_rows(rows.collect()));
        }
    }
    Ok(())
}
