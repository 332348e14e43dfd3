//! Deployment in a cluster in memory whose plans follow expert usage.

use crate::names::{COMPONENT, Component, label};
use crate::testing::example::large;
use crate::testing::world::World;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use remoe_api::{DemandPhase, GatewayDemand, MoEPlan, ProfileSource, RequestMix};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Maximum reconciles.
pub const ENOUGH: usize = 120;

/// Main functions hold half of the experts, and remote functions cost while they work: a plan that knows the usage
/// saves.
pub fn spec() -> Value {
    json!({
        "main": {"memoryMB": {"max": 3000}},
        "scaling": {"min": 0, "idleWindow": "40s"},
        "pricing": {"billing": "Invocation"},
        "prediction": {"interval": "60s"},
    })
}

pub struct Scene {
    pub world: World,
    sequence: u64,
    /// Time of the last request.
    active: Timestamp,
}

impl Scene {
    /// Returns a settled, serving deployment with a measured profile.
    pub fn new(spec: Value) -> Self {
        let mut world = World::with_gateways(spec, &["a", "b"]);
        world.facts = large();
        let mut scene = Self { world, sequence: 0, active: Timestamp::UNIX_EPOCH };
        scene.world.settle();
        assert_eq!(scene.phase(), DemandPhase::Active);
        assert_eq!(scene.newest().spec.profile, ProfileSource::Measured);
        scene
    }

    pub(crate) fn phase(&self) -> DemandPhase {
        self.world.demand().spec.phase
    }

    /// Reports the demand of a gateway.
    pub(crate) fn say(&mut self, uid: &str, waiting: u32, in_flight: u32, mix: Option<RequestMix>) {
        self.sequence += 1;
        if waiting + in_flight > 0 {
            self.active = self.world.observed.now;
        }
        let entry = GatewayDemand {
            uid: uid.to_owned(),
            pod: uid.to_owned(),
            waiting,
            in_flight,
            acknowledged: self.world.demand().spec.turn,
            saved: 0,
            last_active: MicroTime(self.active),
            sequence: self.sequence,
            mix,
            load: None,
            wake: None,
        };
        self.world.say(entry);
    }

    /// Reconciles, and lets a second pass.
    pub fn step(&mut self) -> usize {
        let (_, diff) = self.world.reconcile();
        let written = self.world.write(&diff, usize::MAX);
        self.world.run();
        written
    }

    pub(crate) fn until(&mut self, phase: DemandPhase) {
        for _ in 0..ENOUGH {
            if self.phase() == phase {
                return;
            }
            if self.phase() == DemandPhase::Draining {
                // No gateway has a request in flight.
                let said = |scene: &Self, uid: &str| {
                    let entries = scene.world.demand().gateways();
                    entries.iter().find(|entry| entry.uid == uid).and_then(|entry| entry.mix.clone())
                };
                for uid in ["a", "b"] {
                    let mix = said(self, uid);
                    self.say(uid, 0, 0, mix);
                }
            }
            self.step();
        }
        panic!("still {:?}", self.phase());
    }

    /// Lets `seconds` pass without a reconcile.
    pub fn pass(&mut self, seconds: i64) {
        self.world.observed.now =
            self.world.observed.now.checked_add(SignedDuration::from_secs(seconds)).unwrap();
    }

    pub(crate) fn newest(&self) -> &MoEPlan {
        self.world.observed.plans.last().unwrap()
    }

    pub(crate) fn pods(&self, component: Component) -> BTreeSet<String> {
        let pods = self.world.observed.pods.iter();
        pods.filter(|pod| label(&pod.metadata, COMPONENT) == component.name())
            .map(ResourceExt::name_any)
            .collect()
    }
}
