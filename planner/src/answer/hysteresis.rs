//! Whether a plan that runs is replaced, and what that would change.

use crate::cost::Evaluation;
use crate::plan::{Plan, whole_bytes};
use crate::problem::model::Model;
use crate::slicing::Planned;
use serde::Serialize;

/// The previous plan against the new one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// Whether the previous plan stays.
    pub kept: bool,
    /// Why.
    pub reason: Reason,
    /// Dollars of the previous plan on this problem.
    pub previous_cost: f64,
    /// Dollars of the new one, where there is one.
    pub new_cost: Option<f64>,
    /// Main memory before and after, where it differs.
    pub main_bytes: Option<[Bytes; 2]>,
    /// What the new plan changes in each layer that it changes.
    pub layers: Vec<LayerChange>,
    /// Bytes of experts that functions of the new plan have to load because those of the previous one do not have
    /// them; where there is one.
    pub moved_bytes: Option<Bytes>,
}

/// Why a previous plan stays or goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It is the plan that would be made now.
    Unchanged,
    /// The new plan saves too little.
    WithinHysteresis,
    /// The new plan saves enough.
    Cheaper,
    /// It misses a limit, or has remote experts where it must not.
    PreviousFails,
    /// It keeps every limit, and no new plan does in the worst case.
    NoNewPlan,
}

/// What changes in one layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerChange {
    /// Its position.
    pub layer: usize,
    /// Experts that become remote.
    pub to_remote: Vec<u32>,
    /// Experts that become local.
    pub to_local: Vec<u32>,
    /// Memory of each replica before and after.
    pub memory_bytes: [Bytes; 2],
    /// Replicas before and after.
    pub replicas: [u32; 2],
}

/// Bytes, printed as a whole number where they are one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Bytes(#[serde(serialize_with = "whole_bytes")] pub f64);

/// Compares `previous`, which keeps every limit where it `stands`, with the `best` new plan.
pub(crate) fn decide(
    model: &Model<'_>,
    previous: &Plan,
    old: &Evaluation,
    stands: bool,
    best: Option<&Planned>,
    hysteresis: f64,
) -> Change {
    let new_cost = best.map(|best| best.evaluation.total_cost);
    let same = best.is_some_and(|best| best.plan == *previous);
    let cheaper = new_cost.is_some_and(|cost| cost < old.total_cost * (1.0 - hysteresis));
    let reason = match (stands, best) {
        (false, _) => Reason::PreviousFails,
        (true, None) => Reason::NoNewPlan,
        (true, Some(_)) if same => Reason::Unchanged,
        (true, Some(_)) if cheaper => Reason::Cheaper,
        (true, Some(_)) => Reason::WithinHysteresis,
    };
    let kept = !matches!(reason, Reason::PreviousFails | Reason::Cheaper);
    let (main_bytes, layers) = best.map_or((None, Vec::new()), |best| differences(previous, &best.plan));
    let moved_bytes = best.map(|best| Bytes(moved_bytes(model, previous, &best.plan)));
    Change { kept, reason, previous_cost: old.total_cost, new_cost, main_bytes, layers, moved_bytes }
}

/// Functions that host the same experts: these, per layer, and how many there are.
struct Hosts {
    experts: Vec<Vec<u32>>,
    functions: f64,
}

impl Hosts {
    fn bytes(&self, model: &Model<'_>) -> f64 {
        model.weight_bytes(&self.experts)
    }

    /// Bytes of the experts that `other` has as well.
    fn shared_bytes(&self, other: &Self, model: &Model<'_>) -> f64 {
        let layers = self.experts.iter().zip(&other.experts);
        let shared = layers.map(|(own, theirs)| {
            own.iter().copied().filter(|expert| theirs.binary_search(expert).is_ok()).collect()
        });
        model.weight_bytes(&shared.collect::<Vec<Vec<u32>>>())
    }
}

/// All main functions, and the remote ones of every group or layer.
fn hosts(model: &Model<'_>, plan: &Plan) -> (Hosts, Vec<Hosts>) {
    let main = Hosts {
        experts: (0..plan.layers.len()).map(|layer| model.local_experts(layer, plan)).collect(),
        functions: f64::from(model.problem.pricing.main_replicas),
    };
    let of_groups = plan
        .groups
        .iter()
        .map(|group| Hosts { experts: group.experts.clone(), functions: f64::from(group.replicas) });
    let own = plan.layers.iter().enumerate().filter(|(_, part)| part.replicas > 0);
    let of_layers = own.map(|(layer, part)| {
        let mut experts = vec![Vec::new(); plan.layers.len()];
        experts[layer].clone_from(&part.remote);
        Hosts { experts, functions: f64::from(part.replicas) }
    });
    (main, of_groups.chain(of_layers).collect())
}

