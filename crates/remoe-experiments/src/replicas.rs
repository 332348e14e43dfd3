//! Simulation of autoscaling under bursts and changing topics, second by second: the operator's rule ([`remoe_autoscale`])
//! against fixed replicas and an autoscaler by concurrency.

use fastrand::Rng;
use remoe_autoscale::replicas::{
    GatewayReport, LoadHistory, MainReplicas, RemoteReplicas, RemoteWorkReport, ScalingPolicy, main_replicas,
    remote_replicas,
};
use serde::Serialize;
use std::collections::VecDeque;
use std::time::Duration;

/// Groups that each host a slice of every layer's experts.
const GROUPS: usize = 8;
/// Seconds of the trace.
const SECONDS: u64 = 4 * 3600;
/// Tokens per second that one replica of each group can compute with uniform routing.
const CAPACITY: f64 = 100.0;
/// Tokens per second outside of bursts.
const QUIET: f64 = 40.0;
/// Factor on [`QUIET`] during a burst.
const BURST: std::ops::Range<f64> = 2.0..6.0;
/// Seconds of a burst.
const LASTS: std::ops::Range<u64> = 60..240;
/// Seconds between two bursts.
const PAUSES: std::ops::Range<u64> = 300..900;
/// Seconds between two topics.
const TOPIC: u64 = 1_800;
/// Skew of a topic: the n-th most used group is used n^-SKEW as much as the first.
const SKEW: f64 = 0.8;
/// Seconds of a token without queueing.
const TOKEN: f64 = 0.025;
/// Seconds of the start of a replica.
const START: u64 = 10;
/// Maximum number of replicas of a group.
const MAX_REPLICAS: u32 = 8;
/// Name of all groups in the history of an autoscaler by concurrency.
const MAINS: &str = "main";
const POLICY: ScalingPolicy = ScalingPolicy { target: 0.7, window: Duration::from_secs(60) };

/// Result of one autoscaling rule.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReplicaTrial {
    /// Name of the rule.
    pub name: &'static str,
    /// Mean number of replicas of all groups: the memory use in functions.
    pub functions: f64,
    /// Seconds that a token waited for its slowest group: 50th, 95th and 99th percentile of tokens.
    pub wait: [f64; 3],
    /// Share of tokens that arrived while a group was overloaded.
    pub overloaded: f64,
}

/// A second of the trace.
#[derive(Debug, Clone)]
struct Second {
    tokens: f64,
    /// Seconds of a replica of each group per token.
    work: [f64; GROUPS],
}

/// Simulates every rule on the same random trace of `seed`.
#[must_use]
pub fn replicas(seed: u64) -> Vec<ReplicaTrial> {
    let trace = trace(seed);
    let fixed = |name, count| run(name, &trace, |_| [count; GROUPS]);
    vec![
        fixed("one of each", 1),
        fixed("four of each", 4),
        fixed("eight of each", MAX_REPLICAS),
        run("by concurrency", &trace, by_concurrency),
        run("by load", &trace, by_load),
    ]
}

fn trace(seed: u64) -> Vec<Second> {
    let mut rng = Rng::with_seed(seed);
    let mut draw = |range: std::ops::Range<f64>| range.start + rng.f64() * (range.end - range.start);
    let mut order: Vec<usize> = (0..GROUPS).collect();
    let (mut factor, mut until, mut trace) = (1.0, PAUSES.start, Vec::new());
    let mut shuffler = Rng::with_seed(seed ^ 1);
    for second in 0..SECONDS {
        if second.is_multiple_of(TOPIC) {
            shuffler.shuffle(&mut order);
        }
        if second == until {
            let bursts = factor > 1.0;
            factor = if bursts { 1.0 } else { draw(BURST) };
            let length = if bursts { PAUSES } else { LASTS };
            until += shuffler.u64(length);
        }
        let weight = |rank: usize| ((rank + 1) as f64).powf(-SKEW);
        let all: f64 = (0..GROUPS).map(weight).sum();
        let mut work = [0.0; GROUPS];
        for (rank, group) in order.iter().enumerate() {
            work[*group] = weight(rank) / all * GROUPS as f64 / CAPACITY;
        }
        // Approximates a Poisson process.
        let mean = QUIET * factor;
        trace.push(Second { tokens: (mean + draw(-1.7..1.7) * mean.sqrt()).max(0.0), work });
    }
    trace
}

/// Observations that replicas are chosen from.
struct Observations {
    history: LoadHistory,
    now: Duration,
    present: [u32; GROUPS],
}

/// Chooses the same number of replicas for all groups, by the concurrent requests.
fn by_concurrency(seen: &mut Observations) -> [u32; GROUPS] {
    // Requests that one replica of each group can serve with uniform routing.
    let room = (CAPACITY * TOKEN).round() as u32;
    let present = seen.present.iter().copied().max().unwrap_or(1);
    let wanted = main_replicas(
        &POLICY,
        &seen.history,
        MainReplicas { name: MAINS, present, least: 1, most: MAX_REPLICAS, room, serves: true },
        seen.now,
    );
    [wanted; GROUPS]
}

