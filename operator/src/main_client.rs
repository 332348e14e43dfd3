//! Calls to the control service of a main function: describe it, and put a routing generation in force.

use super::events::truncated;
use super::ports::CONTROL_PORT;
use remoe_autoscale::replicas::RemoteWorkReport;
use remoe_proto::identity::Trust;
use remoe_proto::v1::{LayerExperts, LayerPairs, MainDescription, Routing, RoutingAck};
use remoe_proto::{ErrorCode, MAX_ENDPOINTS, MAX_EXPERTS, MAX_LAYERS, ServiceError, placement_digest};
use remoe_rollout::control::{self, Callee};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use tokio::time::timeout;

/// Timeout of a describe call. A main function that takes longer counts as down.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of a set-routing call. Packing the experts of a large model takes longer; the next call joins the attempt
/// in progress.
const SET_ROUTING_TIMEOUT: Duration = Duration::from_secs(20);

/// Upper bound of the characters of an IPv6 address with its port.
const MAX_ADDRESS_BYTES: usize = 64;
/// Hexadecimal digits of a placement digest.
const PLACEMENT_DIGEST_DIGITS: usize = 64;
/// Number of endpoint problems that are reported, and maximum bytes of each.
const MAX_SHOWN_PROBLEMS: usize = 16;
const MAX_PROBLEM_BYTES: usize = 256;

/// Generation that a main function is to have in force.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RoutingOrder {
    /// Number of the generation.
    pub number: u64,
    /// Routing of the generation, or the reason why it cannot be sent.
    pub routing: Result<Routing, String>,
}

/// Outcome of sending a generation to a main function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GenerationOutcome {
    /// The generation is in force, except for unusable endpoints.
    InForce {
        /// Problem of each unusable endpoint.
        problems: Vec<String>,
    },
    /// The main function has not answered yet.
    Underway,
    /// The main function rejected it; with the reason.
    Failed(String),
}

/// Remote functions whose usage main functions report.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct WatchedFunctions {
    /// Hosted experts by function name.
    pub hosted: BTreeMap<String, Vec<LayerExperts>>,
    /// Names of sleeping functions. Any use of them triggers a reconcile.
    pub asleep: BTreeSet<String>,
}

/// Description that a main function gave of itself, checked against all bounds.
#[derive(Debug, Clone)]
pub(super) struct CheckedDescription {
    /// Routing generation in force.
    pub(super) in_force: u64,
    /// Digest of the placement in force.
    pub(super) placement: String,
    /// Compute time of its remote functions.
    pub(super) worked: RemoteWorkReport,
    /// Usage counts of remote experts; empty if not requested.
    pub(super) pairs: Vec<LayerPairs>,
}

/// Why there is no description of a main function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum DescriptionError {
    /// It did not answer.
    Silent,
    /// The description violates a bound.
    Invalid(String),
}

/// Returns the description of the main function at `ip`, whose identity is checked against `trust`. If `with_usage`
/// is set, it includes the usage counts of remote experts.
pub(super) async fn describe(
    ip: IpAddr,
    trust: Option<&Trust>,
    with_usage: bool,
) -> Result<CheckedDescription, DescriptionError> {
    let main = main_callee(ip, trust);
    let answer = match with_usage {
        true => control::describe_uses(main, DESCRIBE_TIMEOUT).await,
        false => control::describe(main, DESCRIBE_TIMEOUT).await,
    };
    match answer {
        Ok(answer) => check_description(answer).map_err(DescriptionError::Invalid),
        Err(ServiceError { code: ErrorCode::InvalidArgument, message, .. }) => {
            Err(DescriptionError::Invalid(message))
        }
        Err(_unreachable) => Err(DescriptionError::Silent),
    }
}

/// Checks every field of `answer` that the operator reads against its bound.
fn check_description(answer: MainDescription) -> Result<CheckedDescription, String> {
    let check_bound = |field: &str, max: usize, actual: usize| match actual > max {
        true => Err(format!(
            "invalid `{field}` in the description: expected at most {max}, got {actual}; run an image of this release"
        )),
        false => Ok(()),
    };
    let MainDescription { generation, placement, work, age_us, pairs, .. } = answer;
    let is_digest =
        placement.len() == PLACEMENT_DIGEST_DIGITS && placement.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !placement.is_empty() && !is_digest {
        let shown = truncated(&placement, PLACEMENT_DIGEST_DIGITS);
        return Err(format!(
            "invalid `placement` in the description: expected {PLACEMENT_DIGEST_DIGITS} hexadecimal digits, got {} bytes, \
             {shown:?}; run an image of this release",
            placement.len()
        ));
    }
    check_bound("work", MAX_ENDPOINTS, work.len())?;
    work.iter().try_for_each(|work| check_bound("work.address", MAX_ADDRESS_BYTES, work.address.len()))?;
    check_bound("pairs", MAX_LAYERS, pairs.len())?;
    for layer in &pairs {
        check_bound("pairs.experts", MAX_EXPERTS, layer.experts.len())?;
        check_bound("pairs.pairs", MAX_EXPERTS, layer.pairs.len())?;
    }
    let computed = work.into_iter().map(|work| (work.address, Duration::from_micros(work.computed_us)));
    Ok(CheckedDescription {
        in_force: generation,
        placement,
        worked: RemoteWorkReport { age: Duration::from_micros(age_us), computed: computed.collect() },
        pairs,
    })
}

