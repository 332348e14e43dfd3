use crate::{MoEDemand, MoEDeployment, MoEPlan, MoERecord};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{CustomResourceExt, ResourceExt};

/// Returns the definitions of all resources, each as the name of its file and its YAML.
///
/// # Errors
/// A definition cannot be written as YAML.
pub fn crds() -> Result<Vec<(String, String)>, serde_yaml::Error> {
    let file = |crd: CustomResourceDefinition| {
        Ok((format!("{}.yaml", crd.name_any()), serde_yaml::to_string(&crd)?))
    };
    [MoEDeployment::crd(), MoEPlan::crd(), MoERecord::crd(), MoEDemand::crd()].into_iter().map(file).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Tools of Kubernetes read files, and the input of users, as YAML 1.1.
    #[test]
    fn no_word_is_a_boolean_to_those_who_read_the_files() {
        const BOOLEANS: [&str; 6] = ["y", "n", "yes", "no", "on", "off"];
        for (name, text) in crds().unwrap() {
            let value = |line: &str| {
                let line = line.trim_start();
                line.strip_prefix("- ")
                    .or(line.split_once(": ").map(|(_, value)| value))
                    .map(str::to_lowercase)
            };
            let found: Vec<String> =
                text.lines().filter_map(value).filter(|word| BOOLEANS.contains(&word.as_str())).collect();
            assert!(found.is_empty(), "{name}: {found:?}");
        }
    }
}
