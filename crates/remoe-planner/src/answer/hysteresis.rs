//! Hysteresis: whether a running plan is replaced, what that changes, and what the change itself costs.
//!
//! During a change both plans are alive: the previous one serves until every function of the new one has loaded its
//! experts. A remote function cannot change its experts or its size, so a changed group consists of new functions, which
//! start and load all their experts. A main function of the same size stays and loads the experts that become local. One
//! of another size restarts and loads all its weights.
//!
//! A function f that loads b bytes takes T_f = b / load rate, plus the start of a process if it is new. Meanwhile it is
//! billed at rate_f and saves nothing. If the new plan is used for H seconds, the change costs the sum of T_f rate_f, and
//! the new plan saves its lower cost for H - max T_f seconds.

use crate::remote::Remote;
use crate::slicing::CandidatePlan;
use remoe_plan::alive::mean_per_second;
use remoe_plan::cost::{Evaluation, Violation};
use remoe_plan::model::Model;
use remoe_plan::plan::{Group, Plan, whole_bytes};
use remoe_plan::problem::Start;
use remoe_plan::problem::sizes::GB;
use serde::Serialize;

/// Comparison of the previous plan with the new one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlanChange {
    /// Set if the previous plan is kept.
    pub kept: bool,
    /// Reason of the decision.
    pub reason: ReplacementReason,
    /// Dollars of a request under the previous plan.
    pub previous_cost: f64,
    /// Dollars of a request under the new plan, if there is one.
    pub new_cost: Option<f64>,
    /// Memory of the main function before and after, if it changes.
    pub main_bytes: Option<[Bytes; 2]>,
    /// Changes in each layer that the new plan changes.
    pub layers: Vec<LayerChange>,
    /// Number of functions of the new plan that start, if there is a new plan.
    pub starts: Option<f64>,
    /// Bytes of weights that functions of the new plan load, if there is a new plan. New functions load all their weights,
    /// main functions that stay load the experts that become local.
    pub moved_bytes: Option<Bytes>,
    /// Time and cost of the change, and the saving of the new plan, if there is one and the problem states starts.
    #[serde(rename = "toll")]
    pub change_cost: Option<ChangeCost>,
}

/// Cost and saving of a change.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ChangeCost {
    /// Seconds until every function of the new plan has its experts. Meanwhile both plans are alive.
    pub seconds: f64,
    /// Dollars of the loading functions, times the share of the time in which the previous plan is alive.
    pub dollars: f64,
    /// Dollars that the new plan saves afterwards, for as long as it is expected to be used. Below 0 if it is more expensive.
    pub saves: f64,
}

impl ChangeCost {
    /// `saving_per_second`: dollars that the new plan saves. `used_seconds`: time for which it is expected to be used.
    fn new(loads: &[FunctionLoad], saving_per_second: f64, used_seconds: f64) -> Self {
        let seconds = loads.iter().map(FunctionLoad::seconds).fold(0.0, f64::max);
        let dollars = loads.iter().map(|load| load.functions * load.rate * load.seconds()).sum();
        // A more expensive plan is charged for the whole time, so that slow loading is no advantage.
        let saves = if saving_per_second > 0.0 {
            saving_per_second * (used_seconds - seconds).max(0.0)
        } else {
            saving_per_second * used_seconds
        };
        Self { seconds, dollars, saves }
    }

    /// Reports if the change saves more than it costs.
    fn pays(&self) -> bool {
        self.saves > self.dollars
    }
}

/// Reason that a previous plan is kept or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplacementReason {
    /// Kept: the new plan is the same.
    Unchanged,
    /// Kept: the new plan saves too small a share of the cost.
    WithinHysteresis,
    /// Kept: the new plan does not save the cost of the change in the time for which it is expected to be used.
    MovesTooMuch,
    /// Replaced: the new plan saves enough.
    Cheaper,
    /// Replaced: the previous plan breaks a limit, or has remote experts where they are not allowed.
    PreviousFails,
    /// Kept: no new plan that keeps every limit was found.
    NoNewPlan,
}

/// Changes of one layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerChange {
    /// Position of the layer.
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

/// Bytes, serialised as an integer if they are whole.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Bytes(#[serde(serialize_with = "whole_bytes")] pub f64);

/// The previous plan, evaluated on the current problem.
pub(crate) struct PreviousPlan {
    pub(crate) plan: Plan,
    pub(crate) evaluation: Evaluation,
    /// Set if it keeps every limit and has remote experts only where they are allowed.
    pub(crate) is_feasible: bool,
}

