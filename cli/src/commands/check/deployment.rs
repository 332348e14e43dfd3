//! Manifests, checked without being used.

use crate::commands::up::{UpArgs, fill};
use crate::exit::CliError;
use crate::files::file_error;
use crate::planning;
use crate::resource::{KIND, documents, parse_document};
use crate::workload;
use clap::{Args, FromArgMatches};
use serde_yaml::Value;
use std::path::Path;

/// Stands for the folder of a model that only a cluster has.
const MODEL: &str = "model";

/// Checks every MoEDeployment of the file at `path`, which has `text`: as `up --file` reads it.
pub(crate) fn check(path: &Path, text: &str) -> Result<(), CliError> {
    let wrong = |message: &dyn std::fmt::Display| CliError { field: None, ..file_error("", path, message) };
    let found = documents(text).map_err(|error| wrong(&error))?;
    if found.is_empty() {
        return Err(wrong(&format!("missing {}", KIND)));
    }
    let several = found.len() > 1;
    for document in found {
        let name = document.get("metadata").and_then(|metadata| metadata.get("name")).and_then(Value::as_str);
        let name = name.map(str::to_owned);
        checked(path, document).map_err(|error| match name.filter(|_| several) {
            Some(name) => {
                let place = format!("{}: ", path.display());
                let rest = error.message.strip_prefix(&place).unwrap_or(&error.message);
                CliError { message: format!("{place}{name}: {rest}"), ..error }
            }
            None => error,
        })?;
    }
    Ok(())
}

fn checked(path: &Path, document: Value) -> Result<(), CliError> {
    let failed = |error: CliError| CliError { field: error.field.filter(|field| field != "--file"), ..error };
    let wrong = |message: &dyn std::fmt::Display| CliError { field: None, ..file_error("", path, message) };
    let command = UpArgs::augment_args(clap::Command::new("up"));
    let matches = command.try_get_matches_from(["up", MODEL]).map_err(CliError::from)?;
    let mut options = UpArgs::from_arg_matches(&matches).map_err(CliError::from)?;
    let spec = document.get("spec").cloned().unwrap_or_default();
    let text = serde_yaml::to_string(&document).map_err(|error| wrong(&error))?;
    let resource = parse_document(path, document).map_err(failed)?;
    fill(&mut options, &resource, path, &matches).map_err(failed)?;
    if spec.get("workload").is_some() {
        workload::check(&text).map_err(|error| wrong(&error))?;
    }
    if spec.get("pricing").is_some() {
        planning::parse_prices(&text).map_err(|error| wrong(&error))?;
    }
    Ok(())
}
