//! Parsing of MoEDeployment manifests.

use crate::exit::CliError;
use crate::files::{file_error, read};
use crate::flags::device;
use remoe_api::{InvalidResource, MoEDeployment, MoEDeploymentSpec};
use remoe_planner::FieldError;
use serde::Deserialize;
use serde_json::Value;
use serde_yaml::Value as Yaml;
use std::fmt::Display;
use std::path::Path;

pub(crate) const KIND: &str = "MoEDeployment";

/// MoEDeployment of a manifest.
pub(crate) struct Resource {
    pub(crate) name: String,
    pub(crate) spec: MoEDeploymentSpec,
    /// Device as stated. In contrast to a cluster, a machine accepts GPU indices (`cuda:1`).
    pub(crate) device: Option<String>,
    document: Value,
}

impl Resource {
    fn from_yaml(document: Yaml) -> Result<Self, InvalidResource> {
        let unreadable = |field: &str, message: String| InvalidResource::Unreadable {
            field: field.to_owned(),
            message: format!("invalid: {message}"),
        };
        let mut document = serde_json::to_value(document)
            .map_err(|error| unreadable("spec", format!("{error}; write names of fields as text")))?;
        let mut stated_device = None;
        if let Some(Value::String(text)) = document.pointer_mut("/spec/main/device") {
            device(text).map_err(|expected| InvalidResource::Value {
                field: "spec.main.device".to_owned(),
                value: text.clone(),
                expected: expected.trim_start_matches("expected ").to_owned(),
            })?;
            stated_device = Some(text.clone());
            text.truncate(text.find(':').unwrap_or(text.len()));
        }
        let MoEDeployment { metadata, spec, .. } = MoEDeployment::from_document(document.clone())?;
        Ok(Self { name: metadata.name.unwrap_or_default(), spec, device: stated_device, document })
    }

    /// Reports if the manifest states `field`, such as `spec.main.cpu`. Other fields have their defaults.
    pub(crate) fn states(&self, field: &str) -> bool {
        let pointer = format!("/{}", field.replace('.', "/"));
        self.document.pointer(&pointer).is_some_and(|value| !value.is_null())
    }

    /// Returns the section `field` of the spec as YAML, with numeric strings as numbers.
    ///
    /// # Errors
    /// The manifest does not state the section.
    pub(crate) fn section(&self, field: &str) -> Result<String, FieldError> {
        let unreadable = |error: &dyn Display| FieldError::unreadable("", &error.to_string());
        if !self.states(&format!("spec.{field}")) {
            let message = "is missing; add it, or give a file of its own".to_owned();
            return Err(spec_error(field, FieldError { field: String::new(), message }));
        }
        let mut spec = serde_json::to_value(&self.spec).map_err(|error| unreadable(&error))?;
        let section = &mut spec[field];
        for value in section.as_object_mut().into_iter().flat_map(|fields| fields.values_mut()) {
            if let Some(number) = value.as_str().and_then(|text| text.parse::<f64>().ok()) {
                *value = number.into();
            }
        }
        serde_yaml::to_string(section).map_err(|error| unreadable(&error))
    }
}

/// Reads the only MoEDeployment of the file at `path`.
pub(crate) fn read_one(path: &Path) -> Result<Resource, CliError> {
    let text = read("--file", path)?;
    let mut found = documents(&text).map_err(|error| file_error("--file", path, &error))?;
    let document = found.pop().ok_or_else(|| resource_error(path, &format!("missing {KIND}")))?;
    if !found.is_empty() {
        let message = format!("expected one {KIND}, got {}; use one file for each", found.len() + 1);
        return Err(resource_error(path, &message));
    }
    parse_document(path, document)
}

/// Parses a document of the file at `path`.
pub(crate) fn parse_document(path: &Path, document: Yaml) -> Result<Resource, CliError> {
    Resource::from_yaml(document).map_err(|error| {
        let field = Some(error.field()).filter(|field| !field.is_empty()).map(str::to_owned);
        let file_error = file_error("--file", path, &field_error(error));
        CliError { field: field.or(file_error.field), ..file_error }
    })
}

