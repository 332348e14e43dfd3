//! Selection of a model by the `model` of a request: full names, and short names by a rule.

use crate::model::Model;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Rule by which short names select models. A short name is every name other than the full one.
///
/// Owners of models choose short names freely. If models have several owners, another owner could choose the same
/// name and get the requests that were meant for the first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ShortNames {
    /// A short name selects the only model that has it. Suits models of one owner.
    #[default]
    Any,
    /// A short name selects a model in the namespace of the request's key, or else in the namespace to which the map
    /// grants the name. Suits models `NAMESPACE/NAME` whose namespaces have different owners.
    Scoped(BTreeMap<String, String>),
}

impl ShortNames {
    /// Returns the model that `name` selects among `models`, for a key whose models are all in `default_namespace`.
    ///
    /// # Errors
    /// The number of models that match: 0, or several.
    pub(crate) fn find<'a>(
        &self,
        models: &'a [Arc<Model>],
        name: &str,
        default_namespace: Option<&str>,
    ) -> Result<&'a Arc<Model>, usize> {
        let granted = match self {
            Self::Scoped(granted) if default_namespace.is_none() => granted.get(name).map(String::as_str),
            Self::Scoped(_) | Self::Any => None,
        };
        // A granted name may be the full name of a model in another owner's namespace.
        let full = models.iter().find(|model| model.name() == name).filter(|_| granted.is_none());
        if let Some(model) = full {
            return Ok(model);
        }
        let scope = match self {
            Self::Any => None,
            Self::Scoped(_) => Some(default_namespace.or(granted).ok_or(0_usize)?),
        };
        let is_in_scope = |model: &Model| scope.is_none_or(|scope| namespace(model.name()) == Some(scope));
        let has_name = |model: &Model| model.description().0.iter().any(|short| short == name);
        let mut found = models.iter().filter(|model| is_in_scope(model) && has_name(model));
        match (found.next(), found.count()) {
            (Some(model), 0) => Ok(model),
            (first, others) => Err(usize::from(first.is_some()) + others),
        }
    }

    /// Returns the model of a request without a `model`: the only one of `models`. With scoped names, the request
    /// needs a key of one namespace: the only model of a cluster may be another owner's tomorrow.
    pub(crate) fn only<'a>(
        &self,
        models: &'a [Arc<Model>],
        default_namespace: Option<&str>,
    ) -> Option<&'a Arc<Model>> {
        match (self, default_namespace, models) {
            (Self::Any, _, [model]) | (Self::Scoped(_), Some(_), [model]) => Some(model),
            _ => None,
        }
    }
}

/// Returns the namespace of the model called `name`, if the name has one.
pub(crate) fn namespace(name: &str) -> Option<&str> {
    name.split_once('/').map(|(namespace, _)| namespace)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::metrics::GatewayMetrics;
    use crate::{ModelOptions, PrefixIndex};
    use std::time::Duration;

    fn model(name: &str, served: &str) -> Arc<Model> {
        let options = ModelOptions {
            name: name.to_owned(),
            short_names: vec![
                served.to_owned(),
                namespace(name).map_or(name, |space| &name[space.len() + 1..]).to_owned(),
            ],
            context_length: 64,
            max_requests: 1,
            waiting_bytes: 1,
            wake_limit: Duration::from_secs(1),
        };
        Model::new(options, &GatewayMetrics::new().unwrap(), &PrefixIndex::default())
    }

    fn found(
        names: &ShortNames,
        models: &[Arc<Model>],
        name: &str,
        default_namespace: Option<&str>,
    ) -> Result<String, usize> {
        names.find(models, name, default_namespace).map(|model| model.name().to_owned())
    }

    #[test]
    fn full_name_selects_its_model_whatever_others_serve_as() {
        let models = [model("a/demo", "b/demo"), model("b/demo", "other")];
        for names in [ShortNames::Any, ShortNames::Scoped(BTreeMap::new())] {
            for default_namespace in [None, Some("a"), Some("b")] {
                assert_eq!(found(&names, &models, "b/demo", default_namespace), Ok("b/demo".to_owned()));
            }
        }
        let remaining = [model("a/demo", "b/demo")];
        assert_eq!(found(&ShortNames::Scoped(BTreeMap::new()), &remaining, "b/demo", None), Err(0));
    }

    #[test]
    fn short_name_needs_a_grant_or_a_key_of_the_namespace() {
        let models = [model("a/demo", "gpt"), model("b/demo", "gpt")];
        let none = ShortNames::Scoped(BTreeMap::new());
        assert_eq!(found(&none, &models, "demo", None), Err(0));
        for (default_namespace, name) in [("a", "demo"), ("a", "gpt"), ("b", "demo")] {
            assert_eq!(
                found(&none, &models, name, Some(default_namespace)),
                Ok(format!("{default_namespace}/demo"))
            );
        }
        let granted = ShortNames::Scoped([("gpt".to_owned(), "b".to_owned())].into());
        assert_eq!(found(&granted, &models, "gpt", None), Ok("b/demo".to_owned()));
        assert_eq!(found(&granted, &models, "demo", None), Err(0), "the model's other name is not granted");
        assert_eq!(
            found(&granted, &models, "gpt", Some("a")),
            Ok("a/demo".to_owned()),
            "a key selects in its own namespace"
        );
    }

    #[test]
    fn granted_name_is_not_inherited_by_another_namespace() {
        let granted = ShortNames::Scoped([("gpt".to_owned(), "a".to_owned())].into());
        // The original was deleted, and another namespace has its names.
        let remaining = [model("b/demo", "gpt")];
        assert_eq!(found(&granted, &remaining, "gpt", None), Err(0));
        assert_eq!(found(&ShortNames::Any, &remaining, "gpt", None), Ok("b/demo".to_owned()));
    }

    #[test]
    fn granted_name_is_not_taken_by_a_namespace_of_its_first_part() {
        let models = [model("a/demo", "openai/gpt"), model("openai/gpt", "gpt")];
        let granted = ShortNames::Scoped([("openai/gpt".to_owned(), "a".to_owned())].into());
        assert_eq!(found(&granted, &models, "openai/gpt", None), Ok("a/demo".to_owned()));
        assert_eq!(found(&granted, &models[1..], "openai/gpt", None), Err(0), "nor inherited");
        assert_eq!(found(&granted, &models, "openai/gpt", Some("openai")), Ok("openai/gpt".to_owned()));
    }

    #[test]
    fn names_that_two_models_of_a_scope_have_are_ambiguous() {
        let models = [model("a/one", "gpt"), model("a/two", "gpt"), model("b/gpt", "gpt")];
        let granted = ShortNames::Scoped([("gpt".to_owned(), "a".to_owned())].into());
        assert_eq!(found(&granted, &models, "gpt", None), Err(2));
        assert_eq!(found(&ShortNames::Any, &models, "gpt", None), Err(3));
    }

    #[test]
    fn only_model_is_selected_unless_it_may_become_anothers() {
        let models = [model("a/demo", "gpt")];
        let scoped = ShortNames::Scoped([("gpt".to_owned(), "a".to_owned())].into());
        assert!(scoped.only(&models, None).is_none());
        assert!(scoped.only(&models, Some("a")).is_some() && ShortNames::Any.only(&models, None).is_some());
        assert!(ShortNames::Any.only(&[], None).is_none());
    }
}
