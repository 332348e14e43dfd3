//! Calls of one main function: what it has in force, and what it is to have.

use super::events::shortened;
use super::ports::CONTROL_PORT;
use remoe_autoscale::replicas::Worked;
use remoe_proto::identity::Trust;
use remoe_proto::v1::{LayerExperts, LayerPairs, MainDescription, Routing, RoutingAck};
use remoe_proto::{ErrorCode, MAX_ENDPOINTS, MAX_EXPERTS, MAX_LAYERS, ServiceError, placement_digest};
use remoe_rollout::control::{self, Callee};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use tokio::time::timeout;

/// A main function that says nothing for this long is not up.
const DESCRIBE: Duration = Duration::from_secs(2);
/// One answer is waited for this long. Packing the experts of a large model takes longer; asking again joins
/// the attempt that goes on.
const TELL: Duration = Duration::from_secs(20);

/// An address and port of IPv6 have fewer characters.
const LONGEST_ADDRESS: usize = 64;
/// Hexadecimal digits of a placement.
const PLACEMENT_DIGITS: usize = 64;
/// Endpoints of one answer whose problems are shown, and bytes of each.
const MOST_PROBLEMS: usize = 16;
const LONGEST_PROBLEM: usize = 256;

/// Generation that a main function is to have in force.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RoutingOrder {
    /// The number of the generation.
    pub number: u64,
    /// All of it, or why it cannot be told.
    pub routing: Result<Routing, String>,
}

/// Result of telling a main function its generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GenerationOutcome {
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

/// The remote functions whose use main functions are asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct WatchedFunctions {
    /// The experts of each, by its name.
    pub hosted: BTreeMap<String, Vec<LayerExperts>>,
    /// Names of the functions that sleep: a use of one of them is news.
    pub asleep: BTreeSet<String>,
}

/// Description of a main function by itself.
#[derive(Debug, Clone)]
pub(super) struct CheckedDescription {
    /// The generation that it has in force.
    pub(super) in_force: u64,
    /// Digest of its placement.
    pub(super) placement: String,
    /// Work that its remote functions did.
    pub(super) worked: Worked,
    /// How often remote experts were used, where that was asked.
    pub(super) pairs: Vec<LayerPairs>,
}

/// Why there is no description of a main function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum DescriptionError {
    /// It did not answer.
    Silent,
    /// It answered what no main function of this release does.
    Invalid(String),
}

/// Returns what the main function at `ip`, which has to be who `trust` says, says of itself; with `uses` also of the use of
/// remote experts.
pub(super) async fn describe(
    ip: IpAddr,
    trust: Option<&Trust>,
    uses: bool,
) -> Result<CheckedDescription, DescriptionError> {
    let main = callee(ip, trust);
    let answer = match uses {
        true => control::describe_uses(main, DESCRIBE).await,
        false => control::describe(main, DESCRIBE).await,
    };
    match answer {
        Ok(answer) => checked(answer).map_err(DescriptionError::Invalid),
        Err(ServiceError { code: ErrorCode::InvalidArgument, message, .. }) => {
            Err(DescriptionError::Invalid(message))
        }
        Err(_unreachable) => Err(DescriptionError::Silent),
    }
}

/// Checks every field of `answer` that is read here against its bound.
fn checked(answer: MainDescription) -> Result<CheckedDescription, String> {
    let bound = |field: &str, most: usize, found: usize| match found > most {
        true => Err(format!(
            "invalid `{field}` in the description: expected at most {most}, got {found}; run an image of this release"
        )),
        false => Ok(()),
    };
    let MainDescription { generation, placement, work, age_us, pairs, .. } = answer;
    let is_digest =
        placement.len() == PLACEMENT_DIGITS && placement.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !placement.is_empty() && !is_digest {
        let shown = shortened(&placement, PLACEMENT_DIGITS);
        return Err(format!(
            "invalid `placement` in the description: expected {PLACEMENT_DIGITS} hexadecimal digits, got {} bytes, \
             {shown:?}; run an image of this release",
            placement.len()
        ));
    }
    bound("work", MAX_ENDPOINTS, work.len())?;
    work.iter().try_for_each(|work| bound("work.address", LONGEST_ADDRESS, work.address.len()))?;
    bound("pairs", MAX_LAYERS, pairs.len())?;
    for of_layer in &pairs {
        bound("pairs.experts", MAX_EXPERTS, of_layer.experts.len())?;
        bound("pairs.pairs", MAX_EXPERTS, of_layer.pairs.len())?;
    }
    let computed = work.into_iter().map(|work| (work.address, Duration::from_micros(work.computed_us)));
    Ok(CheckedDescription {
        in_force: generation,
        placement,
        worked: Worked { age: Duration::from_micros(age_us), computed: computed.collect() },
        pairs,
    })
}

/// Tells the main function at `ip` what it is to have in force.
pub(super) async fn tell(ip: IpAddr, order: &RoutingOrder, trust: Option<&Trust>) -> GenerationOutcome {
    match timeout(TELL, put_in_force(ip, order, trust)).await {
        Ok(Ok(problems)) => GenerationOutcome::InForce { problems },
        Ok(Err(message)) => GenerationOutcome::Failed(message),
        Err(_elapsed) => GenerationOutcome::Underway,
    }
}

