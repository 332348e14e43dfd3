//! Lives of a deployment's functions: what is there becomes events for the ledger, and charges of tiers.

use crate::money::Rate;
use crate::record::FunctionEvent;
use crate::share::Basis;
use std::collections::{BTreeMap, BTreeSet};

/// Function that is there and paid for. Times are nanoseconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PresentFunction {
    /// `main`, or the name of its group.
    pub tier: String,
    /// Cost while it is alive.
    pub rate: Rate,
    /// Time that is paid for.
    pub basis: Basis,
    /// Memory that it is given, in bytes.
    pub memory_bytes: u64,
    /// Start.
    pub started: u64,
    /// Time at which it began to serve, if it did.
    pub serving: Option<u64>,
    /// Time from which others do its work, if they do.
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

/// Cost and memory of the functions of one tier that are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierCharge {
    /// Name of the tier.
    pub tier: String,
    /// Cost of all of them.
    pub rate: Rate,
    /// Memory of all of them, in bytes.
    pub memory_bytes: u64,
}

/// Functions of one deployment, from one observation to the next.
#[derive(Debug, Default)]
pub struct Lives {
    alive: BTreeMap<String, PresentFunction>,
    /// All tiers that there ever were: one that ended costs nothing now.
    tiers: BTreeSet<String>,
}

impl Lives {
    /// Takes the functions that are there at `at`, by names that no other function ever has. Returns what changed since
    /// the last time: a function that is no longer among them stopped at `at`. Each event is returned once.
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

    /// Returns the function `name` as it was last observed, with all that ever happened to it.
    pub fn get(&self, name: &str) -> Option<&PresentFunction> {
        self.alive.get(name)
    }

    /// Adds tiers that may have functions: they cost nothing until one is there.
    pub fn add_tiers(&mut self, tiers: impl IntoIterator<Item = String>) {
        self.tiers.extend(tiers);
    }

    /// Returns the present cost of every tier that there ever was.
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
        lives: &mut Lives,
        at: u64,
        present: &[(&str, PresentFunction)],
    ) -> Vec<(u64, String, FunctionEvent)> {
        let present = present.iter().map(|(name, function)| ((*name).to_owned(), function.clone()));
        let changes = lives.observe(at, present.collect());
        changes.into_iter().map(|LifeChange { at, function, event }| (at, function, event)).collect()
    }

    #[test]
    fn each_event_of_a_life_is_returned_once() {
        let mut lives = Lives::default();
        let started = FunctionEvent::Started { tier: "main".to_owned(), rate: Rate(7), basis: Basis::Alive };
        let name = || "a".to_owned();
        let starts = function("main", None, None);
        assert_eq!(observe(&mut lives, 10, &[("a", starts.clone())]), [(5, name(), started)]);
        assert_eq!(observe(&mut lives, 11, &[("a", starts)]), []);
        let serves = function("main", Some(20), None);
        assert_eq!(observe(&mut lives, 21, &[("a", serves.clone())]), [(20, name(), FunctionEvent::Serving)]);
        // What once happened stays: it does not serve again after it drains.
        assert_eq!(observe(&mut lives, 22, &[("a", function("main", None, None))]), []);
        assert_eq!(lives.get("a").unwrap().serving, Some(20));
        let replaced = function("main", Some(23), Some(24));
        assert_eq!(observe(&mut lives, 25, &[("a", replaced)]), [(24, name(), FunctionEvent::Replaced)]);
        assert_eq!(observe(&mut lives, 30, &[]), [(30, name(), FunctionEvent::Stopped)]);
        assert_eq!(observe(&mut lives, 31, &[]), []);
    }

    #[test]
    fn tier_without_functions_costs_nothing() {
        let mut lives = Lives::default();
        lives.add_tiers(["group-1".to_owned()]);
        let remote = || function("group-0", None, None);
        observe(&mut lives, 1, &[("a", remote()), ("b", remote()), ("m", function("main", None, None))]);
        let charges = |lives: &Lives| -> Vec<(String, u64, u64)> {
            let charges = lives.charges().into_iter();
            charges.map(|charge| (charge.tier, charge.rate.0, charge.memory_bytes)).collect()
        };
        let of = |tier: &str, rate, memory| (tier.to_owned(), rate, memory);
        assert_eq!(charges(&lives), [of("group-0", 14, 20), of("group-1", 0, 0), of("main", 7, 10)]);
        observe(
            &mut lives,
            2,
            &[("m", PresentFunction { rate: Rate(u64::MAX), ..function("main", None, None) })],
        );
        assert_eq!(charges(&lives), [of("group-0", 0, 0), of("group-1", 0, 0), of("main", u64::MAX, 10)]);
    }
}
