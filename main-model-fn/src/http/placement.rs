//! `/v1/placement`: where every expert lives, how busy it is, what the plan expected and what was measured.

use super::state::HttpState;
use crate::dispatch::Activity;
use crate::engine::request::Figures;
use crate::routing_check::EndpointSets;
use axum::Json;
use axum::extract::State;
use axum::http::Uri;
use remoe_http::{ApiError, query};
use remoe_model::Inspection;
use remoe_plan::{Comparison, Measured, Outcome, Plan, PlanAccount, ServingStrategy, baselines};
use remoe_predictor::Activations;
use remoe_proto::format_listing;
use remoe_proto::v1::LayerExperts;
use serde::{Serialize, Serializer};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::watch;

/// Placement in force, and facts known of it.
#[derive(Clone)]
pub(crate) struct PlacementView {
    pub(crate) in_force: watch::Receiver<Arc<ActiveGeneration>>,
    pub(crate) activity: Arc<Activity>,
    pub(crate) card: Option<Arc<ModelCard>>,
    pub(super) means: Arc<Mutex<RequestMeans>>,
    rivals: Arc<Mutex<Option<AccountRivals>>>,
}

impl Default for PlacementView {
    /// Before the first generation, of a model that nothing is known of.
    fn default() -> Self {
        let (_, in_force) = watch::channel(Arc::default());
        Self { in_force, activity: Arc::default(), card: None, means: Arc::default(), rivals: Arc::default() }
    }
}

/// A generation in force.
#[derive(Debug, Default)]
pub(crate) struct ActiveGeneration {
    /// 0 before the first.
    pub(crate) generation: u64,
    /// Experts beside the engine.
    pub(crate) local: Vec<LayerExperts>,
    pub(crate) endpoints: EndpointSets,
}

/// Facts of the model, and of what computes it.
#[derive(Debug, Serialize)]
pub(crate) struct ModelCard {
    #[serde(flatten)]
    pub(crate) facts: Inspection,
    pub(crate) compute_dtype: String,
    pub(crate) device: String,
    pub(crate) operations: &'static str,
    pub(crate) numerics_class: String,
}

/// Means over requests.
#[derive(Debug, Default)]
pub(super) struct RequestMeans {
    /// Number of requests of generation `of`.
    requests: u64,
    of: u64,
    ttft_seconds: f64,
    /// Decode steps, and what they took.
    steps: u64,
    decode_seconds: f64,
    /// Number of requests that a plan says something about.
    compared: u64,
    expected: Sum,
    measured: Sum,
}

#[derive(Debug, Default, Clone, Copy)]
struct Sum {
    ttft: f64,
    tpot: f64,
    cost: f64,
}

impl Sum {
    fn add(&mut self, outcome: &Outcome) {
        self.ttft += outcome.ttft_seconds;
        self.tpot += outcome.tpot_seconds;
        self.cost += outcome.cost;
    }

    fn mean(self, count: u64) -> Outcome {
        let count = count.max(1) as f64;
        Outcome { ttft_seconds: self.ttft / count, tpot_seconds: self.tpot / count, cost: self.cost / count }
    }
}

/// Mean figures of requests.
#[derive(Debug, Serialize)]
struct MeasuredMeans {
    requests: u64,
    ttft_s: f64,
    /// Null before there was a second token.
    tpot_s: Option<f64>,
    /// Dollars per request; null if the placement was not planned.
    cost: Option<f64>,
    /// Figures that the plan expected of the same requests.
    expected: Option<Outcome>,
}

/// Another way of serving the model.
#[derive(Debug, Clone, Serialize)]
struct RivalLine {
    name: &'static str,
    /// Dollars of a typical request.
    cost: f64,
    ttft_s: f64,
    tpot_s: f64,
    /// Limits that it does not keep.
    violations: Vec<String>,
}

/// Rivals of an account that was asked about.
struct AccountRivals {
    account: Arc<PlanAccount>,
    rivals: Arc<[RivalLine]>,
}

#[derive(Serialize)]
pub(super) struct PlacementPage {
    model: String,
    generation: u64,
    /// The planner's plan, else the placement as plan files have it; null before the first generation.
    plan: Option<PlanForm>,
    /// Set if the planner made it.
    planned: bool,
    main: MainLine,
    groups: Vec<GroupLine>,
    experts: Vec<LayerUse>,
    expected: Option<Outcome>,
    measured: Option<MeasuredMeans>,
    rivals: Vec<RivalLine>,
    #[serde(serialize_with = "shared")]
    card: Option<Arc<ModelCard>>,
}

fn shared<S: Serializer>(card: &Option<Arc<ModelCard>>, serializer: S) -> Result<S::Ok, S::Error> {
    card.as_deref().serialize(serializer)
}

#[derive(Serialize)]
#[serde(untagged)]
enum PlanForm {
    Planned(Box<Plan>),
    Placed { groups: Vec<PlacedGroup> },
}

