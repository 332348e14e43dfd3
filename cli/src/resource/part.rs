//! One part of a MoEDeployment, read as a file of its own.

use super::{KIND, Resource, documents, unreadable_resource};
use remoe_planner::FieldError;
use serde_yaml::Value;

/// Returns the part `field` of the spec of the one MoEDeployment that `text` is, as YAML with decimal numbers in place of
/// strings that are such; `None` where it is another file.
///
/// # Errors
/// A MoEDeployment with an unknown field or without that part, or a file that is no YAML.
pub(crate) fn part_of_spec(text: &str, field: &str) -> Result<Option<String>, FieldError> {
    if !text.contains(KIND) {
        return Ok(None);
    }
    let unreadable = |error: serde_yaml::Error| FieldError::unreadable("", &error.to_string());
    let Some(document) = documents(text).map_err(unreadable)?.pop() else { return Ok(None) };
    let part = document.get("spec").and_then(|spec| spec.get(field)).cloned();
    let _resource: Resource = serde_path_to_error::deserialize(document).map_err(unreadable_resource)?;
    let Some(mut part) = part else {
        let message = "is missing; add it, or give a file of its own".to_owned();
        return Err(in_spec(field, FieldError { field: String::new(), message }));
    };
    if let Value::Mapping(fields) = &mut part {
        for (_, value) in fields.iter_mut() {
            let number = value.as_str().and_then(|text| text.parse::<f64>().ok());
            if let Some(number) = number {
                *value = number.into();
            }
        }
    }
    serde_yaml::to_string(&part).map(Some).map_err(unreadable)
}

/// Returns `error` about the part `part` of a spec as one about the whole file.
pub(crate) fn in_spec(part: &str, error: FieldError) -> FieldError {
    let FieldError { field, message } = error;
    let field = if field.is_empty() { format!("spec.{part}") } else { format!("spec.{part}.{field}") };
    FieldError { field, message }
}
