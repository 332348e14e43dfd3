//! Writes down when the functions of a model start, serve and stop, and what they cost.

use super::rates::{Place, Tariff};
use remoe_billing::FunctionEvent;
use remoe_gateway_core::{Billing, Books};
use remoe_process::Role;
use remoe_rollout::{FunctionState, FunctionStatus, Status};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::watch;

/// Recorder of one model.
#[derive(Clone)]
pub(crate) struct CostRecorder {
    pub(crate) books: Arc<Books>,
    pub(crate) model: String,
    /// A name that no other run of `up` has.
    pub(crate) run: Arc<str>,
}

/// A function that was started.
struct Alive {
    place: Place,
    serves: bool,
    /// Others do its work, and it is still there.
    replaced: bool,
}

impl CostRecorder {
    /// The name of the process `pid` in the place `name`, which no other function ever has.
    fn function(&self, name: &str, pid: u32) -> String {
        format!("{}/{name}/{}-{pid}", self.model, self.run)
    }

    /// Follows `status` until there is none any more. What happens before there is a tariff is written down then.
    pub(crate) async fn follow(
        self,
        mut status: watch::Receiver<Status>,
        mut tariff: watch::Receiver<Option<Tariff>>,
    ) {
        let mut alive: BTreeMap<String, Alive> = BTreeMap::new();
        let mut before: Vec<(u64, Status)> = Vec::new();
        let mut tiers: BTreeSet<String> = loop {
            before.push((Books::now(), status.borrow_and_update().clone()));
            if let Some(tariff) = tariff.borrow_and_update().clone() {
                break self.begin(&tariff, std::mem::take(&mut before), &mut alive);
            }
            // Either may be gone for ever; then nothing was started that is worth an account.
            tokio::select! {
                changed = status.changed() => if changed.is_err() { return },
                changed = tariff.changed() => if changed.is_err() { return },
            }
        };
        loop {
            let ended = status.changed().await.is_err();
            let now = if ended { Status::default() } else { status.borrow_and_update().clone() };
            let known = tariff.borrow_and_update().clone().unwrap_or_default();
            // Another placement may have more of them.
            tiers.extend(known.tiers());
            self.look(Books::now(), &now, &known, &mut alive);
            self.show(&alive, &tiers);
            if ended {
                return;
            }
        }
    }

    fn begin(
        &self,
        tariff: &Tariff,
        before: Vec<(u64, Status)>,
        alive: &mut BTreeMap<String, Alive>,
    ) -> BTreeSet<String> {
        for (at, status) in before {
            self.look(at, &status, tariff, alive);
        }
        let tiers = tariff.tiers();
        self.show(alive, &tiers);
        tiers
    }

    fn look(&self, at: u64, status: &Status, tariff: &Tariff, alive: &mut BTreeMap<String, Alive>) {
        let mut present = BTreeSet::new();
        let serves = |function: &FunctionStatus| function.state == FunctionState::Serving;
        // Where the main function ends as well, as for a sleep, no other function has taken over.
        let goes_on = status.functions.iter().any(|function| function.role == Role::Main && serves(function));
        for function in &status.functions {
            let (Some(pid), Some(place)) = (function.pid, tariff.place(&function.name)) else { continue };
            let name = self.function(&function.name, pid);
            let event = |event| self.books.function(at, &self.model, &name, event);
            let known = alive.entry(name.clone()).or_insert_with(|| {
                let Place { tier, rate, basis, .. } = place.clone();
                event(FunctionEvent::Started { tier, rate, basis });
                Alive { place: place.clone(), serves: false, replaced: false }
            });
            if serves(function) && !known.serves {
                known.serves = true;
                event(FunctionEvent::Serving);
            }
            if known.serves && !known.replaced && function.state == FunctionState::Stopping && goes_on {
                known.replaced = true;
                event(FunctionEvent::Replaced);
            }
            present.insert(name);
        }
        alive.retain(|name, _| {
            let is_there = present.contains(name);
            if !is_there {
                self.books.function(at, &self.model, name, FunctionEvent::Stopped);
            }
            is_there
        });
    }

    /// Shows what an hour costs now.
    fn show(&self, alive: &BTreeMap<String, Alive>, tiers: &BTreeSet<String>) {
        for tier in tiers {
            let of_tier =
                || alive.values().filter(|alive| alive.place.tier == *tier).map(|alive| &alive.place);
            let (rate, memory) =
                (of_tier().map(|place| place.rate.0).sum(), of_tier().map(|place| place.memory_bytes).sum());
            self.books.costs_now(&self.model, tier, rate, memory);
        }
    }

    /// Returns the rates of the functions of `status`, by the names that the main function has for them.
    pub(crate) fn billing(&self, status: &Status, tariff: &Tariff) -> Arc<Billing> {
        let mut billing = Billing::default();
        let key = |function: &FunctionStatus| match function.role {
            Role::Main => Some("main".to_owned()),
            Role::Remote => function.grpc.map(|address| address.to_string()),
        };
        for function in &status.functions {
            let (Some(pid), Some(key)) = (function.pid, key(function)) else { continue };
            let Some(Place { tier, rate, .. }) = tariff.place(&function.name) else { continue };
            billing.rates.0.insert(key.clone(), *rate);
            billing.functions.insert(key, (self.function(&function.name, pid), tier.clone()));
        }
        Arc::new(billing)
    }
}
