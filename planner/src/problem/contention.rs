//! How functions of one machine slow each other down.

use crate::plan::Plan;
use crate::problem::model::Model;
use serde::{Deserialize, Serialize};

/// How many times longer experts take while several functions of one machine compute theirs: cores share the memory that
/// weights are read from. At least 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contention {
    /// Functions that computed at the same time when it was measured, two at least. Fewer slow each other down by their
    /// part of it, more by no more than it.
    pub functions: u32,
    /// In a decode step.
    pub step: f64,
    /// In a prefill.
    pub prefill: f64,
}

/// [`Contention`] among the functions of one layer; 1 where there is none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Slowed {
    pub(crate) step: f64,
    pub(crate) prefill: f64,
}

impl Slowed {
    pub(crate) const NOT: Self = Self { step: 1.0, prefill: 1.0 };
}

impl Contention {
    /// `measured` where so many functions compute at the same time.
    fn among(self, functions: u32, measured: f64) -> f64 {
        let others = |functions: u32| f64::from(functions.saturating_sub(1));
        1.0 + (measured - 1.0) * (others(functions) / others(self.functions)).min(1.0)
    }
}

impl Model<'_> {
    /// How functions of one layer slow each other down where so many groups of `replicas` each host its experts, and the
    /// main function has the rest of them where `local` says so.
    pub(crate) fn slowed(&self, replicas: impl Iterator<Item = u32>, local: bool) -> Slowed {
        let here = u32::from(local);
        let (groups, functions) =
            replicas.fold((0, 0), |(groups, functions), replicas| (groups + 1, functions + replicas));
        let contention =
            self.problem.contention.filter(|_| self.problem.shared_cores.is_some() && groups > 0);
        // A group's replicas share a prefill; of a decode step one of them has all.
        contention.map_or(Slowed::NOT, |contention| Slowed {
            step: contention.among(groups + here, contention.step),
            prefill: contention.among(functions + here, contention.prefill),
        })
    }

    /// The same of `layer` in `plan`, which has groups.
    pub(crate) fn slowed_in(&self, layer: usize, plan: &Plan) -> Slowed {
        let hosts = plan.groups.iter().filter(|group| !group.experts[layer].is_empty());
        let local = plan.layers[layer].remote.len() < self.layers[layer].experts;
        self.slowed(hosts.map(|group| group.replicas.max(1)), local)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_slow_each_other_down_up_to_as_many_as_were_measured() {
        let contention = Contention { functions: 4, step: 1.6, prefill: 1.0 };
        let step = |functions| contention.among(functions, contention.step);
        assert_eq!([1, 2, 4, 9].map(step).map(|factor| (10.0 * factor).round()), [10.0, 12.0, 16.0, 16.0]);
        assert_eq!(contention.among(4, contention.prefill), 1.0);
    }
}
