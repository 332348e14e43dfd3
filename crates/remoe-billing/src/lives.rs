//! Lives of a deployment's functions: derives events for the ledger and present costs from observations of what runs.

use crate::money::Rate;
use crate::record::FunctionEvent;
use crate::share::Basis;
use std::collections::{BTreeMap, BTreeSet};

/// Function that is observed alive. Times are nanoseconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PresentFunction {
    /// `main`, or the name of its group.
    pub tier: String,
    /// Price of the function.
    pub rate: Rate,
    /// Billing basis.
    pub basis: Basis,
    /// Memory limit in bytes.
    pub memory_bytes: u64,
    /// Time of its start.
    pub started: u64,
    /// Time at which it began to serve, if it did.
    pub serving: Option<u64>,
    /// Time from which others serve in its place, if they do.
    pub replaced: Option<u64>,
}

/// Event in the life of a function, as a ledger records it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LifeChange {
    /// Nanoseconds since 1970.
    pub at: u64,
    /// Name of the function.
    pub function: String,
    /// The event.
    pub event: FunctionEvent,
}

/// Price and memory of the living functions of one tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierCharge {
    /// Name of the tier.
    pub tier: String,
    /// Price of all of them together.
    pub rate: Rate,
    /// Memory of all of them together, in bytes.
    pub memory_bytes: u64,
}

/// Functions of one deployment as of the last observation.
#[derive(Debug, Default)]
pub struct FunctionLives {
    alive: BTreeMap<String, PresentFunction>,
    /// All tiers so far. A tier without living functions costs nothing.
    tiers: BTreeSet<String>,
}

impl FunctionLives {
    /// Takes the functions that are alive at `at`, by unique names. Returns the events since the last observation,
    /// each once. A function that is missing now stopped at `at`.
    pub fn observe(&mut self, at: u64, present: BTreeMap<String, PresentFunction>) -> Vec<LifeChange> {
        let mut changes = Vec::new();
        let mut before = std::mem::take(&mut self.alive);
        for (name, mut function) in present {
            let mut change = |at, event| changes.push(LifeChange { at, function: name.clone(), event });
            let known = before.remove(&name);
            if known.is_none() {
                let PresentFunction { tier, rate, basis, .. } = function.clone();
                change(function.started, FunctionEvent::Started { tier, rate, basis });
            }
            let (served, replaced) = known.map_or((None, None), |known| (known.serving, known.replaced));
            if let (None, Some(at)) = (served, function.serving) {
                change(at, FunctionEvent::Serving);
            }
            if let (None, Some(at)) = (replaced, function.replaced) {
                change(at, FunctionEvent::Replaced);
            }
            function.serving = served.or(function.serving);
            function.replaced = replaced.or(function.replaced);
            self.tiers.insert(function.tier.clone());
            self.alive.insert(name, function);
        }
        changes.extend(before.into_keys().map(|function| LifeChange {
            at,
            function,
            event: FunctionEvent::Stopped,
        }));
        changes
    }

    /// Returns the function `name` as it was last observed, with the times of its earlier events.
    pub fn get(&self, name: &str) -> Option<&PresentFunction> {
        self.alive.get(name)
    }

    /// Adds tiers that may get functions. They cost nothing until then.
    pub fn add_tiers(&mut self, tiers: impl IntoIterator<Item = String>) {
        self.tiers.extend(tiers);
    }

    /// Returns the present cost of every tier so far.
    pub fn charges(&self) -> Vec<TierCharge> {
        let charge = |tier: &String| {
            let of_tier = self.alive.values().filter(|function| function.tier == *tier);
            let (rate, memory_bytes) = of_tier.fold((0_u64, 0_u64), |(rate, memory), function| {
                (rate.saturating_add(function.rate.0), memory.saturating_add(function.memory_bytes))
            });
            TierCharge { tier: tier.clone(), rate: Rate(rate), memory_bytes }
        };
        self.tiers.iter().map(charge).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn function(tier: &str, serving: Option<u64>, replaced: Option<u64>) -> PresentFunction {
        PresentFunction {
            tier: tier.to_owned(),
            rate: Rate(7),
            basis: Basis::Alive,
            memory_bytes: 10,
            started: 5,
            serving,
            replaced,
        }
    }

    fn observe(
        lives: &mut FunctionLives,
        at: u64,
        present: &[(&str, PresentFunction)],
    ) -> Vec<(u64, String, FunctionEvent)> {
        let present = present.iter().map(|(name, function)| ((*name).to_owned(), function.clone()));
        let changes = lives.observe(at, present.collect());
        changes.into_iter().map(|LifeChange { at, function, event }| (at, function, event)).collect()
    }

    #[test]
    fn each_event_of_a_life_is_returned_once() {
        let mut lives = FunctionLives::default();
        let started = FunctionEvent::Started { tier: "main".to_owned(), rate: Rate(7), basis: Basis::Alive };
        let name = || "a".to_owned();
        let starts = function("main", None, None);
        assert_eq!(observe(&mut lives, 10, &[("a", starts.clone())]), [(5, name(), started)]);
        assert_eq!(observe(&mut lives, 11, &[("a", starts)]), []);
        let serves = function("main", Some(20), None);
        assert_eq!(observe(&mut lives, 21, &[("a", serves.clone())]), [(20, name(), FunctionEvent::Serving)]);
        // An event happens once: a draining function does not begin to serve again.
        assert_eq!(observe(&mut lives, 22, &[("a", function("main", None, None))]), []);
        assert_eq!(lives.get("a").unwrap().serving, Some(20));
        let replaced = function("main", Some(23), Some(24));
        assert_eq!(observe(&mut lives, 25, &[("a", replaced)]), [(24, name(), FunctionEvent::Replaced)]);
        assert_eq!(observe(&mut lives, 30, &[]), [(30, name(), FunctionEvent::Stopped)]);
        assert_eq!(observe(&mut lives, 31, &[]), []);
    }

    #[test]
    fn tier_without_functions_costs_nothing() {
        let mut lives = FunctionLives::default();
        lives.add_tiers(["group-1".to_owned()]);
        let remote = || function("group-0", None, None);
        observe(&mut lives, 1, &[("a", remote()), ("b", remote()), ("m", function("main", None, None))]);
        let charges = |lives: &FunctionLives| -> Vec<(String, u64, u64)> {
            let charges = lives.charges().into_iter();
            charges.map(|charge| (charge.tier, charge.rate.0, charge.memory_bytes)).collect()
        };
        let charge = |tier: &str, rate, memory| (tier.to_owned(), rate, memory);
        assert_eq!(
            charges(&lives),
            [charge("group-0", 14, 20), charge("group-1", 0, 0), charge("main", 7, 10)]
        );
        observe(
            &mut lives,
            2,
            &[("m", PresentFunction { rate: Rate(u64::MAX), ..function("main", None, None) })],
        );
        assert_eq!(
            charges(&lives),
            [charge("group-0", 0, 0), charge("group-1", 0, 0), charge("main", u64::MAX, 10)]
        );
    }
}