#[derive(Serialize)]
struct PlacedGroup {
    experts: String,
    replicas: usize,
}

/// The experts beside the engine.
#[derive(Serialize)]
struct MainLine {
    experts: String,
    busy: f64,
}

/// Remote functions that host the same experts.
#[derive(Debug, Serialize)]
struct GroupLine {
    /// `LAYER:FIRST-LAST,..` by the model's layer ids.
    experts: String,
    replicas: usize,
    /// Address of the first of them.
    address: String,
    /// The share of the last seconds in which they computed, from 0 to 1, in the mean.
    busy: f64,
    functions: Vec<FunctionLine>,
}

#[derive(Debug, Serialize)]
struct FunctionLine {
    address: String,
    busy: f64,
}

/// (token, expert) pairs since the function started, by expert.
#[derive(Serialize)]
struct LayerUse {
    layer: u32,
    pairs: Vec<u64>,
}

impl PlacementView {
    pub(crate) fn new(
        in_force: watch::Receiver<Arc<ActiveGeneration>>,
        activity: Arc<Activity>,
        card: ModelCard,
    ) -> Self {
        Self { in_force, activity, card: Some(Arc::new(card)), ..Self::default() }
    }

    /// Where a request's experts are counted; none where nothing is known of the model.
    pub(super) fn activations(&self) -> Option<Box<Activations>> {
        let facts = &self.card.as_ref()?.facts;
        Some(Box::new(Activations::new(facts.moe_layers.len(), facts.experts)))
    }

    /// Records a request that is over. Compares its figures with the plan's expectation, if the placement was
    /// planned.
    pub(super) fn note(&self, figures: &Figures, account: Option<&PlanAccount>) -> Option<Comparison> {
        let generation = self.in_force.borrow().generation;
        let comparison = account.map(|account| account.compare(&measured(figures)));
        self.means.lock().unwrap_or_else(PoisonError::into_inner).note(
            generation,
            figures,
            comparison.as_ref(),
        );
        comparison
    }
}

impl RequestMeans {
    fn note(&mut self, generation: u64, figures: &Figures, comparison: Option<&Comparison>) {
        if self.of != generation {
            *self = Self { of: generation, ..Self::default() };
        }
        self.requests += 1;
        self.ttft_seconds += figures.ttft.as_secs_f64();
        self.steps += figures.completion_tokens.saturating_sub(1) as u64;
        self.decode_seconds += figures.decode.as_secs_f64();
        if let Some(Comparison { expected, measured }) = comparison {
            self.compared += 1;
            self.expected.add(expected);
            self.measured.add(measured);
        }
    }

    fn shown(&self, generation: u64) -> Option<MeasuredMeans> {
        let has_some = self.of == generation && self.requests > 0;
        let is_compared = self.compared > 0;
        has_some.then(|| MeasuredMeans {
            requests: self.requests,
            ttft_s: self.ttft_seconds / self.requests as f64,
            tpot_s: (self.steps > 0).then(|| self.decode_seconds / self.steps as f64),
            cost: is_compared.then(|| self.measured.mean(self.compared).cost),
            expected: is_compared.then(|| self.expected.mean(self.compared)),
        })
    }
}

/// The figures of a request, for the plan's account.
pub(super) fn measured(figures: &Figures) -> Measured {
    let mut experts = figures.prefill_experts;
    experts += figures.decode_experts;
    Measured {
        input_tokens: figures.prompt_tokens,
        output_tokens: figures.completion_tokens,
        ttft_seconds: figures.ttft.as_secs_f64(),
        prefill_seconds: figures.prefill.as_secs_f64(),
        decode_seconds: figures.decode.as_secs_f64(),
        remote_seconds: experts.remote.as_secs_f64(),
        remote_calls: experts.calls,
    }
}

/// Returns the placement in force. Wakes nothing and computes nothing for the model.
pub(super) async fn handle(
    State(state): State<Arc<HttpState>>,
    uri: Uri,
) -> Result<Json<PlacementPage>, ApiError> {
    state.check_model(query(&uri, "model").as_deref())?;
    let view = &state.placement;
    let in_force = view.in_force.borrow().clone();
    let account = state.account().filter(|_| in_force.generation > 0);
    let rivals = match &account {
        None => Vec::new(),
        Some(account) => rivals(view, account).await.to_vec(),
    };
    let groups = groups(&in_force, &view.activity);
    let placed = || PlanForm::Placed {
        groups: groups
            .iter()
            .map(|group| PlacedGroup { experts: group.experts.clone(), replicas: group.replicas })
            .collect(),
    };
    let plan = match &account {
        Some(account) => Some(PlanForm::Planned(Box::new(account.plan().clone()))),
        None => (in_force.generation > 0).then(placed),
    };
    Ok(Json(PlacementPage {
        model: state.options.model.clone(),
        generation: in_force.generation,
        plan,
        planned: account.is_some(),
        main: MainLine { experts: format_listing(&in_force.local), busy: view.activity.busy_here() },
        experts: uses(view),
        groups,
        expected: account.as_ref().map(|account| account.expect_typical()),
        measured: view.means.lock().unwrap_or_else(PoisonError::into_inner).shown(in_force.generation),
        rivals,
        card: view.card.clone(),
    }))
}