impl PreviousPlan {
    /// `violations`: returns the limits that a plan breaks, given its evaluation.
    pub(crate) fn new(
        model: &Model<'_>,
        plan: Plan,
        remote: Remote,
        violations: &dyn Fn(&Plan, &Evaluation) -> Vec<Violation>,
    ) -> Self {
        let evaluation = model.evaluate(&plan);
        let keeps = violations(&plan, &evaluation).is_empty();
        Self { is_feasible: keeps && remote.allows(model, &plan.remote_counts()), plan, evaluation }
    }
}

/// Policy on replacing a running plan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HysteresisPolicy {
    /// Share of the cost that the new plan must save.
    pub(crate) hysteresis: f64,
    /// Seconds for which the new plan is expected to be used.
    pub(crate) stands_seconds: f64,
}

/// Compares the previous plan with the `best` new one, and decides which of them is used.
pub(crate) fn compare_with_previous(
    model: &Model<'_>,
    previous: &PreviousPlan,
    best: Option<&CandidatePlan>,
    policy: HysteresisPolicy,
) -> PlanChange {
    let PreviousPlan { plan: previous, evaluation: old, is_feasible } = previous;
    let new_cost = best.map(|best| best.evaluation.total_cost);
    let same = best.is_some_and(|best| best.plan == *previous);
    let saves_enough = new_cost.is_some_and(|cost| cost < old.total_cost * (1.0 - policy.hysteresis));
    let loads = best.map(|best| functions_to_load(model, previous, &best.plan));
    let change_cost =
        loads.as_ref().zip(new_cost).filter(|_| model.problem.starts.is_some()).map(|(loads, new_cost)| {
            let per_second = requests_per_second(model, old) * (old.total_cost - new_cost);
            let cost = ChangeCost::new(loads, per_second, policy.stands_seconds);
            // If the deployment is at zero, it starts with the new plan, which costs no more than with the previous one.
            ChangeCost { dollars: cost.dollars * old.life.map_or(1.0, |life| life.alive_share), ..cost }
        });
    let reason = match (*is_feasible, best) {
        (false, _) => ReplacementReason::PreviousFails,
        (true, None) => ReplacementReason::NoNewPlan,
        (true, Some(_)) if same => ReplacementReason::Unchanged,
        (true, Some(_)) if saves_enough && change_cost.is_some_and(|cost| !cost.pays()) => {
            ReplacementReason::MovesTooMuch
        }
        (true, Some(_)) if saves_enough => ReplacementReason::Cheaper,
        (true, Some(_)) => ReplacementReason::WithinHysteresis,
    };
    let kept = !matches!(reason, ReplacementReason::PreviousFails | ReplacementReason::Cheaper);
    let (main_bytes, layers) = best.map_or((None, Vec::new()), |best| differences(previous, &best.plan));
    let is_new = |load: &&FunctionLoad| !load.is_running;
    let starts = loads.as_ref().map(|loads| loads.iter().filter(is_new).map(|load| load.functions).sum());
    let moved_bytes =
        loads.map(|loads| Bytes(loads.iter().map(|load| load.functions * load.bytes).sum::<f64>()));
    PlanChange {
        kept,
        reason,
        previous_cost: old.total_cost,
        new_cost,
        main_bytes,
        layers,
        starts,
        moved_bytes,
        change_cost,
    }
}

/// Returns the requests in a second: of the arrivals, or without them one after the other on every main function.
fn requests_per_second(model: &Model<'_>, running: &Evaluation) -> f64 {
    let seconds = running.prefill_seconds + running.decode_seconds;
    match &model.problem.arrivals {
        Some(arrivals) => mean_per_second(arrivals),
        None if seconds > 0.0 => f64::from(model.problem.pricing.main_replicas) / seconds,
        None => 0.0,
    }
}

/// Functions that load the same bytes during a change.
#[derive(Debug, Clone, Copy)]
struct FunctionLoad {
    functions: f64,
    /// Bytes that each loads.
    bytes: f64,
    /// Dollars per second of each.
    rate: f64,
    /// Start of a process and load rate; if absent, loading takes no time.
    start: Option<Start>,
    /// Set if their process is running already.
    is_running: bool,
}

impl FunctionLoad {
    /// Returns the seconds of loading.
    fn seconds(&self) -> f64 {
        let Some(start) = self.start.filter(|_| self.functions > 0.0) else { return 0.0 };
        let process = if self.is_running { 0.0 } else { start.process_seconds };
        process + self.bytes / start.load_bytes_per_second
    }
}

