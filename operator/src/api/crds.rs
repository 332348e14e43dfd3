use super::{MoEDemand, MoEDeployment, MoEPlan};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{CustomResourceExt, ResourceExt};

/// The definitions of all resources, each as the name of its file and its YAML.
///
/// # Errors
/// A definition cannot be written as YAML.
pub fn crds() -> Result<Vec<(String, String)>, serde_yaml::Error> {
    let file = |crd: CustomResourceDefinition| {
        Ok((format!("{}.yaml", crd.name_any()), serde_yaml::to_string(&crd)?))
    };
    [MoEDeployment::crd(), MoEPlan::crd(), MoEDemand::crd()].into_iter().map(file).collect()
}
