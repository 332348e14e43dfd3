//! Prices of the functions of a model.

use crate::deployment::DesiredDeployment;
use remoe_billing::{Basis, Rate};
use remoe_hardware::Profile;
use remoe_planner::{Billing, Pricing};
use std::collections::{BTreeMap, BTreeSet};

/// Memory step of functions in bytes, the default of plans.
const MEMORY_STEP_BYTES: f64 = 100e6;

fn round_up_to_step(bytes: f64) -> f64 {
    (bytes / MEMORY_STEP_BYTES).ceil().max(1.0) * MEMORY_STEP_BYTES
}

/// Prices of functions by slot.
#[derive(Debug, Clone, Default)]
pub struct FunctionPrices(BTreeMap<String, FunctionPricing>);

/// Price of one function.
#[derive(Debug, Clone, Default)]
pub(crate) struct FunctionPricing {
    /// `main`, or the function that it is a replica of: `group-0`, `layer-3`.
    pub(crate) tier: String,
    pub(crate) rate: Rate,
    pub(crate) basis: Basis,
    /// Memory limit of the function.
    pub(crate) memory_bytes: u64,
}

impl FunctionPrices {
    /// Returns the prices of the functions of `wanted`. With a plan, they follow from its sizes and prices; without
    /// one, from the smallest sufficient sizes at `pricing`.
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
                let bytes = round_up_to_step(runtime.main_bytes + weights + cache);
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
            let bytes = bytes.map_or_else(|| round_up_to_step(held), |bytes| bytes as f64);
            let vcpus = process.cpu_millis.map(|millis| millis as f64 / 1e3);
            let rate = Rate::per_second(pricing.function_rate(bytes, vcpus));
            let tier = process.function;
            places.insert(process.name, FunctionPricing { tier, rate, basis, memory_bytes: bytes as u64 });
        }
        Self(places)
    }

    /// Adds the prices of those `names` that only `before` has.
    pub(crate) fn with_prices_of<'a>(mut self, before: &Self, names: impl Iterator<Item = &'a str>) -> Self {
        for name in names {
            if let Some(place) = before.place(name) {
                self.0.entry(name.to_owned()).or_insert_with(|| place.clone());
            }
        }
        self
    }

    /// Returns the price of the slot `name`.
    pub(crate) fn place(&self, name: &str) -> Option<&FunctionPricing> {
        self.0.get(name)
    }

    /// Returns the dollars per hour if all functions work.
    pub fn hourly(&self) -> f64 {
        self.0.values().map(|place| place.rate.0 as f64 / 1e9).sum()
    }

    /// Returns all tiers.
    pub(crate) fn tiers(&self) -> BTreeSet<String> {
        self.0.values().map(|place| place.tier.clone()).collect()
    }
}
