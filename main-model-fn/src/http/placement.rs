//! `/v1/placement`: location and load of every expert, expectations of the plan, and measured figures.

use super::state::HttpState;
use crate::dispatch::Activity;
use crate::engine::request::Figures;
use crate::routing_check::EndpointSets;
use axum::Json;
use axum::extract::State;
use axum::http::Uri;
use remoe_http::{ApiError, query_parameter};
use remoe_model::Inspection;
use remoe_plan::{Comparison, Measured, Outcome, Plan, PlanAccount, ServingStrategy, baselines};
use remoe_predictor::Activations;
use remoe_proto::format_listing;
use remoe_proto::v1::LayerExperts;
use serde::{Serialize, Serializer};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::watch;

/// Placement in force with its measured figures.
#[derive(Clone)]
pub(crate) struct PlacementView {
    pub(crate) in_force: watch::Receiver<Arc<PublishedGeneration>>,
    pub(crate) activity: Arc<Activity>,
    pub(crate) card: Option<Arc<ModelCard>>,
    pub(super) means: Arc<Mutex<RequestMeans>>,
    rivals: Arc<Mutex<Option<AccountRivals>>>,
}

impl Default for PlacementView {
    /// Creates the view before the first generation, without facts about the model.
    fn default() -> Self {
        let (_, in_force) = watch::channel(Arc::default());
        Self { in_force, activity: Arc::default(), card: None, means: Arc::default(), rivals: Arc::default() }
    }
}

/// A routing generation in force, as the placement page shows it.
#[derive(Debug, Default)]
pub(crate) struct PublishedGeneration {
    /// 0 before the first placement.
    pub(crate) generation: u64,
    /// Experts computed by this process.
    pub(crate) local: Vec<LayerExperts>,
    pub(crate) endpoints: EndpointSets,
}

/// Facts about the model, its device and its numerics.
#[derive(Debug, Serialize)]
pub(crate) struct ModelCard {
    #[serde(flatten)]
    pub(crate) facts: Inspection,
    pub(crate) compute_dtype: String,
    pub(crate) device: String,
    pub(crate) operations: &'static str,
    pub(crate) numerics_class: String,
}

/// Means over the requests of one generation.
#[derive(Debug, Default)]
pub(super) struct RequestMeans {
    /// Number of requests.
    requests: u64,
    /// Generation of the requests.
    generation: u64,
    ttft_seconds: f64,
    /// Number of decode steps.
    steps: u64,
    decode_seconds: f64,
    /// Number of requests that a plan's expectation was compared with.
    compared: u64,
    expected: OutcomeSum,
    measured: OutcomeSum,
}

/// Sum of outcomes.
#[derive(Debug, Default, Clone, Copy)]
struct OutcomeSum {
    ttft: f64,
    tpot: f64,
    cost: f64,
}

impl OutcomeSum {
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
    /// Seconds per output token; null before the first request with a second token.
    tpot_s: Option<f64>,
    /// Dollars per request; null if the placement was not planned.
    cost: Option<f64>,
    /// Outcome that the plan expected of the same requests.
    expected: Option<Outcome>,
}

/// An alternative way of serving the model (baseline).
#[derive(Debug, Clone, Serialize)]
struct RivalLine {
    name: &'static str,
    /// Dollars per typical request.
    cost: f64,
    ttft_s: f64,
    tpot_s: f64,
    /// Constraints that the alternative violates.
    violations: Vec<String>,
}

/// Alternatives to an account's plan, computed once.
struct AccountRivals {
    account: Arc<PlanAccount>,
    rivals: Arc<[RivalLine]>,
}

/// Body of `/v1/placement`.
#[derive(Serialize)]
pub(super) struct PlacementPage {
    model: String,
    generation: u64,
    /// The planner's plan, or else the placement in the form of plan files; null before the first generation.
    plan: Option<PlanForm>,
    /// True if the planner made the plan.
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

/// Experts computed by this process, and its load.
#[derive(Serialize)]
struct MainLine {
    experts: String,
    busy: f64,
}

/// Remote functions that host the same experts (replicas).
#[derive(Debug, Serialize)]
struct GroupLine {
    /// `LAYER:FIRST-LAST,..`, by layer indices of the model.
    experts: String,
    replicas: usize,
    /// Address of the first function.
    address: String,
    /// Mean share of recent time in which the functions computed, from 0 to 1.
    busy: f64,
    functions: Vec<FunctionLine>,
}

#[derive(Debug, Serialize)]
struct FunctionLine {
    address: String,
    busy: f64,
}

/// (token, expert) pairs since the start of the process, by expert.
#[derive(Serialize)]
struct LayerUse {
    layer: u32,
    pairs: Vec<u64>,
}

impl PlacementView {
    pub(crate) fn new(
        in_force: watch::Receiver<Arc<PublishedGeneration>>,
        activity: Arc<Activity>,
        card: ModelCard,
    ) -> Self {
        Self { in_force, activity, card: Some(Arc::new(card)), ..Self::default() }
    }

