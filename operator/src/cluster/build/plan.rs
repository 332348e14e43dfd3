use super::owned_meta;
use crate::cluster::api::{MoEDeployment, MoEPlan, MoEPlanSpec};
use crate::cluster::digest::digest;

/// The name of a plan's object.
pub fn plan_name(deployment: &str, hash: &str) -> String {
    format!("{deployment}-{hash}")
}

/// The object of a plan, named by its content, and that hash.
///
/// # Errors
/// The plan cannot be written as JSON.
pub fn plan_object(owner: &MoEDeployment, spec: MoEPlanSpec) -> Result<(String, MoEPlan), serde_json::Error> {
    let hash = digest(&spec)?;
    let metadata = owned_meta(owner, |deployment| plan_name(deployment, &hash));
    Ok((hash, MoEPlan { metadata, spec }))
}
