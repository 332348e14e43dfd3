//! Comparison of all arrangements on their cheapest nodes: whether remote experts pay, and changes that flip that.

use super::best_nodes::{Arrangement, BestNodes, Infeasibility, cheaper_then_faster};
use super::compiled::{CompiledRental, Variation};
use super::{ExpectedTimes, NodesLayout, RentedNodes, on_threads};
use crate::words::{amount, distinct_amounts, dollars, limit_name};
use serde::Serialize;
use std::cmp::Ordering;

/// Comparison of all arrangements on the nodes of a list.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodesComparison {
    /// Set if the cheapest arrangement that keeps the limits has remote experts.
    pub pays: bool,
    /// Result in plain words.
    pub sentence: String,
    /// The cheapest arrangement that keeps the limits; absent if none does.
    pub best: Option<Arrangement>,
    /// Evaluations of all arrangements.
    pub rivals: Vec<ArrangementEvaluation>,
    /// Changes of one figure that flip [`Self::pays`].
    pub flips: Vec<NodesFlip>,
}

/// Evaluation of one arrangement on its cheapest nodes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ArrangementEvaluation {
    /// Arrangement.
    pub name: Arrangement,
    /// Set if nodes of the list hold it within the limits.
    pub feasible: bool,
    /// Dollars per hour of its nodes.
    pub dollars_per_hour: Option<f64>,
    /// Dollars of a million output tokens at full load.
    pub dollars_per_million_tokens: Option<f64>,
    /// Nodes of the arrangement, or the limit that fails and by how much.
    pub why: String,
    /// Limit that fails at the shape that comes closest, if it has a value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub broken: Option<BrokenLimit>,
    /// Nodes of the arrangement.
    pub nodes: Vec<RentedNodes>,
    /// Expected times.
    pub expected: Option<ExpectedTimes>,
    /// Layout of the functions on its nodes.
    pub layout: Option<NodesLayout>,
}

impl ArrangementEvaluation {
    /// Returns the dollars per hour; infinite if it is not feasible.
    fn dollars(&self) -> f64 {
        self.dollars_per_hour.unwrap_or(f64::INFINITY)
    }

    /// Compares by price. Ties (1e-9 relative) go to the lower time per output token, then to the lower time to first token.
    #[must_use]
    pub fn order(&self, other: &Self) -> Ordering {
        let key = |rival: &Self| {
            let none = (f64::INFINITY, f64::INFINITY);
            let (tpot, ttft) = rival.expected.map_or(none, |times| (times.tpot_seconds, times.ttft_seconds));
            (rival.dollars(), tpot, ttft)
        };
        cheaper_then_faster(key(self), key(other))
    }
}

/// A limit that an arrangement cannot keep.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BrokenLimit {
    /// `ttft` or `tpot` in seconds; `load` as a share of what can be served; `memory`, `memory for a slice`
    /// or `GPU memory` in bytes.
    pub limit: &'static str,
    /// The shape that comes closest.
    pub shape: String,
    /// Required value.
    pub value: f64,
    /// Available or allowed value.
    pub allowed: f64,
}

/// Change of one figure that flips whether remote experts pay.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodesFlip {
    /// Figure that is changed.
    pub cause: NodesFlipFigure,
    /// Current value.
    pub now: f64,
    /// Flipping value that is nearest to the current one.
    pub at: f64,
    /// The cheapest arrangement after the change.
    pub best: Arrangement,
    /// Description of the change.
    pub sentence: String,
}

/// Figure that is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NodesFlipFigure {
    /// Limit of the time per output token, in seconds.
    TpotSeconds,
    /// Factor on the prices of nodes with GPUs.
    GpuPriceFactor,
    /// Factor on the bytes and the seconds of all weights.
    ModelSizeFactor,
    /// Factor on the arrival rate; only with arrivals.
    RequestRateFactor,
}

impl NodesFlipFigure {
    const ALL: [Self; 4] =
        [Self::TpotSeconds, Self::GpuPriceFactor, Self::ModelSizeFactor, Self::RequestRateFactor];
}

/// Largest factor that is tried, in both directions.
const MAX_FACTOR: f64 = 10.0;
/// Steps up to [`MAX_FACTOR`].
const STEPS: u32 = 4;
/// Bisections between two steps: to 2 %.
const BISECTIONS: u32 = 5;

/// Compares the best nodes of all arrangements.
pub(super) fn compare(compiled: &CompiledRental<'_>, all: &[(Arrangement, BestNodes)]) -> NodesComparison {
    let rivals: Vec<ArrangementEvaluation> =
        all.iter().map(|(name, best)| compiled.evaluation(*name, best)).collect();
    let best = rivals.iter().filter(|rival| rival.feasible).min_by(|a, b| a.order(b));
    let name = best.map(|rival| rival.name);
    NodesComparison {
        pays: name.is_some_and(Arrangement::is_remote),
        sentence: summary_sentence(&rivals, best),
        best: name,
        flips: name.map(|name| compiled.flips(name.is_remote())).unwrap_or_default(),
        rivals,
    }
}