async fn put_in_force(
    ip: IpAddr,
    order: &RoutingOrder,
    trust: Option<&Trust>,
) -> Result<Vec<String>, String> {
    let routing = order.routing.clone()?;
    let placement = placement_digest(&routing);
    // Given up from outside first: that it takes long is no failure.
    let ack = control::set_routing(callee(ip, trust), routing, 2 * TELL).await;
    let ack = ack.map_err(|error| error.message)?;
    if (ack.generation, &ack.placement) != (order.number, &placement) {
        return Err(format!("unknown routing generation {} is in force", ack.generation));
    }
    Ok(problems(&ack))
}

/// Returns the first problems of `ack`, each cut to its maximum: remote functions have a say in their texts.
fn problems(ack: &RoutingAck) -> Vec<String> {
    let shown = ack.problems.iter().take(MOST_PROBLEMS).map(|problem| {
        let (address, message) = (&problem.address, &problem.message);
        format!("{}: {}", shortened(address, LONGEST_ADDRESS), shortened(message, LONGEST_PROBLEM))
    });
    let others = ack.problems.len().saturating_sub(MOST_PROBLEMS);
    let others = (others > 0).then(|| format!("{others} more"));
    shown.chain(others).collect()
}

fn callee(ip: IpAddr, trust: Option<&Trust>) -> Callee {
    Callee { address: SocketAddr::new(ip, CONTROL_PORT), trust: trust.cloned() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use remoe_proto::v1::{EndpointProblem, EndpointWork, LayerExperts};

    /// The largest description that an honest main function gives: 58 layers of 256 experts, all of them used, of 8,192
    /// remote functions with the longest addresses.
    pub(crate) fn largest() -> MainDescription {
        const LAYERS: u32 = 58;
        const EXPERTS: u32 = 256;
        let address = |number: usize| format!("[fd00:{number:04x}:ffff:ffff:ffff:ffff:ffff:ffff]:65535");
        MainDescription {
            checkpoint: "f".repeat(64),
            dtype: "bfloat16".to_owned(),
            numerics_class: "n".repeat(64),
            device: "d".repeat(64),
            generation: u64::MAX,
            placement: "f".repeat(PLACEMENT_DIGITS),
            age_us: u64::MAX,
            local: (0..LAYERS).map(|layer| LayerExperts { layer, experts: (0..EXPERTS).collect() }).collect(),
            work: (0..MAX_ENDPOINTS)
                .map(|number| EndpointWork { address: address(number), computed_us: u64::MAX })
                .collect(),
            pairs: (0..LAYERS)
                .map(|layer| LayerPairs {
                    layer,
                    experts: (0..EXPERTS).collect(),
                    pairs: vec![u64::MAX; EXPERTS as usize],
                })
                .collect(),
            ..MainDescription::default()
        }
    }

    #[test]
    fn largest_honest_description_is_within_every_bound() {
        let described = checked(largest()).unwrap();
        assert_eq!(described.worked.computed.len(), MAX_ENDPOINTS);
        assert_eq!((described.in_force, described.pairs.len()), (u64::MAX, 58));
        assert!(checked(MainDescription::default()).is_ok(), "nothing is in force yet");
    }

    #[test]
    fn description_beyond_a_bound_is_refused_by_name() {
        type DescriptionChange = (&'static str, fn(&mut MainDescription));
        let changes: [DescriptionChange; 6] = [
            ("placement", |answer| answer.placement = "f".repeat(PLACEMENT_DIGITS + 1)),
            ("placement", |answer| answer.placement = "é".repeat(PLACEMENT_DIGITS / 2)),
            ("work", |answer| answer.work.push(EndpointWork::default())),
            ("work.address", |answer| answer.work[7].address = "a".repeat(LONGEST_ADDRESS + 1)),
            ("pairs", |answer| answer.pairs = vec![LayerPairs::default(); MAX_LAYERS + 1]),
            ("pairs.experts", |answer| answer.pairs[3].experts = vec![0; MAX_EXPERTS + 1]),
        ];
        for (field, change) in changes {
            let mut answer = largest();
            change(&mut answer);
            let message = checked(answer).map(|_| ()).unwrap_err();
            assert!(message.contains(&format!("invalid `{field}`")), "{message}");
            assert!(message.len() < 300 && message.contains("run an image of this release"), "{message}");
        }
    }

    #[test]
    fn problems_of_an_answer_are_cut() {
        let problem = EndpointProblem { address: "a".repeat(10_000), message: "é".repeat(10_000) };
        let ack = RoutingAck { problems: vec![problem; 1000], ..RoutingAck::default() };
        let problems = problems(&ack);
        assert_eq!((problems.len(), &*problems[MOST_PROBLEMS]), (MOST_PROBLEMS + 1, "984 more"));
        assert!(problems.iter().all(|problem| problem.len() <= LONGEST_ADDRESS + 2 + LONGEST_PROBLEM));
    }
}