/// Functions of the same size that host the same experts.
struct FunctionSet {
    /// `[layer]`: ids of the experts.
    experts: Vec<Vec<u32>>,
    size: FunctionSize,
    functions: f64,
    /// Dollars per second of each.
    rate: f64,
}

/// Size of a function, which it cannot change.
#[derive(Debug, Clone, Copy, PartialEq)]
struct FunctionSize {
    memory_bytes: f64,
    vcpus: Option<f64>,
    /// Set for a function of a single layer in a plan without groups.
    is_layer_function: bool,
}

impl FunctionSet {
    fn bytes(&self, model: &Model<'_>) -> f64 {
        model.weight_bytes(&self.experts)
    }

    /// Returns the bytes of the experts that both host.
    fn shared_bytes(&self, other: &Self, model: &Model<'_>) -> f64 {
        let layers = self.experts.iter().zip(&other.experts);
        let shared = layers.map(|(own, others)| {
            own.iter().copied().filter(|expert| others.binary_search(expert).is_ok()).collect()
        });
        model.weight_bytes(&shared.collect::<Vec<Vec<u32>>>())
    }
}

/// Returns the main functions and the remote functions of every group or layer.
fn function_sets(model: &Model<'_>, plan: &Plan) -> (FunctionSet, Vec<FunctionSet>) {
    let main = FunctionSet {
        experts: (0..plan.layers.len()).map(|layer| model.local_experts(layer, plan)).collect(),
        size: FunctionSize {
            memory_bytes: plan.main_bytes,
            vcpus: plan.main_vcpus,
            is_layer_function: false,
        },
        functions: f64::from(model.problem.pricing.main_replicas),
        rate: model.main_rate(plan),
    };
    let of_groups = plan.groups.iter().map(|group| FunctionSet {
        experts: group.experts.clone(),
        size: FunctionSize { memory_bytes: group.memory_bytes, vcpus: group.vcpus, is_layer_function: false },
        functions: f64::from(group.replicas),
        rate: model.function_rate(group.memory_bytes, group.vcpus),
    });
    let own = plan.layers.iter().enumerate().filter(|(_, part)| part.replicas > 0);
    let of_layers = own.map(|(layer, part)| {
        let mut experts = vec![Vec::new(); plan.layers.len()];
        experts[layer].clone_from(&part.remote);
        let rate = model.cpu_price * part.memory_bytes / GB;
        let size = FunctionSize { memory_bytes: part.memory_bytes, vcpus: None, is_layer_function: true };
        FunctionSet { experts, size, functions: f64::from(part.replicas), rate }
    });
    (main, of_groups.chain(of_layers).collect())
}

/// Returns the loads of the functions of `to`, where those of `from` run.
fn functions_to_load(model: &Model<'_>, from: &Plan, to: &Plan) -> Vec<FunctionLoad> {
    let ((old_main, old), (main, new)) = (function_sets(model, from), function_sets(model, to));
    let starts = model.problem.starts;
    let main_stays = main.size == old_main.size;
    let bytes = match main_stays {
        true => main.bytes(model) - main.shared_bytes(&old_main, model),
        false => model.nonexpert_bytes + main.bytes(model),
    };
    let of_main = FunctionLoad {
        functions: main.functions,
        bytes,
        rate: main.rate,
        start: starts.map(|starts| starts.main),
        is_running: main_stays,
    };
    let of_remote = |set: &FunctionSet| {
        let same = old.iter().filter(|old| old.size == set.size && old.experts == set.experts);
        let running: f64 = same.map(|old| old.functions).sum();
        FunctionLoad {
            functions: (set.functions - running).max(0.0),
            bytes: set.bytes(model),
            rate: set.rate,
            start: starts.map(|starts| starts.remote),
            is_running: false,
        }
    };
    std::iter::once(of_main).chain(new.iter().map(of_remote)).collect()
}

/// Reorders the groups of `plan` so that unchanged ones have their position of `previous`: functions are named by it.
pub(crate) fn with_group_positions(plan: &Plan, previous: &Plan) -> Plan {
    let same = |one: &Group, other: &Group| {
        one.experts == other.experts && one.memory_bytes == other.memory_bytes && one.vcpus == other.vcpus
    };
    let count = plan.groups.len();
    let place = |group: &Group| previous.groups.iter().position(|old| same(old, group));
    let mut places: Vec<Option<usize>> = vec![None; count];
    for (index, group) in plan.groups.iter().enumerate() {
        if let Some(taken) = place(group).and_then(|place| places.get_mut(place)) {
            *taken = Some(index);
        }
    }
    let mut others =
        (0..count).filter(|index| !places.contains(&Some(*index))).collect::<Vec<_>>().into_iter();
    let order: Vec<usize> = places.iter().filter_map(|place| place.or_else(|| others.next())).collect();
    Plan { groups: order.into_iter().map(|index| plan.groups[index].clone()).collect(), ..plan.clone() }
}

