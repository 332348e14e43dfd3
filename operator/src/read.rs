//! Read stage: reads everything that belongs to a deployment, from the API and from the pollers of its functions. No
//! later stage reads.

use super::api::{CallError, NamespaceApi};
use super::gateways::Gateways;
use super::identity::knows_gateways;
use super::main_pollers::MainPollers;
use super::missing_inputs::{MissingInput, missing_input};
use super::names;
use super::observed::Observed;
use super::ownership::is_owned_by;
use super::records::{Details, Records};
use super::start_probes::StartProbes;
use jiff::Timestamp;
use kube::ResourceExt;
use remoe_api::{MoEDemand, MoEDeployment, MoEPlan, MoERecord, Replan};
use std::collections::BTreeMap;
use tokio::try_join;

/// Sources that a reconcile reads from.
#[derive(Clone, Copy)]
pub(super) struct Sources<'a> {
    /// API of the deployment's namespace.
    pub(super) api: &'a NamespaceApi,
    /// Gateways, if there are any.
    pub(super) gateways: Option<&'a Gateways>,
    /// Pollers of main functions.
    pub(super) main_pollers: &'a MainPollers,
    /// Readiness probes of starting remote functions.
    pub(super) starting: &'a StartProbes,
}

/// Reads everything that belongs to `deployment`.
///
/// # Errors
/// A call fails, or a value cannot be written as JSON.
pub(super) async fn read(
    deployment: &MoEDeployment,
    Sources { api, gateways, main_pollers, starting }: Sources<'_>,
) -> Result<Observed, ReadError> {
    let (main_observations, serving) = (main_pollers.observations(deployment), starting.serving(deployment));
    let name = deployment.name_any();
    let labels = BTreeMap::from([(names::DEPLOYMENT.to_owned(), name.clone())]);
    let selector = names::selector_text(&labels);
    let demand = async {
        match gateways {
            Some(_) => api.get::<MoEDemand>(&name).await,
            None => Ok(None),
        }
    };
    let follows = deployment.spec.prediction.replan == Replan::Auto;
    let needs_gateways = deployment.spec.idle_window().is_some() || follows || deployment.spec.follows_load();
    let live = async {
        match gateways.filter(|_| needs_gateways) {
            Some(gateways) => gateways.live().await.map(Some),
            None => Ok(None),
        }
    };
    let (pods, services, network_policies, budgets, plans, records, demand, live) = try_join!(
        api.list(&selector),
        api.list(&selector),
        api.list(&selector),
        api.list(&selector),
        api.plans(&selector),
        api.list::<MoERecord>(&selector),
        demand,
        live,
    )?;
    // If a main function already requires certificates, later ones do too, and the gateways need not be read.
    // Gateways of an older version will be gone soon.
    let uid = deployment.uid().unwrap_or_default();
    let certificates_required = pods.iter().any(|pod| is_owned_by(pod, &uid) && knows_gateways(pod));
    let gateways_with_certificates =
        gateways.filter(|gateways| gateways.have_certificates() && !certificates_required);
    let live = match (gateways_with_certificates, live) {
        (Some(gateways), None) => Some(gateways.live().await?),
        (_, live) => live,
    };
    let uncertified_gateways =
        gateways_with_certificates.is_some() && live.as_ref().is_some_and(|live| live.has_uncertified);
    let live = live.filter(|_| needs_gateways).unwrap_or_default();
    // Objects of a deleted deployment of the same name are being garbage-collected.
    let record = |name: String| {
        records.iter().find(|record| record.name_any() == name && is_owned_by(*record, &uid)).cloned()
    };
    let (model, routing) = (record(names::model_record(&name)), record(names::routing_record(&name)));
    let plans: Vec<MoEPlan> = plans.into_iter().filter(|plan| is_owned_by(plan, &uid)).collect();
    let now = Timestamp::now();
    let mut details = Details::default();
    loop {
        let records = Records {
            pods: &pods,
            plans: &plans,
            model: model.as_ref(),
            routing: routing.as_ref(),
            details: &details,
            now,
        };
        let Some(missing_input) = missing_input(deployment, records)? else { break };
        match missing_input {
            MissingInput::Log(pod) => {
                let log = api.log(&pod).await.map_err(|error| error.to_string());
                details.logs.insert(pod, log);
            }
            MissingInput::Profile(name) => {
                let record = api.get(&name).await?;
                details.profiles.insert(name, record);
            }
            MissingInput::Map(name) => {
                let map = api.get(&name).await?;
                details.maps.insert(name, map);
            }
        }
    }
    Ok(Observed {
        pods,
        services,
        network_policies,
        budgets,
        plans,
        model,
        routing,
        details,
        main_observations,
        serving,
        demand,
        gateways: live.uids,
        uncertified_gateways,
        since: gateways.map_or(Timestamp::UNIX_EPOCH, |gateways| gateways.since),
        now,
    })
}

/// Failure to read a deployment's objects.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    /// API call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// Value cannot be serialised.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
}