/// Chooses replicas by the operator's rule.
fn by_load(seen: &mut Observations) -> [u32; GROUPS] {
    let addresses: Vec<[String; 1]> = (0..GROUPS).map(|group| [group.to_string()]).collect();
    let functions: Vec<RemoteReplicas<'_>> = addresses
        .iter()
        .zip(seen.present)
        .map(|(addresses, present)| RemoteReplicas {
            name: &addresses[0],
            addresses,
            present,
            least: 1,
            most: MAX_REPLICAS,
            bytes: 1,
        })
        .collect();
    let wanted = remote_replicas(&POLICY, &seen.history, &functions, u64::MAX, seen.now);
    std::array::from_fn(|group| wanted[group])
}

fn run(
    name: &'static str,
    trace: &[Second],
    decide: impl Fn(&mut Observations) -> [u32; GROUPS],
) -> ReplicaTrial {
    let mut seen =
        Observations { history: LoadHistory::default(), now: Duration::ZERO, present: [1; GROUPS] };
    seen.history.start_at(seen.now);
    // Serving replicas; starting replicas with the second at which they serve.
    let (mut serving, mut coming) = ([1_u32; GROUPS], VecDeque::<(u64, [u32; GROUPS])>::new());
    let (mut backlog, mut computed) = ([0.0; GROUPS], [0.0; GROUPS]);
    let (mut occupied, mut said, mut functions) = (0.0, (0, 0.0), 0.0);
    let mut waits: Vec<(f64, f64)> = Vec::with_capacity(trace.len());
    let (mut overloaded, mut tokens) = (0.0, 0.0);
    for (second, now) in (0_u64..).zip(trace) {
        seen.now = Duration::from_secs(second);
        while coming.front().is_some_and(|(at, _)| *at <= second) {
            let Some((_, replicas)) = coming.pop_front() else { break };
            // Replicas that were removed meanwhile never serve.
            serving =
                std::array::from_fn(|group| replicas[group].min(seen.present[group]).max(serving[group]));
        }
        let (mut slowest, mut is_overloaded) = (0.0_f64, false);
        for group in 0..GROUPS {
            let replicas = f64::from(serving[group]);
            let load = now.tokens * now.work[group];
            let done = (backlog[group] + load).min(replicas);
            backlog[group] += load - done;
            computed[group] += done;
            let busy = (load / replicas).min(0.98);
            is_overloaded |= load > replicas;
            slowest = slowest.max(backlog[group] / replicas + now.work[group] * busy / (1.0 - busy));
        }
        waits.push((slowest, now.tokens));
        tokens += now.tokens;
        overloaded += if is_overloaded { now.tokens } else { 0.0 };
        functions += f64::from(seen.present.iter().sum::<u32>());
        // Little's law.
        let requests = now.tokens * (TOKEN + slowest);
        occupied += requests;
        if second >= said.0 + 10 || (second > said.0 && requests >= 2.0 * said.1) {
            let word = GatewayReport {
                at: seen.now,
                occupied: Duration::from_secs_f64(occupied),
                requests: requests.round() as u32,
                waiting: 0,
                sequence: second + 1,
            };
            seen.history.add_gateway_report("gateway", word, POLICY.window, seen.now);
            said = (second, requests);
        }
        if second.is_multiple_of(15) {
            let of = computed.iter().enumerate();
            let computed =
                of.map(|(group, time)| (group.to_string(), Duration::from_secs_f64(*time))).collect();
            seen.history.add_work_report(
                "main",
                RemoteWorkReport { age: seen.now, computed },
                POLICY.window,
                seen.now,
            );
        }
        let wanted = decide(&mut seen);
        let is_more = |group: &usize| wanted[*group] > seen.present[*group];
        let raised: Vec<usize> = (0..GROUPS).filter(is_more).collect();
        if !raised.is_empty() {
            raised.iter().for_each(|group| seen.history.record_raise(&group.to_string(), seen.now));
            seen.history.record_raise(MAINS, seen.now);
            coming.push_back((second + START, wanted));
        }
        serving = std::array::from_fn(|group| serving[group].min(wanted[group]));
        seen.present = wanted;
    }
    waits.sort_by(|one, other| one.0.total_cmp(&other.0));
    let percentile = |share: f64| {
        let mut passed = 0.0;
        let at = waits.iter().find(|(_, count)| {
            passed += count;
            passed >= share * tokens
        });
        at.map_or(0.0, |(wait, _)| *wait)
    };
    ReplicaTrial {
        name,
        functions: functions / trace.len() as f64,
        wait: [percentile(0.5), percentile(0.95), percentile(0.99)],
        overloaded: overloaded / tokens,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn autoscaling_needs_fewer_functions_than_static_peak_capacity() {
        for seed in [1, 2, 3] {
            let all = replicas(seed);
            let [one, four, eight, concurrency, load] = &all[..] else { unreachable!("five rules") };
            assert!(one.functions <= 8.0 && eight.functions > 63.9);
            // No fixed number is both sufficient and cheap.
            assert!(four.overloaded > 3.0 * load.overloaded && eight.overloaded < 0.1, "{all:#?}");
            assert!(load.functions < four.functions && load.wait[1] < four.wait[1] / 10.0, "{all:#?}");
            // Equal replicas for all groups take more functions than replicas where the load is.
            assert!(load.functions < concurrency.functions / 1.5, "{all:#?}");
            assert!(load.wait[0] <= concurrency.wait[0] && load.overloaded < 0.1, "{all:#?}");
        }
    }
}