/// Bytes of experts that the functions of `to` load, where those of `from` become them as far as they can: the largest
/// of the new functions take, one after the other, the previous ones that have the most of theirs.
fn moved_bytes(model: &Model<'_>, from: &Plan, to: &Plan) -> f64 {
    let ((old_main, mut old), (main, mut new)) = (hosts(model, from), hosts(model, to));
    let mut moved = main.functions * (main.bytes(model) - main.shared_bytes(&old_main, model));
    new.sort_by(|a, b| b.bytes(model).total_cmp(&a.bytes(model)));
    for hosts in new {
        let shared: Vec<f64> = old.iter().map(|old| hosts.shared_bytes(old, model)).collect();
        let most = (0..old.len()).max_by(|a, b| shared[*a].total_cmp(&shared[*b]));
        moved += hosts.functions * hosts.bytes(model);
        if let Some(most) = most.filter(|most| shared[*most] > 0.0) {
            let becomes = old.swap_remove(most);
            moved -= shared[most] * hosts.functions.min(becomes.functions);
        }
    }
    moved
}

fn differences(from: &Plan, to: &Plan) -> (Option<[Bytes; 2]>, Vec<LayerChange>) {
    let main_bytes =
        (from.main_bytes != to.main_bytes).then_some([Bytes(from.main_bytes), Bytes(to.main_bytes)]);
    let pairs = from.layers.iter().zip(&to.layers).enumerate();
    let layers = pairs.filter(|(_, (from, to))| from != to).map(|(layer, (from, to))| {
        let missing_in = |set: &[u32], other: &[u32]| -> Vec<u32> {
            set.iter().copied().filter(|expert| other.binary_search(expert).is_err()).collect()
        };
        LayerChange {
            layer,
            to_remote: missing_in(&to.remote, &from.remote),
            to_local: missing_in(&from.remote, &to.remote),
            memory_bytes: [Bytes(from.memory_bytes), Bytes(to.memory_bytes)],
            replicas: [from.replicas, to.replicas],
        }
    });
    (main_bytes, layers.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::small_problem;
    use crate::plan::{Group, LayerPlan};

    #[test]
    fn only_what_no_function_has_is_moved() {
        let mut problem = small_problem(1, 1);
        problem.layers[0].experts = 6;
        problem.prediction = Some(vec![vec![1.0 / 6.0; 6]]);
        problem.pricing.main_replicas = 2;
        let each = problem.layers[0].expert_bytes;
        let model = Model::new(&problem);
        let plan = |groups: &[(&[u32], u32)]| {
            let mut remote: Vec<u32> =
                groups.iter().flat_map(|(experts, _)| experts.iter().copied()).collect();
            remote.sort_unstable();
            let group = |(experts, replicas): &(&[u32], u32)| Group {
                experts: vec![experts.to_vec()],
                memory_bytes: 1e9,
                vcpus: None,
                replicas: *replicas,
            };
            Plan {
                groups: groups.iter().map(group).collect(),
                ..Plan::of_layers(1e9, vec![LayerPlan { remote, ..LayerPlan::default() }])
            }
        };
        let from = plan(&[(&[0, 1, 2], 1), (&[3, 4], 2)]);
        let moved = |to: &[(&[u32], u32)]| moved_bytes(&model, &from, &plan(to)) / each;
        let close = |moved: f64, experts: f64| assert!((moved - experts).abs() < 1e-9, "{moved} {experts}");
        // Other numbers of the same groups.
        close(moved(&[(&[3, 4], 2), (&[0, 1, 2], 1)]), 0.0);
        // An expert to another group, both of whose functions load it.
        close(moved(&[(&[0, 1], 1), (&[2, 3, 4], 2)]), 2.0);
        // A function more loads all that it has.
        close(moved(&[(&[0, 1, 2], 2), (&[3, 4], 2)]), 3.0);
        // An expert that comes home, in both main functions.
        close(moved(&[(&[0, 1], 1), (&[3, 4], 2)]), 2.0);
        // One function of each group is gone.
        close(moved(&[(&[3, 4], 1)]), 6.0);
    }
}
