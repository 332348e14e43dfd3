//! Calls of one main function: what it has in force, and what it is to have.

use super::build::CONTROL_PORT;
use remoe_launcher::control::{self, Callee};
use remoe_scaling::Worked;
use remoe_wire::identity::Trust;
use remoe_wire::placement_digest;
use remoe_wire::v1::{EndpointProblem, LayerPairs, Routing};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use tokio::time::timeout;

/// A main function that says nothing for this long is not up.
const DESCRIBE: Duration = Duration::from_secs(2);
/// One answer is waited for this long. Packing the experts of a large model takes longer; asking again joins
/// the attempt that goes on.
const TELL: Duration = Duration::from_secs(20);

/// Remote functions of one main function whose work is kept: 64 groups of 64 replicas.
const MOST_ENDPOINTS: usize = 4096;
/// An address and port of IPv6 have fewer characters.
const LONGEST_ADDRESS: usize = 64;

/// What a main function is to have in force.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Order {
    /// The number of the generation.
    pub number: u64,
    /// All of it, or why it cannot be told.
    pub routing: Result<Routing, String>,
}

/// What came of telling a main function its generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
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

/// What a main function says of itself.
#[derive(Debug, Clone)]
pub(super) struct Described {
    /// The generation that it has in force.
    pub(super) in_force: u64,
    /// Its placement by content.
    pub(super) placement: String,
    /// What the remote functions did that it calls.
    pub(super) worked: Worked,
    /// How often remote experts were used, where that was asked.
    pub(super) pairs: Vec<LayerPairs>,
}

/// What the main function at `ip`, which has to be who `trust` says, says of itself, with `uses` also of the use of
/// remote experts; none: it did not answer.
pub(super) async fn describe(ip: IpAddr, trust: Option<&Trust>, uses: bool) -> Option<Described> {
    let main = callee(ip, trust);
    let answer = match uses {
        true => control::describe_uses(main, DESCRIBE).await,
        false => control::describe(main, DESCRIBE).await,
    };
    let answer = answer.ok()?;
    // As many as a routing can name.
    let work =
        answer.work.into_iter().filter(|work| work.address.len() <= LONGEST_ADDRESS).take(MOST_ENDPOINTS);
    let computed = work.map(|work| (work.address, Duration::from_micros(work.computed_us)));
    Some(Described {
        in_force: answer.generation,
        placement: answer.placement,
        worked: Worked { age: Duration::from_micros(answer.age_us), computed: computed.collect() },
        pairs: answer.pairs,
    })
}

/// Tells the main function at `ip` what it is to have in force.
pub(super) async fn tell(ip: IpAddr, order: &Order, trust: Option<&Trust>) -> Outcome {
    match timeout(TELL, put_in_force(ip, order, trust)).await {
        Ok(Ok(problems)) => Outcome::InForce { problems },
        Ok(Err(message)) => Outcome::Failed(message),
        Err(_elapsed) => Outcome::Underway,
    }
}

async fn put_in_force(ip: IpAddr, order: &Order, trust: Option<&Trust>) -> Result<Vec<String>, String> {
    let routing = order.routing.clone()?;
    let placement = placement_digest(&routing);
    // Given up from outside first: that it takes long is no failure.
    let ack = control::set_routing(callee(ip, trust), routing, 2 * TELL).await;
    let ack = ack.map_err(|error| error.message)?;
    if (ack.generation, &ack.placement) != (order.number, &placement) {
        return Err(format!("unknown routing generation {} is in force", ack.generation));
    }
    let problem = |problem: &EndpointProblem| format!("{}: {}", problem.address, problem.message);
    Ok(ack.problems.iter().map(problem).collect())
}

fn callee(ip: IpAddr, trust: Option<&Trust>) -> Callee {
    Callee { address: SocketAddr::new(ip, CONTROL_PORT), trust: trust.cloned() }
}
