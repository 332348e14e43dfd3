//! Status across reconciles.

use crate::exposure::GatewayService;
use crate::manifests::{LOAD_SECONDS, Revision};
use crate::names::PodName;
use crate::plan::PlanState;
use crate::pods::PodView;
use crate::scale::DemandDecision;
use crate::status::{StatusInputs, status};
use crate::testing::example::{built, deployment, plan};
use jiff::{SignedDuration, Timestamp};
use remoe_api::{Condition, ConditionType, MoEDeployment, MoEDeploymentStatus, MoEPlanSpec, PlanVerdict};
use serde_json::json;

struct Scene {
    owner: MoEDeployment,
    plan: MoEPlanSpec,
    revision: Revision,
    pods: Vec<PodView>,
    serving: Option<String>,
    gateway: Option<GatewayService>,
    now: Timestamp,
}

impl Scene {
    fn new(replicas: u32) -> Self {
        let owner = deployment(json!({ "replicas": replicas }));
        let plan = plan(&owner);
        let revision = built(&owner, &plan);
        let now = "2026-01-01T00:00:00Z".parse().unwrap();
        let mut scene = Self { owner, plan, revision, pods: Vec::new(), serving: None, gateway: None, now };
        for function in scene.revision.functions() {
            for replica in 0..function.replicas {
                scene.pods.push(PodView {
                    name: PodName { place: function.place("demo", replica), incarnation: 0 },
                    uid: format!("{}-{replica}", function.name),
                    owned: true,
                    is_main: function.hosted.is_none(),
                    knows_gateways: false,
                    function: function.name.clone(),
                    identity: function.identity.clone(),
                    replica,
                    created: now,
                    ends_by: None,
                    ip: None,
                    ready: true,
                    starting: false,
                    restarts: 0,
                    faulty_at: None,
                    fault: None,
                    issue: None,
                    in_force: None,
                    placement: String::new(),
                });
            }
        }
        scene
    }

    fn reconcile(&mut self, settled: bool) -> MoEDeploymentStatus {
        let planning =
            PlanState::Planned { hash: self.revision.plan.clone(), plan: Box::new(self.plan.clone()) };
        let found = status(&StatusInputs {
            deployment: &self.owner,
            model: None,
            planning,
            profiling: None,
            target: Some((&self.revision, &self.plan)),
            running: Some(&self.revision.plan),
            serving: self.serving.clone(),
            pods: &self.pods,
            issues: Vec::new(),
            demanded: &DemandDecision::always(),
            cost_per_hour_nanodollars: 21_000_000,
            saved_nanodollars: Some(-1_234_567_890),
            settled,
            awaits_turn: false,
            repriced: false,
            gateway: self.gateway.as_ref(),
            now: self.now,
        });
        self.owner.status = Some(found.clone());
        found
    }

    fn pass(&mut self, seconds: i64) {
        self.now = self.now.checked_add(SignedDuration::from_secs(seconds)).unwrap();
    }
}

fn said(status: &MoEDeploymentStatus, of: ConditionType) -> (String, String, String) {
    let Condition { status, reason, message, .. } = status.condition(of).unwrap().clone();
    (status, reason, message)
}

#[test]
fn url_and_exposure_follow_the_gateways() {
    let mut scene = Scene::new(1);
    let mut reconcile = |gateway: Option<(bool, bool, bool)>| {
        scene.gateway = gateway.map(|(tls, open, any_short_name)| GatewayService {
            name: "gateway".to_owned(),
            tls,
            open,
            any_short_name,
        });
        let status = scene.reconcile(true);
        let (exposed, reason, message) = said(&status, ConditionType::Exposed);
        (status.url.unwrap(), exposed, reason, message)
    };
    let (url, exposed, reason, _) = reconcile(Some((true, false, false)));
    assert_eq!(url, "https://demo.test.svc:8000");
    assert_eq!((exposed.as_str(), reason.as_str()), ("False", "KeysRequired"));
    let (url, exposed, reason, message) = reconcile(Some((false, true, true)));
    assert_eq!(url, "http://demo.test.svc:8000");
    assert_eq!((exposed.as_str(), reason.as_str()), ("True", "GatewayOpen"));
    assert!(
        message.contains("gateway.keysSecretName") && message.contains("gateway.scopedNames=true"),
        "{message}"
    );
    assert_eq!(reconcile(Some((false, false, true))).2, "AnyShortName");
    assert_eq!(reconcile(None).2, "WithoutGateways");
}

#[test]
fn missing_main_functions_are_counted() {
    let mut scene = Scene::new(3);
    assert_eq!(said(&scene.reconcile(true), ConditionType::Ready).2, "The endpoint serves requests.");
    scene.pods[1].ready = false;
    let status = scene.reconcile(false);
    let (ready, _, message) = said(&status, ConditionType::Ready);
    assert_eq!(
        (ready.as_str(), message.as_str()),
        ("True", "The endpoint serves requests: 2 of 3 main functions are ready.")
    );
    let (progressing, _, message) = said(&status, ConditionType::Progressing);
    assert_eq!(progressing, "True");
    assert!(message.starts_with("Rolling out plan "), "{message}");
    assert!(message.ends_with(": 5 of 6 functions are ready."), "{message}");
}

