//! Records when the functions of a model start, serve and stop, and what they cost.

use crate::rates::{FunctionPrices, FunctionPricing};
use remoe_billing::{FunctionLives, PresentFunction};
use remoe_gateway_core::{Billing, CostAccounting};
use remoe_process::Role;
use remoe_rollout::{FunctionState, FunctionStatus, Status};
use std::sync::Arc;
use tokio::sync::watch;

/// Cost recorder of one model.
#[derive(Clone)]
pub struct CostRecorder {
    /// Ledger.
    pub cost_accounting: Arc<CostAccounting>,
    /// Name of the model.
    pub model: String,
    /// Unique name of this run of `up`.
    pub run: Arc<str>,
}

impl CostRecorder {
    /// Returns the unique name of the process `pid` in the slot `name`.
    fn function(&self, name: &str, pid: u32) -> String {
        format!("{}/{name}/{}-{pid}", self.model, self.run)
    }

    /// Records changes of `status` until its sender is dropped. Changes before the first price list are recorded when
    /// it arrives.
    pub async fn follow(
        self,
        mut status: watch::Receiver<Status>,
        mut function_prices: watch::Receiver<Option<FunctionPrices>>,
    ) {
        let mut lives = FunctionLives::default();
        let mut earlier: Vec<(u64, Status)> = Vec::new();
        loop {
            earlier.push((CostAccounting::now(), status.borrow_and_update().clone()));
            if let Some(function_prices) = function_prices.borrow_and_update().clone() {
                earlier
                    .iter()
                    .for_each(|(at, status)| self.record_status(*at, status, &function_prices, &mut lives));
                break;
            }
            // If a sender was dropped before that, nothing was started that needs recording.
            tokio::select! {
                changed = status.changed() => if changed.is_err() { return },
                changed = function_prices.changed() => if changed.is_err() { return },
            }
        }
        loop {
            let ended = status.changed().await.is_err();
            let now = if ended { Status::default() } else { status.borrow_and_update().clone() };
            let known = function_prices.borrow_and_update().clone().unwrap_or_default();
            self.record_status(CostAccounting::now(), &now, &known, &mut lives);
            if ended {
                return;
            }
        }
    }

    fn record_status(
        &self,
        at: u64,
        status: &Status,
        function_prices: &FunctionPrices,
        lives: &mut FunctionLives,
    ) {
        // Another placement may have more functions.
        lives.add_tiers(function_prices.tiers());
        let serves = |function: &FunctionStatus| function.state == FunctionState::Serving;
        // If the main function ends as well, as for a sleep, no other function has taken over.
        let main_continues =
            status.functions.iter().any(|function| function.role == Role::Main && serves(function));
        let present = |function: &FunctionStatus| {
            let (pid, place) = (function.pid?, function_prices.place(&function.name)?);
            let name = self.function(&function.name, pid);
            // The price at its start applies for its lifetime.
            let known = lives.get(&name).cloned().unwrap_or_else(|| {
                let FunctionPricing { tier, rate, basis, memory_bytes } = place.clone();
                PresentFunction {
                    tier,
                    rate,
                    basis,
                    memory_bytes,
                    started: at,
                    serving: None,
                    replaced: None,
                }
            });
            let serving = known.serving.or_else(|| serves(function).then_some(at));
            let leaves = serving.is_some() && function.state == FunctionState::Stopping && main_continues;
            let replaced = known.replaced.or_else(|| leaves.then_some(at));
            Some((name, PresentFunction { serving, replaced, ..known }))
        };
        let present = status.functions.iter().filter_map(present).collect();
        let changes = lives.observe(at, present);
        self.cost_accounting.record_life_changes(&self.model, changes, lives);
    }

    /// Returns the rates of the functions of `status`, by their names in the main function.
    pub(crate) fn billing(&self, status: &Status, function_prices: &FunctionPrices) -> Arc<Billing> {
        let mut billing = Billing::default();
        let key = |function: &FunctionStatus| match function.role {
            Role::Main => Some("main".to_owned()),
            Role::Remote => function.grpc.map(|address| address.to_string()),
        };
        for function in &status.functions {
            let (Some(pid), Some(key)) = (function.pid, key(function)) else { continue };
            let Some(FunctionPricing { tier, rate, .. }) = function_prices.place(&function.name) else {
                continue;
            };
            billing.rates.0.insert(key.clone(), *rate);
            billing.functions.insert(key, (self.function(&function.name, pid), tier.clone()));
        }
        Arc::new(billing)
    }
}