/// Returns the main sizes before and after, if they differ, and the changed layers.
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
    use crate::generate::{SplitMix64, small_problem};
    use remoe_plan::plan::LayerPlan;

    #[test]
    fn change_moves_only_missing_experts() {
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
                idle_seconds: None,
            };
            Plan {
                groups: groups.iter().map(group).collect(),
                ..Plan::of_layers(1e9, vec![LayerPlan { remote, ..LayerPlan::default() }])
            }
        };
        let from = plan(&[(&[0, 1, 2], 1), (&[3, 4], 2)]);
        let moved = |to: &Plan| {
            functions_to_load(&model, &from, to).iter().map(|load| load.functions * load.bytes).sum::<f64>()
                / each
        };
        let close = |moved: f64, experts: f64| assert!((moved - experts).abs() < 1e-9, "{moved} {experts}");
        // The same groups in another order.
        close(moved(&plan(&[(&[3, 4], 2), (&[0, 1, 2], 1)])), 0.0);
        // An expert moves to another group: both groups are new, the second with two functions.
        close(moved(&plan(&[(&[0, 1], 1), (&[2, 3, 4], 2)])), 2.0 + 2.0 * 3.0);
        // An additional replica loads all its experts.
        close(moved(&plan(&[(&[0, 1, 2], 2), (&[3, 4], 2)])), 3.0);
        // An expert becomes local in both main functions; its former group is new.
        close(moved(&plan(&[(&[0, 1], 1), (&[3, 4], 2)])), 2.0 + 2.0);
        // A group and a replica are removed; three experts become local in both main functions.
        close(moved(&plan(&[(&[3, 4], 1)])), 6.0);
        // A changed size needs new functions, a changed idle window does not.
        let mut other = from.clone();
        other.groups[1].memory_bytes = 2e9;
        close(moved(&other), 2.0 * 2.0);
        other.groups[1] = Group { vcpus: Some(2.0), ..from.groups[1].clone() };
        close(moved(&other), 2.0 * 2.0);
        other.groups[1] = Group { idle_seconds: Some(9.0), ..from.groups[1].clone() };
        close(moved(&other), 0.0);
        // A main function of another size loads all its weights.
        let main = Plan { main_bytes: 2e9, ..from.clone() };
        close(moved(&main), 2.0 * (model.nonexpert_bytes / each + 1.0));
    }

    #[test]
    fn change_charges_every_new_function_and_no_other() {
        let random = &mut SplitMix64::new(8);
        let mut changed = 0;
        for seed in 0..200 {
            let problem = small_problem(seed, 2);
            let model = Model::new(&problem);
            let drawn = |random: &mut SplitMix64| {
                let mut groups: Vec<Group> = (0..3)
                    .map(|_| Group {
                        experts: vec![Vec::new(); 2],
                        memory_bytes: [1e9, 2e9][random.whole(0, 1) as usize],
                        vcpus: None,
                        replicas: random.whole(1, 3) as u32,
                        idle_seconds: None,
                    })
                    .collect();
                for (layer, parts) in model.layers.iter().enumerate() {
                    for expert in 0..parts.experts as u32 {
                        let to = if random.one_in(4) { 3 } else { expert as usize % 3 };
                        groups.get_mut(to).into_iter().for_each(|group| group.experts[layer].push(expert));
                    }
                }
                groups.retain(|group| group.experts.iter().any(|experts| !experts.is_empty()));
                let remote = |layer: usize| {
                    let mut remote: Vec<u32> =
                        groups.iter().flat_map(|group| group.experts[layer].clone()).collect();
                    remote.sort_unstable();
                    LayerPlan { remote, ..LayerPlan::default() }
                };
                Plan { groups: groups.clone(), ..Plan::of_layers(1e9, vec![remote(0), remote(1)]) }
            };
            let (from, to) = (drawn(random), drawn(random));
            let all = functions_to_load(&model, &from, &from);
            assert!(all.iter().all(|load| load.functions * load.bytes == 0.0), "{seed}");
            let charged: f64 = functions_to_load(&model, &from, &to)
                .iter()
                .skip(1)
                .map(|load| load.functions * load.bytes)
                .sum();
            let mut left = from.groups.clone();
            let mut expected = 0.0;
            for group in &to.groups {
                for _ in 0..group.replicas {
                    let there = left.iter_mut().find(|old| {
                        let alike = Group { replicas: old.replicas, ..group.clone() };
                        old.replicas > 0 && **old == alike
                    });
                    match there {
                        Some(there) => there.replicas -= 1,
                        None => expected += model.weight_bytes(&group.experts),
                    }
                }
            }
            changed += usize::from(expected > 0.0);
            assert!((charged - expected).abs() <= 1e-9 * expected, "{seed}: {charged} {expected}");
        }
        assert!(changed > 100, "{changed}");
    }

    #[test]
    fn unchanged_groups_keep_their_positions() {
        let group = |expert: u32| Group {
            experts: vec![vec![expert]],
            memory_bytes: 1e9,
            vcpus: None,
            replicas: 1,
            idle_seconds: None,
        };
        let plan = |experts: &[u32]| Plan {
            groups: experts.iter().map(|expert| group(*expert)).collect(),
            ..Plan::of_layers(1e9, vec![LayerPlan::default()])
        };
        let previous = plan(&[0, 1, 2, 3]);
        for (new, expected) in [
            (vec![3, 2, 1, 0], vec![0, 1, 2, 3]),
            (vec![2, 7, 0], vec![0, 7, 2]),
            (vec![8, 9, 1, 3, 5], vec![8, 1, 9, 3, 5]),
            // A position beyond the last group cannot be kept.
            (vec![3, 1], vec![3, 1]),
        ] {
            assert_eq!(with_group_positions(&plan(&new), &previous), plan(&expected));
        }
    }

    fn load(functions: f64, bytes: f64, rate: f64, is_running: bool) -> FunctionLoad {
        let start = Start { process_seconds: 3.0, load_bytes_per_second: 1e9 };
        FunctionLoad { functions, bytes, rate, start: Some(start), is_running }
    }

    #[test]
    fn change_cost_counts_loading_functions() {
        // Two functions of 10 GB start, one that is_running loads 4 GB; a third has all that it needs.
        let loads = [load(2.0, 1e10, 0.5, false), load(1.0, 4e9, 2.0, true), load(1.0, 0.0, 9.0, true)];
        let cost = ChangeCost::new(&loads, 0.1, 1_000.0);
        assert_eq!(
            cost,
            ChangeCost { seconds: 13.0, dollars: 2.0 * 0.5 * 13.0 + 2.0 * 4.0, saves: 0.1 * 987.0 }
        );
        assert!(cost.pays());
        assert!(!ChangeCost::new(&loads, 0.1, 200.0).pays(), "it is used too shortly");
        // Zero functions cost nothing to start, and a change that costs nothing is made for any saving.
        assert_eq!(ChangeCost::new(&[load(0.0, 1e10, 0.5, false)], 1e-9, 10.0).dollars, 0.0);
        assert!(ChangeCost::new(&[], 1e-9, 10.0).pays() && !ChangeCost::new(&[], 0.0, 10.0).pays());
    }

    #[test]
    fn hysteresis_grows_with_bytes_and_never_worsens_cost() {
        let random = &mut SplitMix64::new(5);
        let (mut went, mut stayed) = (0, 0);
        for _ in 0..2_000 {
            let count = random.whole(1, 4);
            let mut loads: Vec<FunctionLoad> = (0..count)
                .map(|_| {
                    let (functions, is_running) = (random.whole(0, 3) as f64, random.one_in(2));
                    load(
                        functions,
                        10f64.powf(random.between(7.0, 11.0)),
                        random.between(1e-6, 1e-3),
                        is_running,
                    )
                })
                .collect();
            let (old, new) = (random.between(1e-5, 1e-3), random.between(1e-5, 1e-3));
            let stands = 10f64.powf(random.between(0.0, 5.0));
            let mut pays = true;
            for _ in 0..6 {
                let cost = ChangeCost::new(&loads, old - new, stands);
                assert!(pays || !cost.pays());
                pays = cost.pays();
                if pays {
                    went += 1;
                    let going = old * cost.seconds + cost.dollars + new * (stands - cost.seconds);
                    assert!(going <= old * stands * (1.0 + 1e-12), "{going} {}", old * stands);
                } else {
                    stayed += 1;
                }
                loads.iter_mut().for_each(|load| load.bytes *= 3.0);
            }
        }
        assert!(went > 500 && stayed > 500, "{went} {stayed}");
    }
}