/// Describes the result of the comparison.
fn summary_sentence(rivals: &[ArrangementEvaluation], best: Option<&ArrangementEvaluation>) -> String {
    let Some(best) = best else {
        return "No nodes on this list meet the limits; raise the limits, or list other nodes.".to_owned();
    };
    let cost = |rival: &ArrangementEvaluation| dollars(rival.dollars());
    let pays = best.name.is_remote();
    let other = rivals.iter().filter(|rival| rival.name.is_remote() != pays && rival.feasible);
    let other = other.min_by(|a, b| a.order(b));
    let place = node_list(&best.nodes);
    match (pays, other) {
        (true, Some(other)) => format!(
            "Remote experts pay: {place} for {} per hour, {} the next best, {} ({}).",
            cost(best),
            price_difference(best, other),
            other.name.meaning(),
            cost(other),
        ),
        (true, None) => format!(
            "Remote experts pay: {place} for {} per hour; nothing else on this list meets the limits.",
            cost(best)
        ),
        (false, Some(other)) => format!(
            "Remote experts do not pay: {} ({place}) at {} per hour, {} {} ({}).",
            best.name.meaning(),
            cost(best),
            price_difference(best, other),
            other.name.meaning(),
            cost(other),
        ),
        (false, None) => format!(
            "Remote experts do not pay: {} ({place}) at {} per hour; no plan with them meets the limits.",
            best.name.meaning(),
            cost(best),
        ),
    }
}

/// Describes the price of `best` compared with `other`, such as `39 % less than`.
fn price_difference(best: &ArrangementEvaluation, other: &ArrangementEvaluation) -> String {
    match 100.0 * (1.0 - best.dollars() / other.dollars()) {
        same if same < 0.05 => "as much as but faster than".to_owned(),
        little if little < 0.95 => format!("{little:.1} % less than"),
        less => format!("{less:.0} % less than"),
    }
}

/// Formats a list of nodes, such as `1 x a with 3 x b`.
pub(super) fn node_list(nodes: &[RentedNodes]) -> String {
    let nodes: Vec<String> = nodes.iter().map(|node| format!("{} x {}", node.count, node.shape)).collect();
    match nodes.split_first() {
        None => String::new(),
        Some((main, [])) => main.clone(),
        Some((main, others)) => format!("{main} with {}", others.join(" and ")),
    }
}

