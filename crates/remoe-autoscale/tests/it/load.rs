//! Replicas under changing loads.

use remoe_autoscale::replicas::{
    GatewayReport, LoadHistory, MainReplicas, RemoteReplicas, RemoteWorkReport, ScalingPolicy, main_replicas,
    remote_replicas,
};
use std::time::Duration;

const POLICY: ScalingPolicy = ScalingPolicy { target: 0.7, window: Duration::from_secs(60) };
const MAIN: MainReplicas<'static> =
    MainReplicas { name: "main", present: 1, least: 1, most: 8, room: 10, serves: true };

/// Simulates a gateway with `requests(second)` requests in flight that reports every `pause` seconds for `seconds`.
/// Returns the replicas of every second.
fn run(seconds: u64, pause: u64, requests: impl Fn(u64) -> u32) -> Vec<u32> {
    let (mut history, mut occupied, mut present) = (LoadHistory::default(), 0, 1);
    let mut all = Vec::new();
    for second in 0..seconds {
        let now = Duration::from_secs(1_000 + second);
        if second % pause == 0 {
            let report = GatewayReport {
                at: now,
                occupied: Duration::from_secs(occupied),
                requests: requests(second),
                waiting: 0,
                sequence: second + 1,
            };
            history.add_gateway_report("a", report, POLICY.window, now);
        }
        let next = main_replicas(&POLICY, &history, MainReplicas { present, ..MAIN }, now);
        if next > present {
            history.record_raise(MAIN.name, now);
        }
        present = next;
        all.push(present);
        occupied += u64::from(requests(second));
    }
    all
}

#[test]
fn steady_load_keeps_sufficient_replicas_unchanged() {
    for (requests, replicas) in [(1, 1), (7, 1), (8, 2), (14, 2), (20, 3), (1_000, 8)] {
        let all = run(600, 10, |_| requests);
        assert!(all[60..].iter().all(|present| *present == replicas), "{requests}: {all:?}");
    }
}

#[test]
fn burst_adds_replicas_quickly_for_one_window() {
    // Ten times the load for 30 s.
    let all = run(600, 1, |second| if (200..230).contains(&second) { 50 } else { 5 });
    assert_eq!(all[199], 1);
    assert_eq!(all[207], 8, "{all:?}");
    assert!(all[207..260].iter().all(|present| *present == 8), "{all:?}");
    assert_eq!(all[330..], vec![1; 270], "{all:?}");
}

#[test]
fn load_that_oscillates_around_a_bound_causes_no_flapping() {
    let all = run(3_600, 10, |second| if second / 7 % 2 == 0 { 6 } else { 8 });
    let changes = all.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(changes <= 1, "{all:?}");
}

#[test]
fn fresh_observer_removes_no_replica() {
    let mut history = LoadHistory::default();
    let at = |seconds| Duration::from_secs(seconds);
    let six = MainReplicas { present: 6, ..MAIN };
    assert_eq!(main_replicas(&POLICY, &history, six, at(0)), 6);
    // No gateway reports: gateways are silent while there are no requests.
    history.start_at(at(0));
    assert_eq!(main_replicas(&POLICY, &history, six, at(59)), 6);
    assert_eq!(main_replicas(&POLICY, &history, six, at(60)), 1);
    // Bounds hold for any number of present replicas.
    assert_eq!(main_replicas(&POLICY, &history, MainReplicas { present: 20, least: 3, ..MAIN }, at(60)), 3);
}

