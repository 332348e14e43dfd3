//! Speaking to main functions: what they have in force, and what they are to have.

use super::build::CONTROL_PORT;
use super::pods::PodView;
use super::routing::Generation;
use futures_util::future::join_all;
use remoe_launcher::control;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::timeout;

/// A main function that says nothing for this long is not up.
const DESCRIBE: Duration = Duration::from_secs(2);
/// A run waits this long for a generation to be in force: many deployments share few workers. Packing the
/// experts of a large model takes longer; asking again joins the attempt that goes on.
const PUSH: Duration = Duration::from_secs(2);

/// Asks the main functions among `pods` which generation they have in force.
pub(super) async fn describe(pods: &mut [PodView]) {
    let mains = pods.iter_mut().filter(|pod| pod.is_main && pod.is_sound());
    let asked = mains.filter_map(|pod| Some((pod.ip?, pod))).map(async |(ip, pod)| {
        let answer = control::describe(SocketAddr::new(ip, CONTROL_PORT), DESCRIBE).await;
        pod.follows(answer.ok().map(|description| description.generation));
    });
    join_all(asked).await;
}

/// What became of telling one main function.
#[derive(Debug)]
pub(super) struct Told {
    /// Its pod.
    pub(super) pod: String,
    /// The generation.
    pub(super) number: u64,
    /// What came of it.
    pub(super) outcome: Outcome,
}

/// What came of telling a main function its generation.
#[derive(Debug)]
pub(super) enum Outcome {
    /// It is in force, but for endpoints that could not be used.
    InForce {
        /// Why not.
        problems: Vec<String>,
    },
    /// The main function has not answered yet.
    Underway,
    /// It is not in force.
    Failed(String),
}

/// Tells each of the main functions its generation, all at once, with the account of its plan as `accounts`
/// has it.
pub(super) async fn push(
    pushes: Vec<(&PodView, &Generation)>,
    accounts: &BTreeMap<String, String>,
) -> Vec<Told> {
    let account = |generation: &Generation| accounts.get(&generation.plan).cloned().unwrap_or_default();
    let told = pushes.into_iter().map(async |(pod, generation)| Told {
        pod: pod.name.to_string(),
        number: generation.number,
        outcome: match timeout(PUSH, tell(pod, generation, account(generation))).await {
            Ok(Ok(problems)) => Outcome::InForce { problems },
            Ok(Err(message)) => Outcome::Failed(message),
            Err(_elapsed) => Outcome::Underway,
        },
    });
    join_all(told).await
}

async fn tell(pod: &PodView, generation: &Generation, account: String) -> Result<Vec<String>, String> {
    let ip = pod.ip.ok_or("has no address")?;
    let routing = generation.routing(account).map_err(|error| error.to_string())?;
    let address = SocketAddr::new(ip, CONTROL_PORT);
    // Given up from outside first: that it takes long is no failure.
    let ack = control::set_routing(address, routing, 2 * PUSH).await.map_err(|error| error.message)?;
    if ack.generation != generation.number {
        return Err(format!("generation {}, which is not of this operator, is in force", ack.generation));
    }
    let problem =
        |problem: &remoe_wire::v1::EndpointProblem| format!("{}: {}", problem.address, problem.message);
    Ok(ack.problems.iter().map(problem).collect())
}