impl CompiledRental<'_> {
    /// Evaluates the arrangement `name` on its best nodes.
    pub(super) fn evaluation(&self, name: Arrangement, best: &BestNodes) -> ArrangementEvaluation {
        let Some(found) = &best.found else {
            return ArrangementEvaluation {
                name,
                feasible: false,
                dollars_per_hour: None,
                dollars_per_million_tokens: None,
                why: self.why_not(&best.infeasibility),
                broken: self.broken_limit(&best.infeasibility),
                nodes: Vec::new(),
                expected: None,
                layout: None,
            };
        };
        let (nodes, expected) = (self.rented(found, name), self.expected(found));
        ArrangementEvaluation {
            name,
            feasible: true,
            dollars_per_hour: Some(found.dollars),
            dollars_per_million_tokens: Some(
                found.per_hour / 3600.0 / expected.full_load_tokens_per_second * 1e6,
            ),
            why: node_list(&nodes),
            broken: None,
            nodes,
            expected: Some(expected),
            layout: Some(self.layout(found, name)),
        }
    }

    fn broken_limit(&self, infeasibility: &Infeasibility) -> Option<BrokenLimit> {
        let (limit, shape, value, allowed) = match infeasibility {
            Infeasibility::Absent(_) | Infeasibility::Count => return None,
            Infeasibility::Memory { shape, what, needed, usable } => (what, shape, needed, usable),
            Infeasibility::Slow { shape, limit, value, allowed } => (limit, shape, value, allowed),
        };
        let shape = self.shapes[*shape].node.name.clone();
        Some(BrokenLimit { limit, shape, value: *value, allowed: *allowed })
    }

    fn why_not(&self, infeasibility: &Infeasibility) -> String {
        let name = |shape: usize| &self.shapes[shape].node.name;
        match infeasibility {
            Infeasibility::Absent(why) => (*why).to_owned(),
            Infeasibility::Count => "the list allows too few nodes (max)".to_owned(),
            Infeasibility::Memory { shape, what, needed, usable } => {
                let (needed, usable) = distinct_amounts("main", *needed, *usable);
                format!("{what}: needs {needed}, {} has {usable} after its reserve", name(*shape))
            }
            Infeasibility::Slow { shape, limit, value, allowed } => {
                let (value, allowed) = distinct_amounts(limit, *value, *allowed);
                format!("{}: at least {value} (on {}), limit {allowed}", limit_name(limit), name(*shape))
            }
        }
    }

    /// Returns the cheapest arrangement under the present variation.
    ///
    /// If arrangements with remote functions are the cheapest, returns any of them: that is enough to know that they pay.
    fn cheapest(&self) -> Option<Arrangement> {
        let without_remote =
            Arrangement::ALL.into_iter().filter(|name| !name.is_remote()).filter_map(|name| {
                let found = self.best(name, f64::INFINITY, false).found?;
                Some((found.dollars, name))
            });
        let without_remote = without_remote.min_by(|a, b| a.0.total_cmp(&b.0));
        let bound = without_remote.map_or(f64::INFINITY, |(dollars, _)| dollars);
        let mut remote = Arrangement::ALL.into_iter().filter(|name| name.is_remote());
        let pays = remote.find(|name| self.best(*name, bound, true).bound() < bound);
        pays.or(without_remote.map(|(_, name)| name))
    }

    /// Searches the smallest flips of `pays`. Each search compiles the rental again, since caches are not shared by threads.
    fn flips(&self, pays: bool) -> Vec<NodesFlip> {
        let rental = self.rental;
        let with_rate =
            |cause: &NodesFlipFigure| *cause != NodesFlipFigure::RequestRateFactor || self.arrivals.is_some();
        let causes = NodesFlipFigure::ALL.into_iter().filter(with_rate);
        let searches = causes.flat_map(|cause| [(cause, 1.0), (cause, -1.0)]).collect();
        let found = on_threads(searches, |(cause, direction)| {
            Some((cause, CompiledRental::new(rental).flip(cause, direction, pays)?))
        });
        let flip = |(cause, (factor, best)): (NodesFlipFigure, (f64, Arrangement))| {
            let now = if cause == NodesFlipFigure::TpotSeconds { self.variation.tpot } else { 1.0 };
            let at = now * factor;
            NodesFlip { cause, now, at, best, sentence: describe_flip(cause, at, best) }
        };
        found.into_iter().flatten().map(flip).collect()
    }

    /// Returns the flipping factor nearest to 1 in one direction, and the cheapest arrangement there.
    fn flip(&self, cause: NodesFlipFigure, direction: f64, pays: bool) -> Option<(f64, Arrangement)> {
        let cheapest_at = |exponent: f64| {
            let factor = MAX_FACTOR.powf(direction * exponent);
            let best = self.with_changed_input(cause, factor).cheapest()?;
            Some((factor, best))
        };
        let mut near = 0.0;
        for step in 1..=STEPS {
            let far = f64::from(step) / f64::from(STEPS);
            // Ends the search if no arrangement keeps the limits.
            let (factor, best) = cheapest_at(far)?;
            if best.is_remote() == pays {
                near = far;
                continue;
            }
            let (mut flip, mut far) = ((factor, best), far);
            for _ in 0..BISECTIONS {
                let middle = f64::midpoint(near, far);
                match cheapest_at(middle) {
                    Some((factor, best)) if best.is_remote() != pays => {
                        (flip, far) = ((factor, best), middle)
                    }
                    _ => near = middle,
                }
            }
            return Some(flip);
        }
        None
    }

    /// Returns the rental compiled with the figure `factor` times as large.
    fn with_changed_input(&self, cause: NodesFlipFigure, factor: f64) -> Self {
        let now = self.variation;
        let variation = match cause {
            NodesFlipFigure::TpotSeconds => Variation { tpot: now.tpot * factor, ..now },
            NodesFlipFigure::GpuPriceFactor => Variation { gpu_price: factor, ..now },
            NodesFlipFigure::ModelSizeFactor => Variation { model_size: factor, ..now },
            NodesFlipFigure::RequestRateFactor => Variation { arrival_rate: factor, ..now },
        };
        self.with(variation)
    }
}

fn describe_flip(cause: NodesFlipFigure, at: f64, best: Arrangement) -> String {
    let change = match cause {
        NodesFlipFigure::TpotSeconds => format!("with a TPOT limit of {}", amount("tpot", at)),
        NodesFlipFigure::GpuPriceFactor => format!("with GPU nodes at {at:.2} times their price"),
        NodesFlipFigure::ModelSizeFactor => format!("with a model of {at:.2} times the size"),
        NodesFlipFigure::RequestRateFactor => format!("with {at:.2} times the requests"),
    };
    match best.is_remote() {
        true => format!("{change}, remote experts pay"),
        false => format!("{change}, the cheapest is {}", best.meaning()),
    }
}
