//! Reads everything that belongs to a deployment from the API: the only module of a reconcile that does.

use super::api::{MoEDemand, MoEDeployment, MoEPlan, MoERecord, Replan};
use super::calls::{CallError, Calls};
use super::conversations::Heard;
use super::fleet::Others;
use super::gateways::Gateways;
use super::identity::knows_gateways;
use super::lacking::{Lacking, lacking};
use super::names;
use super::observed::Observed;
use super::ownership::is_owned_by;
use super::pods::Run;
use super::records::{Details, Records};
use super::rest::Rest;
use jiff::Timestamp;
use kube::ResourceExt;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use tokio::try_join;

/// Reads everything that belongs to `deployment`; `heard` is what its main functions said, `serving` are those of its pods
/// that start and said that they serve, and `others` what is known of the functions of other deployments. Where there are `gateways`, they are asked for too.
///
/// # Errors
/// A call that came to nothing, or a value that cannot be written as JSON.
pub(super) async fn read(
    calls: &Calls,
    deployment: &MoEDeployment,
    (heard, serving): (HashMap<String, Heard>, BTreeSet<Run>),
    others: Others,
    gateways: Option<&Gateways>,
) -> Result<Observed, ReadError> {
    let name = deployment.name_any();
    let labels = BTreeMap::from([(names::DEPLOYMENT.to_owned(), name.clone())]);
    let selector = names::selector_text(&labels);
    let demand = async {
        match gateways {
            Some(_) => calls.get::<MoEDemand>(&name).await,
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
        calls.list(&selector),
        calls.list(&selector),
        calls.list(&selector),
        calls.list(&selector),
        calls.plans(&selector),
        calls.list::<MoERecord>(&selector),
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
    let strange_gateways = certified.is_some() && live.as_ref().is_some_and(|live| live.strange);
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
        let Some(lacking) = lacking(deployment, records)? else { break };
        match lacking {
            Lacking::Log(pod) => {
                let log = calls.log(&pod).await.map_err(|error| error.to_string());
                details.logs.insert(pod, log);
            }
            Lacking::Profile(name) => {
                let record = calls.get(&name).await?;
                details.profiles.insert(name, record);
            }
            Lacking::Map(name) => {
                let map = calls.get(&name).await?;
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
        others,
        demand,
        gateways: live.uids,
        strange_gateways,
        uncertified: false,
        waits: false,
        rest: Rest::default(),
        wake_plan: None,
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
