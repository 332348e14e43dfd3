//! The read stage: everything that belongs to a deployment, from the API and from conversations with its functions. No later
//! stage reads.

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
    /// Answers of main functions.
    pub(super) main_pollers: &'a MainPollers,
    /// Answers of remote functions that start.
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
    let (heard, serving) = (main_pollers.observations(deployment), starting.serving(deployment));
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
    let is_told = deployment.spec.idle_window().is_some() || follows || deployment.spec.follows_load();
    let live = async {
        match gateways.filter(|_| is_told) {
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
    // A main function that asked for certificates goes on to, so that nothing is read for it. Gateways of a version before are gone soon.
    let uid = deployment.uid().unwrap_or_default();
    let asks = pods.iter().any(|pod| is_owned_by(pod, &uid) && knows_gateways(pod));
    let certified = gateways.filter(|gateways| gateways.have_certificates() && !asks);
    let live = match (certified, live) {
        (Some(gateways), None) => Some(gateways.live().await?),
        (_, live) => live,
    };
    let uncertified_gateways = certified.is_some() && live.as_ref().is_some_and(|live| live.has_uncertified);
    let live = live.filter(|_| is_told).unwrap_or_default();
    // What belongs to an earlier deployment of the same name is on its way out.
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
        heard,
        serving,
        demand,
        gateways: live.uids,
        uncertified_gateways,
        since: gateways.map_or(Timestamp::UNIX_EPOCH, |gateways| gateways.since),
        now,
    })
}

/// Why a deployment could not be looked at.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    /// A call of the API.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A value that cannot be written as JSON.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
}