    /// Creates a counter of a request's used experts; `None` without facts about the model.
    pub(super) fn activations(&self) -> Option<Box<Activations>> {
        let facts = &self.card.as_ref()?.facts;
        Some(Box::new(Activations::new(facts.moe_layers.len(), facts.experts)))
    }

    /// Records a finished request. Compares its figures with the plan's expectation, if the placement was planned.
    pub(super) fn record(&self, figures: &Figures, account: Option<&PlanAccount>) -> Option<Comparison> {
        let generation = self.in_force.borrow().generation;
        let comparison = account.map(|account| account.compare(&measured(figures)));
        self.means.lock().unwrap_or_else(PoisonError::into_inner).record(
            generation,
            figures,
            comparison.as_ref(),
        );
        comparison
    }
}

impl RequestMeans {
    fn record(&mut self, generation: u64, figures: &Figures, comparison: Option<&Comparison>) {
        if self.generation != generation {
            *self = Self { generation, ..Self::default() };
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

    /// Returns the means of `generation`; `None` without requests.
    fn means(&self, generation: u64) -> Option<MeasuredMeans> {
        let has_some = self.generation == generation && self.requests > 0;
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

/// Converts a request's figures for the plan's account.
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

/// Returns the placement in force, without waking a function or computing for the model.
pub(super) async fn handle(
    State(state): State<Arc<HttpState>>,
    uri: Uri,
) -> Result<Json<PlacementPage>, ApiError> {
    state.check_model(query_parameter(&uri, "model").as_deref())?;
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
        main: MainLine { experts: format_listing(&in_force.local), busy: view.activity.local_busy_share() },
        experts: uses(view),
        groups,
        expected: account.as_ref().map(|account| account.expect_typical()),
        measured: view.means.lock().unwrap_or_else(PoisonError::into_inner).means(in_force.generation),
        rivals,
        card: view.card.clone(),
    }))
}

/// Returns the usage of every expert.
fn uses(view: &PlacementView) -> Vec<LayerUse> {
    let Some(card) = &view.card else { return Vec::new() };
    let layers = card.facts.moe_layers.iter().map(|&layer| {
        let mut pairs = view.activity.pairs(layer);
        pairs.resize(card.facts.experts, 0);
        LayerUse { layer: u32::try_from(layer).unwrap_or(u32::MAX), pairs }
    });
    layers.collect()
}

/// Groups endpoints that host the same experts, in the order of the placement.
fn groups(in_force: &PublishedGeneration, activity: &Activity) -> Vec<GroupLine> {
    let mut groups: Vec<GroupLine> = Vec::new();
    for (address, hosted) in in_force.endpoints.iter().filter(|(_, hosted)| !hosted.is_empty()) {
        let experts = format_listing(hosted);
        let function = FunctionLine { address: address.clone(), busy: activity.remote_busy_share(address) };
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

/// Returns the alternatives to the plan of `account`. They are computed once, on a blocking thread.
async fn rivals(view: &PlacementView, account: &Arc<PlanAccount>) -> Arc<[RivalLine]> {
    let known = || view.rivals.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = known().as_ref().filter(|known| Arc::ptr_eq(&known.account, account)) {
        return known.rivals.clone();
    }
    let task_account = account.clone();
    let rivals: Arc<[RivalLine]> =
        tokio::task::spawn_blocking(move || rivals_of(&task_account)).await.unwrap_or_default().into();
    *known() = Some(AccountRivals { account: account.clone(), rivals: rivals.clone() });
    rivals
}

fn rivals_of(account: &PlanAccount) -> Vec<RivalLine> {
    // The running plan was made from the same problem, so an error is not expected.
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
    fn endpoints_with_the_same_experts_form_one_group() {
        let hosted = |experts: &[u32]| vec![LayerExperts { layer: 1, experts: experts.to_vec() }];
        let in_force = PublishedGeneration {
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
    fn means_cover_the_generation_in_force_only() {
        let figures = |tokens: usize, ttft: u64, decode: u64| Figures {
            completion_tokens: tokens,
            ttft: Duration::from_millis(ttft),
            decode: Duration::from_millis(decode),
            ..Figures::default()
        };
        let mut means = RequestMeans::default();
        means.record(1, &figures(5, 9000, 9000), None);
        means.record(2, &figures(1, 100, 0), None);
        assert_eq!(means.means(2).and_then(|shown| shown.tpot_s), None);
        means.record(2, &figures(11, 300, 500), None);
        let shown = means.means(2).map(|shown| (shown.requests, shown.ttft_s, shown.tpot_s, shown.cost));
        assert_eq!(shown, Some((2, 0.2, Some(0.05), None)));
        assert!(means.means(3).is_none());
    }
}