/// Sends the generation of `order` to the main function at `ip`.
pub(super) async fn set_routing(
    ip: IpAddr,
    order: &RoutingOrder,
    trust: Option<&Trust>,
) -> GenerationOutcome {
    match timeout(SET_ROUTING_TIMEOUT, try_set_routing(ip, order, trust)).await {
        Ok(Ok(problems)) => GenerationOutcome::InForce { problems },
        Ok(Err(message)) => GenerationOutcome::Failed(message),
        Err(_elapsed) => GenerationOutcome::Underway,
    }
}

async fn try_set_routing(
    ip: IpAddr,
    order: &RoutingOrder,
    trust: Option<&Trust>,
) -> Result<Vec<String>, String> {
    let routing = order.routing.clone()?;
    let placement = placement_digest(&routing);
    // The caller's timeout ends first and reports `Underway`: a slow answer is no failure.
    let ack = control::set_routing(main_callee(ip, trust), routing, 2 * SET_ROUTING_TIMEOUT).await;
    let ack = ack.map_err(|error| error.message)?;
    if (ack.generation, &ack.placement) != (order.number, &placement) {
        return Err(format!("unknown routing generation {} is in force", ack.generation));
    }
    Ok(problems(&ack))
}

/// Returns the first problems of `ack`, each truncated: the texts come from remote functions, which are not trusted.
fn problems(ack: &RoutingAck) -> Vec<String> {
    let shown = ack.problems.iter().take(MAX_SHOWN_PROBLEMS).map(|problem| {
        let (address, message) = (&problem.address, &problem.message);
        format!("{}: {}", truncated(address, MAX_ADDRESS_BYTES), truncated(message, MAX_PROBLEM_BYTES))
    });
    let others = ack.problems.len().saturating_sub(MAX_SHOWN_PROBLEMS);
    let others = (others > 0).then(|| format!("{others} more"));
    shown.chain(others).collect()
}

fn main_callee(ip: IpAddr, trust: Option<&Trust>) -> Callee {
    Callee { address: SocketAddr::new(ip, CONTROL_PORT), trust: trust.cloned() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use remoe_proto::v1::{EndpointProblem, EndpointWork, LayerExperts};

    /// Largest description that an honest main function gives: 58 layers of 256 experts, all used, on `MAX_ENDPOINTS`
    /// remote functions with the longest addresses.
    pub(crate) fn largest_description() -> MainDescription {
        const LAYERS: u32 = 58;
        const EXPERTS: u32 = 256;
        let address = |number: usize| format!("[fd00:{number:04x}:ffff:ffff:ffff:ffff:ffff:ffff]:65535");
        MainDescription {
            checkpoint: "f".repeat(64),
            dtype: "bfloat16".to_owned(),
            numerics_class: "n".repeat(64),
            device: "d".repeat(64),
            generation: u64::MAX,
            placement: "f".repeat(PLACEMENT_DIGEST_DIGITS),
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
        let described = check_description(largest_description()).unwrap();
        assert_eq!(described.worked.computed.len(), MAX_ENDPOINTS);
        assert_eq!((described.in_force, described.pairs.len()), (u64::MAX, 58));
        assert!(check_description(MainDescription::default()).is_ok(), "nothing is in force yet");
    }

    #[test]
    fn description_beyond_a_bound_is_refused_by_name() {
        type DescriptionChange = (&'static str, fn(&mut MainDescription));
        let changes: [DescriptionChange; 6] = [
            ("placement", |answer| answer.placement = "f".repeat(PLACEMENT_DIGEST_DIGITS + 1)),
            ("placement", |answer| answer.placement = "é".repeat(PLACEMENT_DIGEST_DIGITS / 2)),
            ("work", |answer| answer.work.push(EndpointWork::default())),
            ("work.address", |answer| answer.work[7].address = "a".repeat(MAX_ADDRESS_BYTES + 1)),
            ("pairs", |answer| answer.pairs = vec![LayerPairs::default(); MAX_LAYERS + 1]),
            ("pairs.experts", |answer| answer.pairs[3].experts = vec![0; MAX_EXPERTS + 1]),
        ];
        for (field, change) in changes {
            let mut answer = largest_description();
            change(&mut answer);
            let message = check_description(answer).map(|_| ()).unwrap_err();
            assert!(message.contains(&format!("invalid `{field}`")), "{message}");
            assert!(message.len() < 300 && message.contains("run an image of this release"), "{message}");
        }
    }

    #[test]
    fn problems_of_an_answer_are_cut() {
        let problem = EndpointProblem { address: "a".repeat(10_000), message: "é".repeat(10_000) };
        let ack = RoutingAck { problems: vec![problem; 1000], ..RoutingAck::default() };
        let problems = problems(&ack);
        assert_eq!((problems.len(), &*problems[MAX_SHOWN_PROBLEMS]), (MAX_SHOWN_PROBLEMS + 1, "984 more"));
        assert!(problems.iter().all(|problem| problem.len() <= MAX_ADDRESS_BYTES + 2 + MAX_PROBLEM_BYTES));
    }
}