fn uses(view: &PlacementView) -> Vec<LayerUse> {
    let Some(card) = &view.card else { return Vec::new() };
    let layers = card.facts.moe_layers.iter().map(|&layer| {
        let mut pairs = view.activity.pairs(layer);
        pairs.resize(card.facts.experts, 0);
        LayerUse { layer: u32::try_from(layer).unwrap_or(u32::MAX), pairs }
    });
    layers.collect()
}

/// Endpoints that host the same, together; in the order of the placement.
fn groups(in_force: &ActiveGeneration, activity: &Activity) -> Vec<GroupLine> {
    let mut groups: Vec<GroupLine> = Vec::new();
    for (address, hosted) in in_force.endpoints.iter().filter(|(_, hosted)| !hosted.is_empty()) {
        let experts = format_listing(hosted);
        let function = FunctionLine { address: address.clone(), busy: activity.busy(address) };
        match groups.iter_mut().find(|group| group.experts == experts) {
            Some(group) => group.functions.push(function),
            None => groups.push(GroupLine {
                experts,
                replicas: 0,
                address: address.clone(),
                busy: 0.0,
                functions: vec![function],
            }),
        }
    }
    for group in &mut groups {
        group.replicas = group.functions.len();
        group.busy =
            group.functions.iter().map(|function| function.busy).sum::<f64>() / group.replicas as f64;
    }
    groups
}

/// Other ways of serving what `account` is about. They are worked out once, by a thread that may take its time.
async fn rivals(view: &PlacementView, account: &Arc<PlanAccount>) -> Arc<[RivalLine]> {
    let known = || view.rivals.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = known().as_ref().filter(|known| Arc::ptr_eq(&known.account, account)) {
        return known.rivals.clone();
    }
    let of = account.clone();
    let rivals: Arc<[RivalLine]> =
        tokio::task::spawn_blocking(move || rivals_of(&of)).await.unwrap_or_default().into();
    *known() = Some(AccountRivals { account: account.clone(), rivals: rivals.clone() });
    rivals
}

fn rivals_of(account: &PlanAccount) -> Vec<RivalLine> {
    // What runs has been planned from the same problem.
    let Ok(baselines) = baselines(account.problem()) else { return Vec::new() };
    let named = [
        (ServingStrategy::Cpu, baselines.cpu),
        (ServingStrategy::Mix, baselines.mix),
        (ServingStrategy::Gpu, baselines.gpu),
        (ServingStrategy::Fetch, baselines.fetch),
    ];
    let lines = named.into_iter().filter_map(|(way, baseline)| {
        let baseline = baseline?;
        Some(RivalLine {
            name: way.baseline_name(),
            cost: baseline.total_cost,
            ttft_s: baseline.ttft_seconds,
            tpot_s: baseline.tpot_seconds,
            violations: baseline.violations,
        })
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn endpoints_that_host_the_same_are_one_group() {
        let hosted = |experts: &[u32]| vec![LayerExperts { layer: 1, experts: experts.to_vec() }];
        let in_force = ActiveGeneration {
            generation: 1,
            local: Vec::new(),
            endpoints: vec![
                ("a:1".to_owned(), hosted(&[0, 1])),
                ("b:1".to_owned(), hosted(&[2])),
                ("c:1".to_owned(), hosted(&[0, 1])),
                ("d:1".to_owned(), Vec::new()),
            ],
        };
        let groups = groups(&in_force, &Activity::default());
        let shown: Vec<_> = groups
            .iter()
            .map(|group| (group.experts.as_str(), group.replicas, group.address.as_str()))
            .collect();
        assert_eq!(shown, [("1:0-1", 2, "a:1"), ("1:2", 1, "b:1")]);
    }

    #[test]
    fn means_are_of_the_generation_in_force() {
        let figures = |tokens: usize, ttft: u64, decode: u64| Figures {
            completion_tokens: tokens,
            ttft: Duration::from_millis(ttft),
            decode: Duration::from_millis(decode),
            ..Figures::default()
        };
        let mut means = RequestMeans::default();
        means.note(1, &figures(5, 9000, 9000), None);
        means.note(2, &figures(1, 100, 0), None);
        assert_eq!(means.shown(2).and_then(|shown| shown.tpot_s), None);
        means.note(2, &figures(11, 300, 500), None);
        let shown = means.shown(2).map(|shown| (shown.requests, shown.ttft_s, shown.tpot_s, shown.cost));
        assert_eq!(shown, Some((2, 0.2, Some(0.05), None)));
        assert!(means.shown(3).is_none());
    }
}
