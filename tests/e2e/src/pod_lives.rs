//! Lifetimes of the pods of functions and their cost, as the API server reports them.

use crate::pods;
use crate::scene::Scene;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::ListParams;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Prices, in dollars per hour.
const CORE: f64 = 0.03;
const GIGABYTE: f64 = 0.004;
/// Interval of observations, in seconds, by which a pod's lifetime may be overestimated.
pub const LOOK: Duration = Duration::from_millis(100);

/// Returns `spec.pricing` of an observed deployment.
#[must_use]
pub fn pricing() -> Value {
    json!({"cpuCoreHour": CORE.to_string(), "memoryGBHour": GIGABYTE.to_string()})
}

/// Observed lifetime of a pod, in seconds since 1970, and the hourly price of its resources.
#[derive(Debug, Clone, Copy)]
struct PodLife {
    started: f64,
    ended: Option<f64>,
    per_hour: f64,
}

/// All observed pods of functions in a namespace. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct PodLives(Arc<Mutex<BTreeMap<String, PodLife>>>);

impl PodLives {
    /// Records the present pods and returns them.
    pub async fn look(&self, scene: &Scene) -> Vec<Pod> {
        let listed = scene.api::<Pod>().list(&ListParams::default().labels(pods::FUNCTIONS)).await;
        let there = listed.expect("pods can be listed").items;
        let seen = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is after 1970").as_secs_f64();
        let mut lives = self.0.lock().expect("no thread panics while it is held");
        for pod in &there {
            let started = pod.status.as_ref().and_then(|status| status.start_time.clone());
            let Some(started) = started else { continue };
            let started = started.0.as_second() as f64;
            let life = PodLife { started, ended: None, per_hour: per_hour(pod) };
            lives.entry(pod.uid().expect("a pod has a uid")).or_insert(life);
        }
        let gone = |uid: &String| there.iter().all(|pod| pod.uid().as_ref() != Some(uid));
        for (_, life) in lives.iter_mut().filter(|(uid, _)| gone(uid)) {
            life.ended.get_or_insert(seen);
        }
        drop(lives);
        there
    }

    /// Returns the cost of all pods over their lifetimes, in dollars, and the cost of one second of the most
    /// expensive one.
    ///
    /// # Panics
    /// A pod still existed at the last observation.
    #[must_use]
    pub fn dollars(&self) -> (f64, f64) {
        let lives = self.0.lock().expect("no thread panics while it is held");
        let lived = |life: &PodLife| life.ended.expect("all pods are gone") - life.started;
        let all = lives.values().map(|life| lived(life) * life.per_hour / 3600.0).sum();
        (all, lives.values().map(|life| life.per_hour / 3600.0).fold(0.0, f64::max))
    }
}

/// Returns the hourly price of a pod's requests, in dollars, for the resources that the operator sets.
fn per_hour(pod: &Pod) -> f64 {
    let containers = &pod.spec.as_ref().expect("a pod has a spec").containers;
    let resources = containers[0].resources.as_ref().expect("a function has resources");
    let requests = resources.requests.as_ref().expect("a function asks for resources");
    let amount = |name: &str| {
        let text = &requests[name].0;
        let units = [("m", 1e-3), ("M", 1e6), ("G", 1e9), ("", 1.0)];
        let parts = units.iter().find_map(|(unit, by)| Some((text.strip_suffix(unit)?, by)));
        let (number, unit) = parts.expect("an amount");
        number.parse::<f64>().expect("a number of units") * unit
    };
    amount("cpu") * CORE + amount("memory") / 1e9 * GIGABYTE
}