#[test]
fn slowest_group_gets_a_replica() {
    const NAMES: [&str; 3] = ["g0", "g1", "g2"];
    let addresses: Vec<Vec<String>> =
        (0..3).map(|group| vec![format!("{group}:1"), format!("{group}:2")]).collect();
    let functions = |present: [u32; 3]| -> Vec<RemoteReplicas<'_>> {
        let groups = NAMES.into_iter().zip(&addresses).zip(present);
        groups
            .map(|((name, addresses), present)| RemoteReplicas {
                name,
                addresses,
                present,
                least: 1,
                most: 4,
                bytes: 1 << 30,
            })
            .collect()
    };
    let mut history = LoadHistory::default();
    history.start_at(Duration::ZERO);
    let (mut computed, mut second) = ([Duration::ZERO; 3], 0);
    let mut advance = |history: &mut LoadHistory, seconds: u64, busy: [f64; 3]| {
        for _ in 0..seconds / 15 {
            second += 15;
            let now = Duration::from_secs(second);
            computed
                .iter_mut()
                .zip(busy)
                .for_each(|(sum, busy)| *sum += Duration::from_secs(15).mul_f64(busy));
            let by_address = computed.iter().enumerate().map(|(group, sum)| (format!("{group}:2"), *sum));
            let worked = RemoteWorkReport { age: now, computed: by_address.collect() };
            history.add_work_report("main", worked, POLICY.window, now);
        }
        Duration::from_secs(second)
    };
    let unlimited_bytes = u64::MAX;
    let now = advance(&mut history, 90, [0.9, 0.4, 0.35]);
    assert_eq!(remote_replicas(&POLICY, &history, &functions([1; 3]), unlimited_bytes, now), [2, 1, 1]);
    assert_eq!(remote_replicas(&POLICY, &history, &functions([1; 3]), (1 << 30) - 1, now), [1, 1, 1]);
    // The replica stays while the load does, and is removed afterwards.
    assert_eq!(remote_replicas(&POLICY, &history, &functions([2, 1, 1]), unlimited_bytes, now), [2, 1, 1]);
    let now = advance(&mut history, 90, [0.05, 0.02, 0.02]);
    assert_eq!(remote_replicas(&POLICY, &history, &functions([2, 1, 1]), unlimited_bytes, now), [1, 1, 1]);
    // A replica that was just added stays. Others are removed nevertheless.
    history.record_raise("g0", now - Duration::from_secs(1));
    assert_eq!(remote_replicas(&POLICY, &history, &functions([2, 3, 1]), unlimited_bytes, now), [2, 1, 1]);
    assert_eq!(main_replicas(&POLICY, &history, MainReplicas { present: 3, ..MAIN }, now), 1);
}

#[test]
fn waiting_requests_count_at_once_only_without_serving_replicas() {
    let mut history = LoadHistory::default();
    let at = |seconds| Duration::from_secs(seconds);
    let report_at = |second, waiting| GatewayReport {
        at: at(second),
        requests: 30,
        waiting,
        sequence: second,
        ..GatewayReport::default()
    };
    history.add_gateway_report("a", report_at(0, 0), POLICY.window, at(0));
    history.add_gateway_report("a", report_at(60, 20), POLICY.window, at(60));
    let no_serving = MainReplicas { serves: false, ..MAIN };
    assert_eq!(main_replicas(&POLICY, &history, no_serving, at(60)), 5);
    assert_eq!(main_replicas(&POLICY, &history, MainReplicas { present: 4, ..no_serving }, at(60)), 5);
    history = LoadHistory::default();
    history.add_gateway_report("a", GatewayReport { requests: 0, ..report_at(0, 0) }, POLICY.window, at(0));
    history.add_gateway_report("a", report_at(60, 20), POLICY.window, at(60));
    assert_eq!(main_replicas(&POLICY, &history, MAIN, at(61)), 1, "the peak may be short");
    assert_eq!(main_replicas(&POLICY, &history, MAIN, at(66)), 5);
}

/// The hot group changes before any replica is removed.
#[test]
fn retained_replicas_count_towards_the_memory_limit() {
    let addresses: Vec<[String; 1]> = (0..4).map(|group| [group.to_string()]).collect();
    let (mut history, mut computed, mut present) = (LoadHistory::default(), [0.0; 4], [1_u32; 4]);
    for second in 0..600_u64 {
        let now = Duration::from_secs(second);
        let hot = (second / 20 % 4) as usize;
        for (group, sum) in computed.iter_mut().enumerate() {
            *sum += if group == hot { 3.0 } else { 0.1 };
        }
        if second.is_multiple_of(5) {
            let numbered = computed.iter().enumerate();
            let computed =
                numbered.map(|(group, sum)| (group.to_string(), Duration::from_secs_f64(*sum))).collect();
            history.add_work_report("main", RemoteWorkReport { age: now, computed }, POLICY.window, now);
        }
        let functions: Vec<RemoteReplicas<'_>> = addresses
            .iter()
            .zip(present)
            .map(|(addresses, present)| RemoteReplicas {
                name: &addresses[0],
                addresses,
                present,
                least: 1,
                most: 8,
                bytes: 10,
            })
            .collect();
        let wanted = remote_replicas(&POLICY, &history, &functions, 35, now);
        assert!(wanted.iter().sum::<u32>() <= 4 + 3, "{second}: {wanted:?}");
        for (addresses, _) in addresses
            .iter()
            .zip(wanted.iter().zip(present))
            .filter(|(_, (wanted, present))| **wanted > *present)
        {
            history.record_raise(&addresses[0], now);
        }
        present = std::array::from_fn(|group| wanted[group]);
    }
    assert!(present.iter().sum::<u32>() > 4, "{present:?}");
}
