//! Shared prior: the mean expert usage of tenants that opted in, for tenants without records of their own.
//!
//! A tenant contributes one mean per phase and no single request. Its contribution is removed when it opts out.

use crate::quality::ErrorComparison;
use crate::tenant::Tenant;
use remoe_predictor::{ByPhase, History, Phase, PredictError, UsageSample, UsageShares};
use std::collections::BTreeMap;

/// Largest number of contributing tenants.
const MAX_TENANTS: usize = 64;
/// Number of requests in a tenant's moving average, and largest weight of a tenant in the prior.
const WINDOW: f64 = 64.0;
/// Least number of requests behind a prior.
const MIN_REQUESTS: f64 = 4.0;

/// Contributions of tenants to the shared prior.
#[derive(Debug)]
pub(crate) struct SharedPrior {
    tenants: BTreeMap<Tenant, Contribution>,
    /// Errors of the trained predictor and of the prior for requests of contributing tenants.
    balance: ByPhase<ErrorComparison>,
}

impl Default for SharedPrior {
    fn default() -> Self {
        Self { tenants: BTreeMap::new(), balance: ByPhase::both(ErrorComparison::default()) }
    }
}

/// Moving average of one tenant's usage.
#[derive(Debug)]
struct Contribution {
    requests: f64,
    experts: usize,
    means: ByPhase<Vec<f32>>,
}

impl Contribution {
    fn add(&mut self, shares: ByPhase<&[f32]>) {
        self.requests = (self.requests + 1.0).min(WINDOW);
        let step = (1.0 / self.requests) as f32;
        for phase in Phase::ALL {
            let pairs = self.means.get_mut(phase).iter_mut().zip(*shares.get(phase));
            pairs.for_each(|(mean, share)| *mean += step * (share - *mean));
        }
    }
}

impl SharedPrior {
    /// Adds `tenant` as a contributor, starting with its `history`.
    pub(crate) fn add_contributor(&mut self, tenant: Tenant, history: Option<&History>) {
        if self.tenants.contains_key(&tenant) || self.tenants.len() >= MAX_TENANTS {
            return;
        }
        let (experts, cells) =
            history.map_or((0, 0), |history| (history.experts(), history.layers() * history.experts()));
        let means = ByPhase::both(vec![0.0; cells]);
        let mut contribution = Contribution { requests: 0.0, experts, means };
        if let Some(history) = history {
            for slot in history.slots() {
                contribution.add(ByPhase {
                    prefill: history.share_row(slot, Phase::Prefill),
                    decode: history.share_row(slot, Phase::Decode),
                });
            }
        }
        self.tenants.insert(tenant, contribution);
    }

    /// Removes `tenant` and its contribution.
    pub(crate) fn remove_contributor(&mut self, tenant: Tenant) {
        if self.tenants.remove(&tenant).is_some() && self.tenants.is_empty() {
            self.balance = ByPhase::both(ErrorComparison::default());
        }
    }

    /// Returns true if `tenant` contributes.
    pub(crate) fn has_contributor(&self, tenant: Tenant) -> bool {
        self.tenants.contains_key(&tenant)
    }

    /// Adds a request of `tenant`, if the tenant contributes. Without decode steps, the prefill's shares stand for
    /// them.
    pub(crate) fn record(&mut self, tenant: Tenant, experience: &UsageSample) {
        let Some(contribution) = self.tenants.get_mut(&tenant) else { return };
        let prefill = experience.prefill.values();
        if contribution.means.prefill.is_empty() {
            contribution.experts = experience.prefill.experts();
            contribution.means = ByPhase::both(vec![0.0; prefill.len()]);
        }
        let decode = experience.decode.as_ref().map_or(prefill, UsageShares::values);
        contribution.add(ByPhase { prefill, decode });
    }

    /// Records the errors of the trained predictor and of the prior without the tenant's own contribution, for a
    /// request of a contributing tenant.
    pub(crate) fn record_errors(
        &mut self,
        phase: Phase,
        trained: &UsageShares,
        prior: &UsageShares,
        truth: &UsageShares,
    ) {
        self.balance.get_mut(phase).record(trained, prior, truth);
    }

    /// Returns the weight of the prior against the trained predictor, from 0 to 1.
    pub(crate) fn weight(&self, phase: Phase) -> f64 {
        self.balance.get(phase).squared_error_weight()
    }

    /// Returns the mean usage of all contributors except `tenant`. Returns `None` if they have too few requests.
    ///
    /// # Errors
    /// The model has no experts.
    pub(crate) fn shares_for(&self, tenant: Tenant) -> Result<Option<ByPhase<UsageShares>>, PredictError> {
        let others =
            || self.tenants.iter().filter(|(id, _)| **id != tenant).map(|(_, contribution)| contribution);
        let requests: f64 = others().map(|contribution| contribution.requests).sum();
        let with_requests = || others().filter(|contribution| contribution.requests > 0.0);
        let Some(first) = with_requests().next().filter(|_| requests >= MIN_REQUESTS) else {
            return Ok(None);
        };
        ByPhase::try_each(|phase| {
            let mut sum = vec![0.0_f32; first.means.get(phase).len()];
            for contribution in with_requests() {
                let pairs = sum.iter_mut().zip(contribution.means.get(phase));
                pairs.for_each(|(sum, mean)| *sum += contribution.requests as f32 * mean);
            }
            UsageShares::from_weights(first.experts, sum)
        })
        .map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: Tenant = Tenant(7);

    fn experience(expert: usize) -> UsageSample {
        let mut weights = vec![0.0; 4];
        weights[expert] = 1.0;
        let prefill = UsageShares::from_weights(4, weights).unwrap();
        UsageSample { vector: vec![1.0], prefill, decode: None }
    }

    #[test]
    fn prior_without_enough_requests_is_unknown() {
        let (mut prior, tenant) = (SharedPrior::default(), Tenant::named("a"));
        prior.add_contributor(tenant, None);
        (0..3).for_each(|_| prior.record(tenant, &experience(1)));
        assert_eq!(prior.shares_for(NEW).unwrap(), None);
        prior.record(tenant, &experience(1));
        assert_eq!(prior.shares_for(NEW).unwrap().unwrap().decode.values(), [0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn removed_contributor_leaves_no_usage() {
        let (mut prior, a, b) = (SharedPrior::default(), Tenant::named("a"), Tenant::named("b"));
        prior.add_contributor(a, None);
        (0..8).for_each(|_| prior.record(a, &experience(1)));
        let alone = prior.shares_for(NEW).unwrap();
        prior.add_contributor(b, None);
        (0..8).for_each(|_| prior.record(b, &experience(2)));
        assert_eq!(prior.shares_for(NEW).unwrap().unwrap().prefill.values(), [0.0, 0.5, 0.5, 0.0]);
        prior.remove_contributor(b);
        assert_eq!(prior.shares_for(NEW).unwrap(), alone);
        prior.record(b, &experience(2));
        assert_eq!(prior.shares_for(NEW).unwrap(), alone, "it shares nothing");
    }

    #[test]
    fn busy_tenant_weighs_no_more_than_its_window() {
        let (mut prior, busy, other) = (SharedPrior::default(), Tenant::named("a"), Tenant::named("b"));
        [busy, other].into_iter().for_each(|tenant| prior.add_contributor(tenant, None));
        (0..10_000).for_each(|_| prior.record(busy, &experience(1)));
        (0..64).for_each(|_| prior.record(other, &experience(2)));
        assert!((prior.shares_for(NEW).unwrap().unwrap().prefill.values()[2] - 0.5).abs() < 1e-5);
    }
}
