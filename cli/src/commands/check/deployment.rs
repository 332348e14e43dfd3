//! Validation of MoEDeployment manifests.

use crate::commands::up::{UpArgs, fill};
use crate::exit::CliError;
use crate::files::file_error;
use crate::planning;
use crate::resource::{KIND, documents, parse_document};
use crate::workload;
use clap::{Args, FromArgMatches};
use serde_yaml::Value;
use std::path::Path;

/// Placeholder for the folder of a model that exists only in a cluster.
const PLACEHOLDER_MODEL: &str = "model";

/// Checks every MoEDeployment in `text`, the content of the file at `path`, as `up --file` does.
pub(crate) fn check(path: &Path, text: &str) -> Result<(), CliError> {
    let invalid = |message: &dyn std::fmt::Display| CliError { field: None, ..file_error("", path, message) };
    let found = documents(text).map_err(|error| invalid(&error))?;
    if found.is_empty() {
        return Err(invalid(&format!("missing {}", KIND)));
    }
    let is_one_of_several = found.len() > 1;
    for document in found {
        let name = document.get("metadata").and_then(|metadata| metadata.get("name")).and_then(Value::as_str);
        let name = name.map(str::to_owned);
        check_document(path, document).map_err(|error| match name.filter(|_| is_one_of_several) {
            Some(name) => {
                let path_prefix = format!("{}: ", path.display());
                let rest = error.message.strip_prefix(&path_prefix).unwrap_or(&error.message);
                CliError { message: format!("{path_prefix}{name}: {rest}"), ..error }
            }
            None => error,
        })?;
    }
    Ok(())
}

fn check_document(path: &Path, document: Value) -> Result<(), CliError> {
    let without_flag =
        |error: CliError| CliError { field: error.field.filter(|field| field != "--file"), ..error };
    let invalid = |message: &dyn std::fmt::Display| CliError { field: None, ..file_error("", path, message) };
    let command = UpArgs::augment_args(clap::Command::new("up"));
    let matches = command.try_get_matches_from(["up", PLACEHOLDER_MODEL]).map_err(CliError::from)?;
    let mut options = UpArgs::from_arg_matches(&matches).map_err(CliError::from)?;
    let spec = document.get("spec").cloned().unwrap_or_default();
    let text = serde_yaml::to_string(&document).map_err(|error| invalid(&error))?;
    let resource = parse_document(path, document).map_err(without_flag)?;
    fill(&mut options, &resource, path, &matches).map_err(without_flag)?;
    if spec.get("workload").is_some() {
        workload::check(&text).map_err(|error| invalid(&error))?;
    }
    if spec.get("pricing").is_some() {
        planning::parse_prices(&text).map_err(|error| invalid(&error))?;
    }
    Ok(())
}
