//! `remoe check`: validates input files with the parsers of the commands that use them.

mod deployment;

use super::schema::SchemaKind;
use crate::exit::{CliError, CliExitCode};
use crate::output::{json, progress::print_error};
use crate::{files, planning, resource, workload};
use clap::{Args, ValueEnum};
use remoe_gateway_core::KeyFile;
use remoe_hardware::{NodeList, NodesError, Profile, ProfileError};
use remoe_planner::{AccountError, FieldError, PlanAccount, Problem};
use serde::Serialize;
use serde_json::{Map, Value};
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Files to check
    #[arg(value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,
    /// Kind of all files [default: recognised by the fields of each file]
    #[arg(long, value_enum, value_name = "KIND")]
    pub(crate) kind: Option<FileKind>,
}

/// Kinds of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum FileKind {
    /// API keys by tenant: `up --keys`, `gateway.keysSecretName` of the chart
    Keys,
    /// Requests to plan for: `--workload`
    Workload,
    /// Remote experts and the functions that host them: `up --plan`, `plan --evaluate`
    Plan,
    /// Model, workload, prices and limits: `plan --problem`
    Problem,
    /// Measured times of a model on a machine: `--profile`
    Profile,
    /// Nodes with their prices: `plan --nodes`
    Nodes,
    /// Prices of cores, memory and GPUs: `--pricing`
    Prices,
    /// `MoEDeployment` manifests: `up --file`, `kubectl apply`
    Deployment,
}

impl FileKind {
    const WITH_SCHEMA: [(Self, SchemaKind); 6] = [
        (Self::Workload, SchemaKind::Workload),
        (Self::Plan, SchemaKind::Plan),
        (Self::Problem, SchemaKind::Problem),
        (Self::Profile, SchemaKind::Profile),
        (Self::Nodes, SchemaKind::Nodes),
        (Self::Prices, SchemaKind::Prices),
    ];

    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Recognises the kind of a file: the one with the most fields in common, then the fewest missing required fields.
    /// Returns `None` if no kind matches, or several match equally.
    fn recognise(text: &str) -> Option<Self> {
        if resource::contains_resource(text) {
            return Some(Self::Deployment);
        }
        let fields = top_fields(text);
        if fields.contains("tenants") {
            return Some(Self::Keys);
        }
        let mut candidates: Vec<_> = Self::WITH_SCHEMA
            .into_iter()
            .map(|(kind, schema_kind)| {
                let forms = FormFields::of_schema(&schema_kind.schema().to_value());
                let known = forms.iter().map(|form| fields.intersection(&form.known).count()).max();
                let missing = forms.iter().map(|form| form.required.difference(&fields).count()).min();
                ((known.unwrap_or(0), Reverse(missing.unwrap_or(0))), kind)
            })
            .collect();
        candidates.sort_by_key(|(score, _)| Reverse(*score));
        match candidates[..] {
            [((0, _), _), ..] | [] => None,
            [(first, _), (second, _), ..] if first == second => None,
            [(_, kind), ..] => Some(kind),
        }
    }

    /// Parses `text`, the content of the file at `path`.
    fn check(self, path: &Path, text: &str) -> Result<(), CliError> {
        let file_error = |error: FieldError| {
            let field = Some(error.field.clone()).filter(|field| !field.is_empty());
            CliError { field, ..files::file_error("", path, &error) }
        };
        let profile_error = |ProfileError { field, message }| file_error(FieldError { field, message });
        let nodes_error = |NodesError { field, message }| file_error(FieldError { field, message });
        match self {
            Self::Keys => {
                // The error names the file, and contains no key.
                let opened = KeyFile::open(path.to_owned());
                opened.map(drop).map_err(|error| CliError {
                    path: Some(path.to_owned()),
                    field: None,
                    ..CliError::arguments("", error.to_string())
                })
            }
            Self::Workload => workload::check(text).map_err(file_error),
            Self::Plan => PlanAccount::from_plan_file(text).map(drop).map_err(|error| match error {
                AccountError::Plan(error) | AccountError::Problem(error) => file_error(error),
            }),
            Self::Problem => Problem::from_json(text).map(drop).map_err(file_error),
            Self::Profile => Profile::from_json(text).map(drop).map_err(profile_error),
            Self::Nodes => NodeList::from_yaml(text).map(drop).map_err(nodes_error),
            Self::Prices => planning::parse_prices(text).map(drop).map_err(file_error),
            Self::Deployment => deployment::check(path, text),
        }
    }
}

