//! Manifests, checked without being used.

use crate::commands::up::UpArgs;
use crate::exit::CliError;
use crate::files::in_file;
use crate::planning;
use crate::resource::{KIND, documents, expand_document};
use crate::workload;
use clap::Args;
use serde_yaml::Value;
use std::ffi::OsString;
use std::path::Path;

/// Stands for the folder of a model that only a cluster has.
const MODEL: &str = "model";

/// Checks every MoEDeployment of the file at `path`, which has `text`: as `up --file` reads it, with the values of the flags
/// that it means.
pub(crate) fn check(path: &Path, text: &str) -> Result<(), CliError> {
    let wrong = |message: &dyn std::fmt::Display| CliError { field: None, ..in_file("", path, message) };
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
    let wrong = |message: &dyn std::fmt::Display| CliError { field: None, ..in_file("", path, message) };
    let up: [OsString; 4] = ["up".into(), MODEL.into(), "--file".into(), path.into()];
    let command = || UpArgs::augment_args(clap::Command::new("up"));
    let matches = command().try_get_matches_from(&up).map_err(CliError::from)?;
    let spec = document.get("spec").cloned().unwrap_or_default();
    let text = serde_yaml::to_string(&document).map_err(|error| wrong(&error))?;
    let expanded = expand_document(path, document, &matches).map_err(failed)?;
    if spec.get("workload").is_some() {
        workload::check(&text).map_err(|error| wrong(&error))?;
    }
    if spec.get("pricing").is_some() {
        planning::prices_of(&text).map_err(|error| wrong(&error))?;
    }
    // A value that its flag would refuse.
    let flags = up.into_iter().take(2).chain(expanded.arguments);
    command().try_get_matches_from(flags).map(drop).map_err(|error| {
        let error = CliError::from(error);
        let text = error.message.split_whitespace().collect::<Vec<_>>().join(" ");
        wrong(&format!("as flags of `remoe up`: {text}"))
    })
}
