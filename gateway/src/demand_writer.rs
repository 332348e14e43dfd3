//! Entries of this gateway in the status of a deployment's `MoEDemand`: when one is due, and how it is written.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, Resource};
use remoe_api::{
    DemandPhase, GatewayDemand, MoEDemand, MoEDemandSpec, RequestLoad, RequestMix, WakeTimeline,
};
use remoe_gateway_core::{ColdStart, ModelLoad};
use serde_json::json;
use std::time::Duration;
use tokio::time::timeout;

/// Shortest time between two entries that are not urgent.
const SLOW_INTERVAL: Duration = Duration::from_secs(10);
/// Shortest time between two entries that report the first or last request while functions run.
const NORMAL_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest time between two entries while requests may wait for functions to start.
const WAKE_INTERVAL: Duration = Duration::from_millis(20);
/// Factor of growth or decline of the load that is reported sooner, if functions follow load.
const LOAD_CHANGE_FACTOR: usize = 2;
/// Timeout of a call to the API server.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Last written entry: the parts that decide when the next is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LastEntry {
    pub(crate) load: ModelLoad,
    /// Time from the last request before the entry until now.
    pub(crate) quiet: Duration,
    /// Time since the entry was written.
    pub(crate) ago: Duration,
}

/// Returns the time until an entry with `load` is due; the last request was `quiet` ago. Returns `None` if no entry
/// is needed.
pub(crate) fn due(
    demand: &MoEDemandSpec,
    last: Option<LastEntry>,
    load: ModelLoad,
    quiet: Duration,
) -> Option<Duration> {
    if !demand.sleeps && !demand.follows_load {
        return None;
    }
    let before = last.map_or_else(ModelLoad::default, |entry| entry.load);
    let pause = |pause: Duration| Some(last.map_or(Duration::ZERO, |entry| pause.saturating_sub(entry.ago)));
    let must_acknowledge = demand.phase == DemandPhase::Draining && load.turn == demand.turn;
    if must_acknowledge && before.turn != load.turn {
        return Some(Duration::ZERO);
    }
    if before.is_busy() != load.is_busy() {
        return pause(if demand.phase == DemandPhase::Active { NORMAL_INTERVAL } else { WAKE_INTERVAL });
    }
    let counts = |load: ModelLoad| (load.waiting, load.in_flight);
    // Set if requests arrived and ended between two entries.
    let has_unreported_requests = last.is_some_and(|entry| quiet + WAKE_INTERVAL < entry.quiet);
    let sum = |load: ModelLoad| load.waiting + load.in_flight;
    let (more, less) = (sum(load).max(sum(before)), sum(load).min(sum(before)));
    if demand.follows_load && more >= less.saturating_mul(LOAD_CHANGE_FACTOR).max(LOAD_CHANGE_FACTOR) {
        return pause(NORMAL_INTERVAL);
    }
    match load.is_busy() {
        true if counts(before) != counts(load) => pause(SLOW_INTERVAL),
        false if has_unreported_requests => pause(SLOW_INTERVAL),
        _ => None,
    }
}

/// Writer of this gateway's entry about one deployment.
pub(crate) struct DemandWriter {
    api: Api<MoEDemand>,
    name: String,
    manager: String,
    uid: String,
    pod: String,
    sequence: u64,
}

impl DemandWriter {
    /// Makes the writer for the deployment `name` of `namespace`. The gateway's pod is `pod` with `uid`.
    pub(crate) fn new(client: Client, namespace: &str, name: &str, pod: &str, uid: &str) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            name: name.to_owned(),
            manager: format!("remoe-gateway-{uid}"),
            uid: uid.to_owned(),
            pod: pod.to_owned(),
            sequence: 0,
        }
    }

    /// Writes the entry: the `load`, the time `quiet` since the last request, the nano-dollars `saved` so far, the
    /// expert usage of requests, their total time, and the latest wake. Returns whether it was written.
    pub(crate) async fn write(
        &mut self,
        load: ModelLoad,
        quiet: Duration,
        saved: i64,
        (mix, request_time, wake): (Option<RequestMix>, Option<RequestLoad>, Option<WakeTimeline>),
    ) -> bool {
        let now = jiff::Timestamp::now();
        self.sequence += 1;
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let entry = GatewayDemand {
            uid: self.uid.clone(),
            pod: self.pod.clone(),
            waiting: number(load.waiting),
            in_flight: number(load.in_flight),
            acknowledged: load.turn,
            saved,
            last_active: MicroTime(now.checked_sub(quiet).unwrap_or(jiff::Timestamp::UNIX_EPOCH)),
            sequence: self.sequence,
            mix,
            load: request_time,
            wake,
        };
        self.apply(&[entry]).await
    }

    /// Removes the entry.
    pub(crate) async fn erase(&mut self) {
        if self.sequence > 0 {
            self.apply(&[]).await;
        }
    }

    async fn apply(&self, gateways: &[GatewayDemand]) -> bool {
        let object = json!({
            "apiVersion": MoEDemand::api_version(&()),
            "kind": MoEDemand::kind(&()),
            "metadata": {"name": self.name},
            "status": {"gateways": gateways},
        });
        let params = PatchParams::apply(&self.manager).force();
        let patch = Patch::Apply(&object);
        let name = &self.name;
        match timeout(CALL_TIMEOUT, self.api.patch_status(name, &params, &patch)).await {
            Ok(Ok(_)) => return true,
            Ok(Err(error)) => tracing::warn!(name, %error, "cannot write the MoEDemand status"),
            Err(_late) => tracing::warn!(name, "cannot write the MoEDemand status: timeout"),
        }
        false
    }
}