/// Returns the names of the top-level fields of a JSON or YAML file. Returns an empty set for other files.
fn top_fields(text: &str) -> BTreeSet<String> {
    // Tries JSON first, because it is parsed faster and plan files are long.
    let value = serde_json::from_str::<Value>(text).ok();
    let value = value.or_else(|| serde_yaml::from_str::<Value>(text).ok());
    match value {
        Some(Value::Object(fields)) => fields.into_iter().map(|(name, _)| name).collect(),
        _ => BTreeSet::new(),
    }
}

/// Names of the fields of one form of a file.
struct FormFields {
    known: BTreeSet<String>,
    required: BTreeSet<String>,
}

impl FormFields {
    /// Returns the fields of a schema, and of each of its alternatives.
    fn of_schema(schema: &Value) -> Vec<Self> {
        let alternatives = schema["anyOf"].as_array().into_iter().flatten();
        let referred = alternatives.filter_map(|form| {
            let pointer = form["$ref"].as_str()?.strip_prefix('#')?;
            schema.pointer(pointer)
        });
        let forms = std::iter::once(schema).chain(referred);
        forms.filter_map(|form| Some(Self::of(form, form["properties"].as_object()?))).collect()
    }

    fn of(form: &Value, properties: &Map<String, Value>) -> Self {
        let required = form["required"].as_array().into_iter().flatten();
        Self {
            known: properties.keys().cloned().collect(),
            required: required.filter_map(|name| name.as_str().map(str::to_owned)).collect(),
        }
    }
}

/// Result of checking one file.
#[derive(Serialize)]
struct FileCheck<'a> {
    path: &'a Path,
    /// `None` if the file could not be read or recognised.
    kind: Option<FileKind>,
    error: Option<CliError>,
}

fn check_file(path: &Path, stated: Option<FileKind>) -> FileCheck<'_> {
    let text = match files::read("", path) {
        Ok(text) => text,
        Err(error) => {
            let error = CliError { field: None, ..error };
            return FileCheck { path, kind: stated, error: Some(error) };
        }
    };
    let Some(kind) = stated.or_else(|| FileKind::recognise(&text)) else {
        let kinds: Vec<String> = FileKind::value_variants().iter().map(|kind| kind.name()).collect();
        let message = format!(
            "{}: cannot recognise the kind of file; state it with --kind: {}",
            path.display(),
            kinds.join(", ")
        );
        let error = CliError { path: Some(path.to_owned()), ..CliError::arguments("--kind", message) };
        return FileCheck { path, kind: None, error: Some(error) };
    };
    FileCheck { path, kind: Some(kind), error: kind.check(path, &text).err() }
}

/// Checks all files. If one is invalid, the exit code is that of invalid arguments.
pub(crate) fn run(args: &CheckArgs, as_json: bool) -> Result<ExitCode, CliError> {
    #[derive(Serialize)]
    struct Report<'a> {
        files: Vec<FileCheck<'a>>,
    }
    let files: Vec<_> = args.files.iter().map(|path| check_file(path, args.kind)).collect();
    let code = match files.iter().any(|file| file.error.is_some()) {
        true => ExitCode::from(CliExitCode::Arguments as u8),
        false => ExitCode::SUCCESS,
    };
    if as_json {
        json::print(&Report { files })?;
        return Ok(code);
    }
    for file in &files {
        match (&file.error, file.kind) {
            (Some(error), _) => print_error(&error.text()),
            (None, Some(kind)) => {
                writeln!(anstream::stdout().lock(), "{}: ok ({})", file.path.display(), kind.name())?;
            }
            (None, None) => {}
        }
    }
    Ok(code)
}