#[test]
fn what_makes_no_progress_is_said_to_be_stuck_until_it_moves() {
    let mut scene = Scene::new(2);
    scene.pods.iter_mut().for_each(|pod| pod.ready = false);
    let first = scene.reconcile(false);
    scene.pass(300);
    // One more ready function is progress.
    scene.pods[2].ready = true;
    let moved = scene.reconcile(false);
    assert!(moved.last_progress_time > first.last_progress_time);
    // A function may load for as long as its startup probe allows.
    let load = i64::from(LOAD_SECONDS);
    let probe = &scene.revision.main.pod(&scene.owner, 0, 0).spec.unwrap().containers[0].startup_probe;
    let probe = probe.clone().unwrap();
    assert_eq!(probe.failure_threshold.unwrap() * probe.period_seconds.unwrap(), LOAD_SECONDS);
    scene.pass(load + 599);
    assert_eq!(said(&scene.reconcile(false), ConditionType::Progressing).0, "True");
    scene.pass(1);
    let stuck = scene.reconcile(false);
    let (status, reason, message) = said(&stuck, ConditionType::Progressing);
    assert_eq!((status.as_str(), reason.as_str()), ("False", "ProgressDeadlineExceeded"));
    assert!(message.starts_with("no progress for 40 minutes (rolling out plan "), "{message}");
    assert!(message.contains("1 of 5 functions are ready"), "{message}");
    assert_eq!(said(&stuck, ConditionType::Degraded).1, "ProgressDeadlineExceeded");
    assert_eq!(said(&stuck, ConditionType::Ready).1, "ProgressDeadlineExceeded");
    // The same state yields the same status at any time.
    scene.pass(1000);
    assert_eq!(scene.reconcile(false), stuck);
    scene.pods[0].ready = true;
    assert_eq!(said(&scene.reconcile(false), ConditionType::Progressing).0, "True");
    // A settled deployment never misses the deadline.
    scene.pods.iter_mut().for_each(|pod| pod.ready = true);
    scene.reconcile(true);
    scene.pass(100_000);
    let settled = scene.reconcile(true);
    assert_eq!(said(&settled, ConditionType::Progressing).1, "Settled");
    assert_eq!(said(&settled, ConditionType::Degraded).0, "False");
}

#[test]
fn stalled_plan_beside_serving_one_is_reported_failed() {
    let mut scene = Scene::new(1);
    scene.pods.iter_mut().for_each(|pod| pod.ready = false);
    scene.reconcile(false);
    scene.pass(100_000);
    assert_eq!(scene.reconcile(false).failed_plan, None, "nothing else serves");
    scene.serving = Some("0123456789".to_owned());
    let failed = Some(scene.revision.plan.clone());
    assert_eq!(scene.reconcile(false).failed_plan, failed);
    // This holds whatever runs.
    assert_eq!(scene.reconcile(true).failed_plan, failed);
    scene.owner.metadata.generation = Some(2);
    assert_eq!(scene.reconcile(false).failed_plan, None);
}

#[test]
fn a_main_function_that_finishes_its_answers_stops_no_progress() {
    let mut scene = Scene::new(1);
    let mut old = scene.pods[0].clone();
    old.identity = "another".to_owned();
    old.ready = false;
    old.ends_by = Some(scene.now.checked_add(SignedDuration::from_secs(4000)).unwrap());
    scene.pods.push(old);
    scene.reconcile(false);
    scene.pass(3999);
    assert_eq!(said(&scene.reconcile(false), ConditionType::Progressing).0, "True");
    scene.pass(1);
    assert_eq!(said(&scene.reconcile(false), ConditionType::Progressing).1, "ProgressDeadlineExceeded");
}

#[test]
fn sizes_that_no_plan_has_are_counted_all_the_same() {
    let mut scene = Scene::new(1);
    scene.revision.remote.iter_mut().for_each(|function| function.replicas = u32::MAX);
    let functions = scene.reconcile(false).functions.unwrap();
    assert_eq!(functions, format!("4/{}", 3 * u64::from(u32::MAX) + 1));
}

#[test]
fn a_plan_that_costs_more_saves_nothing() {
    use remoe_api::ProfileSource;
    let mut scene = Scene::new(1);
    let status = scene.reconcile(true);
    assert_eq!((status.cost_per_hour.as_deref(), status.saved.as_deref()), (Some("$0.0210"), Some("-$1.23")));
    assert_eq!(scene.reconcile(true).saving.as_deref(), Some("n/a"));
    scene.plan.profile = ProfileSource::Supplied;
    scene.plan.numbers.savings.mix = Some(0.254);
    assert_eq!(scene.reconcile(true).saving.as_deref(), Some("25 %"));
    scene.plan.numbers.savings.mix = Some(-2.17);
    assert_eq!(scene.reconcile(true).saving.as_deref(), Some("n/a (costs more)"));
}

#[test]
fn remote_expert_verdict_describes_the_plan_to_run() {
    let mut scene = Scene::new(1);
    assert_eq!(scene.reconcile(true).verdict, None, "a prior does not know");
    let sentence =
        "Remote experts do not pay: experts on the main function's CPUs at $2.20 per million requests.";
    scene.plan.verdict =
        Some(PlanVerdict { pays: false, sentence: sentence.to_owned(), cheapest: None, rival: None });
    assert_eq!(scene.reconcile(true).verdict.as_deref(), Some(sentence));
}
