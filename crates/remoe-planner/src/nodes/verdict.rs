//! Verdict on remote experts, in words, and the changes that would turn it.

use super::compiled::{Compiled, Setting};
use super::found::{Arrangement, BestNodes, Miss, cheaper_then_faster};
use super::{ExpectedTimes, NodesLayout, RentedNodes, on_threads};
use crate::words::{amount, apart, dollars, limit_name};
use serde::Serialize;
use std::cmp::Ordering;

/// Verdict on remote experts on the nodes of a list.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodesVerdict {
    /// An arrangement with remote experts is the cheapest that keeps the limits.
    pub pays: bool,
    /// The answer in plain words.
    pub sentence: String,
    /// The cheapest arrangement; absent where none keeps the limits.
    pub best: Option<Arrangement>,
    /// All of them.
    pub rivals: Vec<RivalNodes>,
    /// Changes that would make remote experts pay, or not pay any more.
    pub flips: Vec<Flip>,
}

/// One arrangement on the cheapest nodes that hold it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RivalNodes {
    /// Which.
    pub name: Arrangement,
    /// Set if nodes of the list hold it within the limits.
    pub feasible: bool,
    /// Dollars per hour of its nodes.
    pub dollars_per_hour: Option<f64>,
    /// Dollars of a million output tokens at full load.
    pub dollars_per_million_tokens: Option<f64>,
    /// Where, or which limit fails by how much.
    pub why: String,
    /// The limit that fails at the shape that comes closest, where it is a matter of an amount.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub broken: Option<BrokenLimit>,
    /// Nodes of the arrangement.
    pub nodes: Vec<RentedNodes>,
    /// Expected times.
    pub expected: Option<ExpectedTimes>,
    /// Layout of the functions on its nodes.
    pub layout: Option<NodesLayout>,
}

impl RivalNodes {
    /// Dollars per hour; infinite where it is not feasible.
    fn dollars(&self) -> f64 {
        self.dollars_per_hour.unwrap_or(f64::INFINITY)
    }

    /// Compares by price, and of equal prices (1e-9 relative) by the time per output token, then to the first.
    #[must_use]
    pub fn order(&self, other: &Self) -> Ordering {
        let of = |rival: &Self| {
            let none = (f64::INFINITY, f64::INFINITY);
            let (tpot, ttft) = rival.expected.map_or(none, |times| (times.tpot_seconds, times.ttft_seconds));
            (rival.dollars(), tpot, ttft)
        };
        cheaper_then_faster(of(self), of(other))
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
    /// Value that would be needed.
    pub value: f64,
    /// Value that there is.
    pub allowed: f64,
}

/// A change that turns the verdict.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Flip {
    /// Figure that is changed.
    pub cause: FlipCause,
    /// Value now.
    pub now: f64,
    /// The value nearest to it at which the verdict is the other one.
    pub at: f64,
    /// The cheapest arrangement there.
    pub best: Arrangement,
    /// The change in words.
    pub sentence: String,
}

/// Figure whose change turns a verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FlipCause {
    /// The limit of the time per output token, in seconds.
    TpotSeconds,
    /// The prices of nodes with GPUs, as a factor.
    GpuPriceFactor,
    /// The bytes of all weights and the time that they take, as a factor.
    ModelSizeFactor,
    /// The rate of requests, as a factor; only where they have a rate.
    RequestRateFactor,
}

impl FlipCause {
    const ALL: [Self; 4] =
        [Self::TpotSeconds, Self::GpuPriceFactor, Self::ModelSizeFactor, Self::RequestRateFactor];
}

/// Changes up to this factor are looked at, in both directions.
const FARTHEST: f64 = 10.0;
/// Steps to there.
const STEPS: u32 = 4;
/// Halvings between two of them: to 2 %.
const HALVINGS: u32 = 5;