/// Returns the timeline of the wake number `wake`.
pub(crate) fn timeline(wake: u64, cold_start: &ColdStart) -> WakeTimeline {
    let microseconds = |part: Duration| u64::try_from(part.as_micros()).unwrap_or(u64::MAX);
    let [decide_us, schedule_us, start_us, load_us, ready_us, first_us] = cold_start.parts.map(microseconds);
    WakeTimeline { wake, decide_us, schedule_us, start_us, load_us, ready_us, first_us }
}

/// Returns the report that requests have waited or been in flight for `total_request_time` by now.
pub(crate) fn request_load(total_request_time: Duration) -> RequestLoad {
    RequestLoad {
        at: MicroTime(jiff::Timestamp::now()),
        occupied_ms: u64::try_from(total_request_time.as_millis()).unwrap_or(u64::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand(phase: DemandPhase) -> MoEDemandSpec {
        MoEDemandSpec {
            served_name: String::new(),
            context_length: 0,
            phase,
            turn: 4,
            since: MicroTime(jiff::Timestamp::UNIX_EPOCH),
            wakes: 0,
            wake_told: 0,
            planning: None,
            sleeps: true,
            follows_load: false,
            mains: Vec::new(),
            functions: Vec::new(),
            groups: Vec::new(),
            prediction: None,
        }
    }

    fn load(waiting: usize, in_flight: usize) -> ModelLoad {
        ModelLoad { waiting, in_flight, turn: 4 }
    }

    fn last(load: ModelLoad, ago: u64) -> Option<LastEntry> {
        Some(LastEntry { load, quiet: Duration::from_secs(ago), ago: Duration::from_secs(ago) })
    }

    const AT_ONCE: Option<Duration> = Some(Duration::ZERO);

    #[test]
    fn first_and_last_request_are_reported_at_once_unless_idle() {
        let asleep = demand(DemandPhase::Asleep);
        let hour = Duration::from_secs(3600);
        assert_eq!(due(&asleep, None, load(1, 0), Duration::ZERO), AT_ONCE);
        assert_eq!(due(&asleep, last(load(1, 0), 1), load(0, 0), Duration::ZERO), AT_ONCE);
        assert_eq!(due(&asleep, last(load(0, 0), 60), load(0, 0), hour), None);
        assert_eq!(due(&asleep, None, load(0, 0), hour), None);
        let active = demand(DemandPhase::Active);
        let wait = |seconds| Some(Duration::from_secs(seconds));
        // Short successive requests do not cause an entry each.
        assert_eq!(due(&active, last(load(0, 1), 0), load(0, 0), Duration::ZERO), wait(1));
        assert_eq!(due(&active, last(load(0, 1), 4), load(0, 2), Duration::ZERO), wait(6));
        assert_eq!(due(&active, last(load(0, 0), 4), load(0, 0), Duration::ZERO), wait(6));
        assert_eq!(due(&active, last(load(0, 2), 40), load(0, 2), Duration::ZERO), None);
        assert_eq!(due(&MoEDemandSpec { sleeps: false, ..asleep }, None, load(1, 0), hour), None);
    }

    #[test]
    fn growth_is_reported_sooner_if_functions_follow_load() {
        let active = MoEDemandSpec { sleeps: false, follows_load: true, ..demand(DemandPhase::Active) };
        let wait = |seconds| Some(Duration::from_secs(seconds));
        let now = Duration::ZERO;
        assert_eq!(due(&active, last(load(0, 8), 4), load(0, 8), now), None);
        assert_eq!(due(&active, last(load(0, 8), 4), load(0, 15), now), wait(6));
        assert_eq!(due(&active, last(load(0, 8), 0), load(8, 8), now), wait(1));
        assert_eq!(due(&active, last(load(0, 8), 1), load(8, 8), now), AT_ONCE);
        assert_eq!(due(&active, last(load(0, 1), 0), load(0, 2), now), wait(1));
        assert_eq!(due(&active, last(load(0, 0), 60), load(0, 0), Duration::from_secs(60)), None);
    }

    #[test]
    fn holding_gateway_acknowledges_draining_at_once() {
        let draining = demand(DemandPhase::Draining);
        let hour = Duration::from_secs(3600);
        let old = ModelLoad { turn: 3, ..load(0, 0) };
        assert_eq!(due(&draining, last(old, 0), load(0, 0), hour), AT_ONCE);
        assert_eq!(due(&draining, None, load(0, 0), hour), AT_ONCE);
        // The draining phase is not in force yet.
        assert_eq!(due(&draining, last(old, 9), old, hour), None);
        assert_eq!(due(&draining, last(load(0, 0), 9), load(0, 0), hour), None);
    }
}