/// Parses the MoEDeployment in `text`. Returns `None` for other files.
///
/// # Errors
/// The MoEDeployment is invalid, or the text is not YAML.
pub(crate) fn parse_resource(text: &str) -> Result<Option<Resource>, FieldError> {
    if !text.contains(KIND) {
        return Ok(None);
    }
    let found = documents(text).map_err(|error| FieldError::unreadable("", &error.to_string()))?.pop();
    found.map(|document| Resource::from_yaml(document).map_err(field_error)).transpose()
}

/// Creates an error about the MoEDeployment in the file at `path`.
pub(crate) fn resource_error(path: &Path, message: &str) -> CliError {
    file_error("--file", path, &message)
}

/// Creates an error about `field` of the MoEDeployment in the file at `path`.
pub(crate) fn resource_field_error(path: &Path, field: &str, problem: &dyn Display) -> CliError {
    CliError { field: Some(field.to_owned()), ..resource_error(path, &format!("{field}: {problem}")) }
}

/// Converts `error` for users. An unknown field gets a suggestion.
fn field_error(error: InvalidResource) -> FieldError {
    match &error {
        InvalidResource::Unknown { field, known } => {
            let name = field.rsplit('.').next().unwrap_or(field);
            let known = known.join("`, `");
            FieldError::unreadable(field, &format!("unknown field `{name}`, expected one of `{known}`"))
        }
        InvalidResource::Missing { field } => FieldError::new(field, "is missing; add it"),
        InvalidResource::Value { .. } | InvalidResource::Unreadable { .. } => {
            FieldError::new("", error.to_string())
        }
    }
}

/// Prepends `spec.` and the section to the field of an error about a section.
pub(crate) fn spec_error(section: &str, error: FieldError) -> FieldError {
    let FieldError { field, message } = error;
    let field = if field.is_empty() { format!("spec.{section}") } else { format!("spec.{section}.{field}") };
    FieldError { field, message }
}

/// Reports if `text` contains a MoEDeployment.
pub(crate) fn contains_resource(text: &str) -> bool {
    text.contains(KIND) && documents(text).is_ok_and(|found| !found.is_empty())
}

/// Returns the documents of kind MoEDeployment.
pub(crate) fn documents(text: &str) -> Result<Vec<Yaml>, serde_yaml::Error> {
    let documents = serde_yaml::Deserializer::from_str(text).map(Yaml::deserialize);
    let of_kind = |value: &Yaml| value.get("kind").and_then(Yaml::as_str) == Some(KIND);
    Ok(documents.collect::<Result<Vec<_>, _>>()?.into_iter().filter(of_kind).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const RESOURCE: &str = "apiVersion: v1\nkind: ConfigMap\n---\napiVersion: remoe.dev/v1alpha1\nkind: MoEDeployment\n\
        metadata: {name: demo, namespace: x}\nspec:\n  model: {source: 'hf://a/b', revision: main, cacheClaimName: c}\n  \
        slo: {tpot: 1m30s}\n  replicas: 2\n  workload: {maxInputTokens: 10, maxOutputTokens: 10, typicalInputTokens: 5, typicalOutputTokens: 5}\n  \
        pricing: {billing: Reserved, cpuCoreHour: '0.03', memoryGBHour: \"0.004\"}\n  \
        main: {memoryMB: {min: 200, max: 400}}\n  remoteExperts: {mode: Always, cpu: {min: 250, max: 2000, step: 250}, maxGroups: 3}\n";

    #[test]
    fn spec_section_has_numbers_instead_of_strings() {
        let resource = parse_resource(RESOURCE).unwrap().unwrap();
        let prices = remoe_hardware::Prices::from_yaml(&resource.section("pricing").unwrap()).unwrap();
        assert_eq!(prices.cpu_core_hour, 0.03);
        assert!(parse_resource("cpuCoreHour: 1").unwrap().is_none());
        let error = resource.section("profile").unwrap_err();
        assert!(error.to_string().starts_with("spec.profile is missing"), "{error}");
    }

    #[test]
    fn stated_fields_differ_from_defaults() {
        let resource = parse_resource(&RESOURCE.replace("replicas: 2", "rollout: null")).unwrap().unwrap();
        for (field, stated_device) in
            [("spec.main.memoryMB", true), ("spec.main.cpu", false), ("spec.rollout", false)]
        {
            assert_eq!(resource.states(field), stated_device, "{field}");
        }
    }
}
