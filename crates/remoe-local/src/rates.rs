//! Rates of the functions of a model while they are alive.

use crate::deployment::DesiredDeployment;
use remoe_billing::{Basis, Rate};
use remoe_hardware::Profile;
use remoe_planner::{Billing, Pricing};
use std::collections::{BTreeMap, BTreeSet};

/// Sizes in which memory is sold, as plans have them by default.
const STEP: f64 = 100e6;

fn sold(bytes: f64) -> f64 {
    (bytes / STEP).ceil().max(1.0) * STEP
}

/// Rates by the places of functions.
#[derive(Debug, Clone, Default)]
pub struct FunctionPrices(BTreeMap<String, FunctionPricing>);

/// A function's place.
#[derive(Debug, Clone, Default)]
pub(crate) struct FunctionPricing {
    /// `main`, or the function that it is a replica of: `group-0`, `layer-3`.
    pub(crate) tier: String,
    pub(crate) rate: Rate,
    pub(crate) basis: Basis,
    /// Memory that it is given.
    pub(crate) memory_bytes: u64,
}

impl FunctionPrices {
    /// Rates of the functions of `wanted`: of the sizes that its plan gives them at the plan's prices, or without
    /// a plan of the smallest sizes that hold them at `pricing`.
    pub fn of(wanted: &DesiredDeployment, pricing: &Pricing) -> Self {
        let model = &wanted.inspection;
        let dtype = wanted.dtype();
        let expert = model.resident_expert_bytes(dtype) as f64;
        let runtime = Profile::memory_prior(model, dtype);
        let planned = wanted.account.as_ref();
        let pricing = planned.map_or(pricing, |account| account.pricing());
        let remote = wanted.placement.remote();
        let remote: usize = remote.iter().map(|layer| layer.experts.len()).sum();
        let (main, main_bytes) = planned.map_or_else(
            || {
                let local = (model.moe_layers.len() * model.experts).saturating_sub(remote) as f64;
                let cache = wanted.options.kv_cache_bytes.unwrap_or(0) as f64;
                let weights = model.resident_non_expert_bytes(dtype) as f64 + local * expert;
                let bytes = sold(runtime.main_bytes + weights + cache);
                (pricing.function_rate(bytes, None), bytes)
            },
            |account| (account.main_per_second(), account.main_size().memory_bytes),
        );
        let place = FunctionPricing {
            tier: "main".to_owned(),
            rate: Rate::per_second(main),
            basis: Basis::Alive,
            memory_bytes: main_bytes as u64,
        };
        let mut places = BTreeMap::from([("main".to_owned(), place)]);
        let basis = if pricing.billing == Billing::Reserved { Basis::Alive } else { Basis::Work };
        for process in wanted.placement.processes() {
            let hosted: usize = process.hosted.iter().map(|layer| layer.experts.len()).sum();
            let bytes = process.memory_bytes.or(wanted.options.remote_memory_bytes);
            let held = runtime.function_bytes + hosted as f64 * expert;
            let bytes = bytes.map_or_else(|| sold(held), |bytes| bytes as f64);
            let vcpus = process.cpu_millis.map(|millis| millis as f64 / 1e3);
            let rate = Rate::per_second(pricing.function_rate(bytes, vcpus));
            let tier = process.function;
            places.insert(process.name, FunctionPricing { tier, rate, basis, memory_bytes: bytes as u64 });
        }
        Self(places)
    }

    /// These rates, and those of `before` for `names` that are only there.
    pub(crate) fn beside<'a>(mut self, before: &Self, names: impl Iterator<Item = &'a str>) -> Self {
        for name in names {
            if let Some(place) = before.place(name) {
                self.0.entry(name.to_owned()).or_insert_with(|| place.clone());
            }
        }
        self
    }

    /// The place called `name`.
    pub(crate) fn place(&self, name: &str) -> Option<&FunctionPricing> {
        self.0.get(name)
    }

    /// Dollars of an hour in which all functions work.
    pub fn hourly(&self) -> f64 {
        self.0.values().map(|place| place.rate.0 as f64 / 1e9).sum()
    }

    /// All tiers.
    pub(crate) fn tiers(&self) -> BTreeSet<String> {
        self.0.values().map(|place| place.tier.clone()).collect()
    }
}
