//! Reports of this gateway about a deployment: when an entry is due, and writing it.

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

/// Between two entries where what they say decides nothing soon.
const RARELY: Duration = Duration::from_secs(10);
/// Between two that begin or end what there is to do, while functions run anyway.
const SOMETIMES: Duration = Duration::from_secs(1);
/// Between two while requests may wait for functions.
const SOON: Duration = Duration::from_millis(20);
/// Requests that grow or fall by this factor are said sooner where functions follow load.
const SURGE: usize = 2;
/// One call takes at most this long.
const CALL: Duration = Duration::from_secs(5);

/// Last entry that was written, as far as it decides about the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LastEntry {
    pub(crate) load: ModelLoad,
    /// When the last request was by then, before now.
    pub(crate) quiet: Duration,
    /// How long ago it was written.
    pub(crate) ago: Duration,
}

/// In what time an entry is due that says `load`, where the last request was `quiet` ago; none: nothing is to be said.
pub(crate) fn due(
    told: &MoEDemandSpec,
    said: Option<LastEntry>,
    load: ModelLoad,
    quiet: Duration,
) -> Option<Duration> {
    if !told.sleeps && !told.follows_load {
        return None;
    }
    let before = said.map_or_else(ModelLoad::default, |said| said.load);
    let pause = |pause: Duration| Some(said.map_or(Duration::ZERO, |said| pause.saturating_sub(said.ago)));
    let is_asked = told.phase == DemandPhase::Draining && load.turn == told.turn;
    if is_asked && before.turn != load.turn {
        return Some(Duration::ZERO);
    }
    if before.is_busy() != load.is_busy() {
        return pause(if told.phase == DemandPhase::Active { SOMETIMES } else { SOON });
    }
    let counts = |load: ModelLoad| (load.waiting, load.in_flight);
    // Requests that came and went between two entries.
    let unsaid = said.is_some_and(|said| quiet + SOON < said.quiet);
    let sum = |load: ModelLoad| load.waiting + load.in_flight;
    let (more, less) = (sum(load).max(sum(before)), sum(load).min(sum(before)));
    if told.follows_load && more >= less.saturating_mul(SURGE).max(SURGE) {
        return pause(SOMETIMES);
    }
    match load.is_busy() {
        true if counts(before) != counts(load) => pause(RARELY),
        false if unsaid => pause(RARELY),
        _ => None,
    }
}

/// Writes the entries of one gateway about one deployment.
pub(crate) struct DemandWriter {
    api: Api<MoEDemand>,
    name: String,
    manager: String,
    uid: String,
    pod: String,
    sequence: u64,
}

impl DemandWriter {
    /// About the deployment `name` of `namespace`, by the gateway `pod` with `uid`.
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

    /// Writes that there is `load`, that the last request was `quiet` ago, how many nano-dollars were `saved` so far,
    /// which experts requests use, how long they took, and how the latest wake went. Returns if it was written.
    pub(crate) async fn write(
        &mut self,
        load: ModelLoad,
        quiet: Duration,
        saved: i64,
        (mix, took, wake): (Option<RequestMix>, Option<RequestLoad>, Option<WakeTimeline>),
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
            load: took,
            wake,
        };
        self.apply(&[entry]).await
    }

    /// Takes the entry back.
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
        match timeout(CALL, self.api.patch_status(name, &params, &patch)).await {
            Ok(Ok(_)) => return true,
            Ok(Err(error)) => tracing::warn!(name, %error, "cannot write the MoEDemand status"),
            Err(_late) => tracing::warn!(name, "cannot write the MoEDemand status: timeout"),
        }
        false
    }
}

/// How the wake of number `wake` went.
pub(crate) fn timeline(wake: u64, cold_start: &ColdStart) -> WakeTimeline {
    let microseconds = |part: Duration| u64::try_from(part.as_micros()).unwrap_or(u64::MAX);
    let [decide_us, schedule_us, start_us, load_us, ready_us, first_us] = cold_start.parts.map(microseconds);
    WakeTimeline { wake, decide_us, schedule_us, start_us, load_us, ready_us, first_us }
}

/// That requests have been `occupied` for so long by now.
pub(crate) fn request_load(occupied: Duration) -> RequestLoad {
    RequestLoad {
        at: MicroTime(jiff::Timestamp::now()),
        occupied_ms: u64::try_from(occupied.as_millis()).unwrap_or(u64::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(phase: DemandPhase) -> MoEDemandSpec {
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

    fn said(load: ModelLoad, ago: u64) -> Option<LastEntry> {
        Some(LastEntry { load, quiet: Duration::from_secs(ago), ago: Duration::from_secs(ago) })
    }

    const AT_ONCE: Option<Duration> = Some(Duration::ZERO);

    #[test]
    fn what_begins_and_ends_is_said_at_once_and_nothing_while_idle() {
        let asleep = told(DemandPhase::Asleep);
        let hour = Duration::from_secs(3600);
        assert_eq!(due(&asleep, None, load(1, 0), Duration::ZERO), AT_ONCE);
        assert_eq!(due(&asleep, said(load(1, 0), 1), load(0, 0), Duration::ZERO), AT_ONCE);
        assert_eq!(due(&asleep, said(load(0, 0), 60), load(0, 0), hour), None);
        assert_eq!(due(&asleep, None, load(0, 0), hour), None);
        let active = told(DemandPhase::Active);
        let wait = |seconds| Some(Duration::from_secs(seconds));
        // Short requests one after the other: no entry for each of them.
        assert_eq!(due(&active, said(load(0, 1), 0), load(0, 0), Duration::ZERO), wait(1));
        assert_eq!(due(&active, said(load(0, 1), 4), load(0, 2), Duration::ZERO), wait(6));
        assert_eq!(due(&active, said(load(0, 0), 4), load(0, 0), Duration::ZERO), wait(6));
        assert_eq!(due(&active, said(load(0, 2), 40), load(0, 2), Duration::ZERO), None);
        assert_eq!(due(&MoEDemandSpec { sleeps: false, ..asleep }, None, load(1, 0), hour), None);
    }

    #[test]
    fn what_grows_is_said_sooner_where_functions_follow_load() {
        let active = MoEDemandSpec { sleeps: false, follows_load: true, ..told(DemandPhase::Active) };
        let wait = |seconds| Some(Duration::from_secs(seconds));
        let now = Duration::ZERO;
        assert_eq!(due(&active, said(load(0, 8), 4), load(0, 8), now), None);
        assert_eq!(due(&active, said(load(0, 8), 4), load(0, 15), now), wait(6));
        assert_eq!(due(&active, said(load(0, 8), 0), load(8, 8), now), wait(1));
        assert_eq!(due(&active, said(load(0, 8), 1), load(8, 8), now), AT_ONCE);
        assert_eq!(due(&active, said(load(0, 1), 0), load(0, 2), now), wait(1));
        assert_eq!(due(&active, said(load(0, 0), 60), load(0, 0), Duration::from_secs(60)), None);
    }

    #[test]
    fn holding_gateway_acknowledges_draining_at_once() {
        let draining = told(DemandPhase::Draining);
        let hour = Duration::from_secs(3600);
        let old = ModelLoad { turn: 3, ..load(0, 0) };
        assert_eq!(due(&draining, said(old, 0), load(0, 0), hour), AT_ONCE);
        assert_eq!(due(&draining, None, load(0, 0), hour), AT_ONCE);
        // What was told is not in force yet.
        assert_eq!(due(&draining, said(old, 9), old, hour), None);
        assert_eq!(due(&draining, said(load(0, 0), 9), load(0, 0), hour), None);
    }
}