pub(super) fn verdict(compiled: &Compiled<'_>, all: &[(Arrangement, BestNodes)]) -> NodesVerdict {
    let rivals: Vec<RivalNodes> = all.iter().map(|(name, best)| compiled.rival(*name, best)).collect();
    let best = rivals.iter().filter(|rival| rival.feasible).min_by(|a, b| a.order(b));
    let name = best.map(|rival| rival.name);
    NodesVerdict {
        pays: name.is_some_and(Arrangement::is_remote),
        sentence: sentence(&rivals, best),
        best: name,
        flips: name.map(|name| compiled.flips(name.is_remote())).unwrap_or_default(),
        rivals,
    }
}

fn sentence(rivals: &[RivalNodes], best: Option<&RivalNodes>) -> String {
    let Some(best) = best else {
        return "No nodes on this list meet the limits; raise the limits, or list other nodes.".to_owned();
    };
    let cost = |rival: &RivalNodes| dollars(rival.dollars());
    let pays = best.name.is_remote();
    let other = rivals.iter().filter(|rival| rival.name.is_remote() != pays && rival.feasible);
    let other = other.min_by(|a, b| a.order(b));
    let place = place(&best.nodes);
    match (pays, other) {
        (true, Some(other)) => format!(
            "Remote experts pay: {place} for {} per hour, {} the next best, {} ({}).",
            cost(best),
            compared(best, other),
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
            compared(best, other),
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

/// How `best` compares in price with `other`, such as `39 % less than`. Of equal prices the faster one is the best.
fn compared(best: &RivalNodes, other: &RivalNodes) -> String {
    match 100.0 * (1.0 - best.dollars() / other.dollars()) {
        same if same < 0.05 => "as much as but faster than".to_owned(),
        little if little < 0.95 => format!("{little:.1} % less than"),
        less => format!("{less:.0} % less than"),
    }
}

/// `1 x a with 3 x b`.
pub(super) fn place(nodes: &[RentedNodes]) -> String {
    let nodes: Vec<String> = nodes.iter().map(|node| format!("{} x {}", node.count, node.shape)).collect();
    match nodes.split_first() {
        None => String::new(),
        Some((main, [])) => main.clone(),
        Some((main, others)) => format!("{main} with {}", others.join(" and ")),
    }
}

impl Compiled<'_> {
    pub(super) fn rival(&self, name: Arrangement, best: &BestNodes) -> RivalNodes {
        let Some(found) = &best.found else {
            return RivalNodes {
                name,
                feasible: false,
                dollars_per_hour: None,
                dollars_per_million_tokens: None,
                why: self.why_not(&best.miss),
                broken: self.broken(&best.miss),
                nodes: Vec::new(),
                expected: None,
                layout: None,
            };
        };
        let (nodes, expected) = (self.rented(found, name), self.expected(found));
        RivalNodes {
            name,
            feasible: true,
            dollars_per_hour: Some(found.dollars),
            dollars_per_million_tokens: Some(
                found.per_hour / 3600.0 / expected.full_load_tokens_per_second * 1e6,
            ),
            why: place(&nodes),
            broken: None,
            nodes,
            expected: Some(expected),
            layout: Some(self.layout(found, name)),
        }
    }

    fn broken(&self, miss: &Miss) -> Option<BrokenLimit> {
        let (limit, shape, value, allowed) = match miss {
            Miss::Absent(_) | Miss::Count => return None,
            Miss::Memory { shape, what, needed, usable } => (what, shape, needed, usable),
            Miss::Slow { shape, limit, value, allowed } => (limit, shape, value, allowed),
        };
        let shape = self.shapes[*shape].node.name.clone();
        Some(BrokenLimit { limit, shape, value: *value, allowed: *allowed })
    }

    fn why_not(&self, miss: &Miss) -> String {
        let name = |shape: usize| &self.shapes[shape].node.name;
        match miss {
            Miss::Absent(why) => (*why).to_owned(),
            Miss::Count => "the list allows too few nodes (max)".to_owned(),
            Miss::Memory { shape, what, needed, usable } => {
                let (needed, usable) = apart("main", *needed, *usable);
                format!("{what}: needs {needed}, {} has {usable} after its reserve", name(*shape))
            }
            Miss::Slow { shape, limit, value, allowed } => {
                let (value, allowed) = apart(limit, *value, *allowed);
                format!("{}: at least {value} (on {}), limit {allowed}", limit_name(limit), name(*shape))
            }
        }
    }

    /// The cheapest arrangement under the present setting; of those with remote functions any, since whether
    /// they pay does not depend on which of them is the cheapest.
    fn cheapest(&self) -> Option<Arrangement> {
        let whole = Arrangement::ALL.into_iter().filter(|name| !name.is_remote()).filter_map(|name| {
            let found = self.best(name, f64::INFINITY, false).found?;
            Some((found.dollars, name))
        });
        let whole = whole.min_by(|a, b| a.0.total_cmp(&b.0));
        let bound = whole.map_or(f64::INFINITY, |(dollars, _)| dollars);
        let mut remote = Arrangement::ALL.into_iter().filter(|name| name.is_remote());
        let pays = remote.find(|name| self.best(*name, bound, true).bound() < bound);
        pays.or(whole.map(|(_, name)| name))
    }

    /// The nearest changes that turn a verdict of `pays`. Each search starts from the rental: what searches remember is
    /// not shared between threads.
    fn flips(&self, pays: bool) -> Vec<Flip> {
        let rental = self.rental;
        let with_rate = |cause: &FlipCause| *cause != FlipCause::RequestRateFactor || self.arrivals.is_some();
        let causes = FlipCause::ALL.into_iter().filter(with_rate);
        let searches = causes.flat_map(|cause| [(cause, 1.0), (cause, -1.0)]).collect();
        let found = on_threads(searches, |(cause, direction)| {
            Some((cause, Compiled::new(rental).flip(cause, direction, pays)?))
        });
        let flip = |(cause, (factor, best)): (FlipCause, (f64, Arrangement))| {
            let now = if cause == FlipCause::TpotSeconds { self.setting.tpot } else { 1.0 };
            let at = now * factor;
            Flip { cause, now, at, best, sentence: words(cause, at, best) }
        };
        found.into_iter().flatten().map(flip).collect()
    }

    /// The factor in one direction that turns the verdict, nearest to 1, and what is the cheapest there.
    fn flip(&self, cause: FlipCause, direction: f64, pays: bool) -> Option<(f64, Arrangement)> {
        let turned = |exponent: f64| {
            let factor = FARTHEST.powf(direction * exponent);
            let best = self.under(cause, factor).cheapest()?;
            Some((factor, best))
        };
        let mut near = 0.0;
        for step in 1..=STEPS {
            let far = f64::from(step) / f64::from(STEPS);
            // Where nothing keeps the limits any more, there is no verdict either.
            let (factor, best) = turned(far)?;
            if best.is_remote() == pays {
                near = far;
                continue;
            }
            let (mut known, mut far) = ((factor, best), far);
            for _ in 0..HALVINGS {
                let middle = f64::midpoint(near, far);
                match turned(middle) {
                    Some((factor, best)) if best.is_remote() != pays => {
                        (known, far) = ((factor, best), middle)
                    }
                    _ => near = middle,
                }
            }
            return Some(known);
        }
        None
    }

    fn under(&self, cause: FlipCause, factor: f64) -> Self {
        let now = self.setting;
        let setting = match cause {
            FlipCause::TpotSeconds => Setting { tpot: now.tpot * factor, ..now },
            FlipCause::GpuPriceFactor => Setting { gpu_price: factor, ..now },
            FlipCause::ModelSizeFactor => Setting { size: factor, ..now },
            FlipCause::RequestRateFactor => Setting { rate: factor, ..now },
        };
        self.with(setting)
    }
}

fn words(cause: FlipCause, at: f64, best: Arrangement) -> String {
    let change = match cause {
        FlipCause::TpotSeconds => format!("with a TPOT limit of {}", amount("tpot", at)),
        FlipCause::GpuPriceFactor => format!("with GPU nodes at {at:.2} times their price"),
        FlipCause::ModelSizeFactor => format!("with a model of {at:.2} times the size"),
        FlipCause::RequestRateFactor => format!("with {at:.2} times the requests"),
    };
    match best.is_remote() {
        true => format!("{change}, remote experts pay"),
        false => format!("{change}, the cheapest is {}", best.meaning()),
    }
}
