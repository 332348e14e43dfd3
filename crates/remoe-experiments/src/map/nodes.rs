//! Cells for rented nodes.

use super::{
    Cell, DAY, IDLE_SECONDS, PATIENT_SECONDS, Regime, SLOW_SECONDS, STRATEGIES, StrategyOffer, Subject,
    request, slo,
};
use crate::error::ExperimentError;
use remoe_hardware::{Commitment, ListedNode, NodeList, Profile, node_shapes};
use remoe_planner::{
    ArrangementEvaluation, Arrivals, Rental, Reserve, ResidentModel, ServingStrategy, Slo, SpotPolicy, rent,
};

/// Largest vCPUs, memory in GB and GPUs of a modest node.
const MODEST: (f64, f64, u32) = (16.0, 69.0, 1);

/// A regime of rented nodes: a list of nodes, with limits and an idle window.
#[derive(Debug, Clone, PartialEq)]
pub struct ListRegime {
    /// Name in file names.
    pub name: &'static str,
    /// Title.
    pub title: &'static str,
    /// Nodes that may be rented, on demand.
    pub list: NodeList,
    /// Latency limits.
    pub slo: Slo,
    /// Idle window in seconds; if absent, nodes are always rented.
    pub window: Option<f64>,
}

impl ListRegime {
    /// Returns the regimes of `list`: all nodes, all nodes with a longer TPOT limit, all nodes with an idle window, and
    /// modest nodes only, if there are any.
    #[must_use]
    pub fn all(list: &NodeList) -> Vec<Self> {
        // The map excludes spot nodes.
        let nodes =
            list.nodes.iter().map(|node| ListedNode { spot_per_hour: None, ..node.clone() }).collect();
        let always = Self {
            name: "nodes-all",
            title: "Nodes as they are sold",
            list: NodeList { nodes, ..list.clone() },
            slo: slo(),
            window: None,
        };
        let patient = Slo { tpot_seconds: PATIENT_SECONDS, ..slo() };
        let mut all = vec![
            always.clone(),
            Self {
                name: "nodes-patient",
                title: "Nodes as they are sold, slower tokens",
                slo: patient,
                ..always.clone()
            },
            Self {
                name: "nodes-rare",
                title: "Nodes as they are sold, released when idle",
                window: Some(IDLE_SECONDS),
                ..always.clone()
            },
        ];
        let (vcpus, gb, gpus) = MODEST;
        let is_modest = |node: &&ListedNode| node.vcpus <= vcpus && node.memory_gb <= gb && node.gpus <= gpus;
        let nodes: Vec<ListedNode> = always.list.nodes.iter().filter(is_modest).cloned().collect();
        if !nodes.is_empty() {
            let slo = Slo { tpot_seconds: SLOW_SECONDS, ..slo() };
            all.push(Self {
                name: "nodes-modest",
                title: "Modest nodes as they are sold",
                list: NodeList { nodes, ..always.list.clone() },
                slo,
                ..always
            });
        }
        all
    }

    /// Finds the cheapest strategy for every model at every rate.
    ///
    /// # Errors
    /// A figure of a model or of the list that the planner rejects.
    pub fn regime(&self, subjects: &[Subject]) -> Result<Regime, ExperimentError> {
        Regime::of(self.name, self.title, self.limits(), subjects, |subject, per_day| {
            self.cell(subject, per_day)
        })
    }

    /// Finds the cheapest strategy for `subject` at `per_day` requests a day.
    ///
    /// # Errors
    /// A figure of the model or of the list that the planner rejects.
    pub fn cell(&self, subject: &Subject, per_day: f64) -> Result<Cell, ExperimentError> {
        let arrivals = Arrivals {
            per_second: per_day / DAY,
            burst: 1.0,
            recorded_seconds: None,
            idle_seconds: self.window,
            input_variation: 0.0,
            output_variation: 0.0,
        };
        let rental = rental(subject, &self.list, self.slo, Some(arrivals));
        let answer = rent(&rental).map_err(|error| ExperimentError::Plan {
            scenario: subject.name.clone(),
            error: remoe_planner::PlanError::Problem(error),
        })?;
        let offers = STRATEGIES.into_iter().filter_map(|way| {
            let rivals = answer.verdict.rivals.iter().filter(|rival| rival.name.strategy() == way);
            Some(self.offer(way, rivals.min_by(|a, b| a.order(b))?))
        });
        Ok(Cell::new(subject, per_day, offers.collect()))
    }

    fn offer(&self, way: ServingStrategy, rival: &ArrangementEvaluation) -> StrategyOffer {
        let met = rival.expected.map(|times| times.under_load);
        StrategyOffer {
            way,
            dollars_per_hour: rival.dollars_per_hour,
            on: if rival.feasible { rival.why.clone() } else { String::new() },
            sleeps: self.window.is_some(),
            ttft_seconds: met.map(|times| times.ttft_seconds),
            tpot_seconds: met.map(|times| times.tpot_seconds),
            why: if rival.feasible { String::new() } else { rival.why.clone() },
        }
    }

    fn limits(&self) -> String {
        let most = |of: fn(&ListedNode) -> f64| self.list.nodes.iter().map(of).fold(0.0, f64::max);
        let when = match self.window {
            Some(window) => format!("nodes are released after {window:.0} s without requests"),
            None => "nodes are always rented".to_owned(),
        };
        format!(
            "TTFT {:.0} s, TPOT {:.0} ms; {} shapes up to {:.0} vCPUs, {:.0} GB and {:.0} GPUs; \
             {when}",
            self.slo.ttft_seconds,
            self.slo.tpot_seconds * 1e3,
            self.list.nodes.len(),
            most(|node| node.vcpus),
            most(|node| node.memory_gb),
            most(|node| f64::from(node.gpus)),
        )
    }
}

/// Returns the planner's input for `subject` on `list`.
#[must_use]
pub fn rental(subject: &Subject, list: &NodeList, slo: Slo, arrivals: Option<Arrivals>) -> Rental {
    let facts = &subject.facts;
    let prior = Profile::prior(facts, &facts.dtype);
    let token_bytes = facts.token_bytes as f64;
    Rental {
        model: ResidentModel {
            layers: facts.moe_layers.len(),
            experts: facts.experts,
            top_k: facts.top_k,
            expert_bytes: facts.expert_bytes as f64,
            rest_bytes: subject.rest_bytes(),
            main_rest_bytes: subject.rest_bytes(),
            device_rest_bytes: subject.rest_bytes(),
            kv_bytes_per_token: facts.kv_bytes_per_token as f64,
            kv_windowed: None,
            token_bytes,
        },
        request: request(),
        slo,
        arrivals,
        starts: Some(prior.starts),
        shapes: node_shapes(list, Commitment::OnDemand, &subject.weights, None),
        reserve: Reserve::default(),
        spot: SpotPolicy::Remote,
        transport: prior.transport.of_rows(token_bytes),
        runtime_bytes: prior.memory.main_bytes,
        fallback_bytes: subject.fallback_bytes(),
        function_bytes: prior.memory.function_bytes,
        usage: None,
    }
}
