//! Mean expert usage of the tenants that share theirs, for tenants without records of their own.
//!
//! A tenant contributes one mean per phase and nothing of single requests. Its mean goes as soon as it shares no more.

use crate::quality::Balance;
use crate::tenant::Tenant;
use remoe_predictor::{ByPhase, Experience, History, Phase, PredictError, Shares};
use std::collections::BTreeMap;

/// Tenants that contribute, at most: further ones do not.
const MOST_TENANTS: usize = 64;
/// A request weighs in its tenant's mean as one in so many, once there are as many. So does a tenant in the prior.
const WINDOW: f64 = 64.0;
/// Requests that a prior is made of, at least.
const LEAST_REQUESTS: f64 = 4.0;

/// Contributions by tenant.
#[derive(Debug)]
pub(crate) struct Prior {
    tenants: BTreeMap<Tenant, Contribution>,
    /// How near the trained predictor and the prior were about requests of tenants that share.
    balance: ByPhase<Balance>,
}

impl Default for Prior {
    fn default() -> Self {
        Self { tenants: BTreeMap::new(), balance: ByPhase::both(Balance::default()) }
    }
}

/// Mean usage of one tenant's requests, in which older ones weigh less.
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
            let pairs = self.means.of_mut(phase).iter_mut().zip(*shares.of(phase));
            pairs.for_each(|(mean, share)| *mean += step * (share - *mean));
        }
    }
}

impl Prior {
    /// `tenant` shares its usage from now on. What is remembered of it, its `past`, is the beginning.
    pub(crate) fn join(&mut self, tenant: Tenant, past: Option<&History>) {
        if self.tenants.contains_key(&tenant) || self.tenants.len() >= MOST_TENANTS {
            return;
        }
        let (experts, cells) = past.map_or((0, 0), |past| (past.experts(), past.layers() * past.experts()));
        let means = ByPhase::both(vec![0.0; cells]);
        let mut contribution = Contribution { requests: 0.0, experts, means };
        for (past, slot) in past.into_iter().flat_map(|past| past.slots().map(move |slot| (past, slot))) {
            contribution.add(ByPhase {
                prefill: past.share_row(slot, Phase::Prefill),
                decode: past.share_row(slot, Phase::Decode),
            });
        }
        self.tenants.insert(tenant, contribution);
    }

    /// `tenant` shares nothing, and nothing that it has shared stays.
    pub(crate) fn leave(&mut self, tenant: Tenant) {
        if self.tenants.remove(&tenant).is_some() && self.tenants.is_empty() {
            self.balance = ByPhase::both(Balance::default());
        }
    }

    /// Returns true if `tenant` shares its usage.
    pub(crate) fn is_shared_by(&self, tenant: Tenant) -> bool {
        self.tenants.contains_key(&tenant)
    }

    /// Takes in what a request of `tenant` used, where that one shares it. Without decode steps the prefill stands for them.
    pub(crate) fn note(&mut self, tenant: Tenant, experience: &Experience) {
        let Some(contribution) = self.tenants.get_mut(&tenant) else { return };
        let prefill = experience.prefill.values();
        if contribution.means.prefill.is_empty() {
            contribution.experts = experience.prefill.experts();
            contribution.means = ByPhase::both(vec![0.0; prefill.len()]);
        }
        let decode = experience.decode.as_ref().map_or(prefill, Shares::values);
        contribution.add(ByPhase { prefill, decode });
    }

    /// Compares the prediction of the trained predictor, and the prior without the tenant's own contribution, with what a
    /// request used whose tenant shares that.
    pub(crate) fn compare(&mut self, phase: Phase, trained: &Shares, prior: &Shares, truth: &Shares) {
        self.balance.of_mut(phase).note(trained, prior, truth);
    }

    /// Weight of the prior beside the trained predictor, from 0 to 1.
    pub(crate) fn weight(&self, phase: Phase) -> f64 {
        self.balance.of(phase).of_other_by_squares()
    }

    /// Mean usage of the tenants that share theirs, but for `tenant`; `None` where that is too little.
    ///
    /// # Errors
    /// The model has no experts.
    pub(crate) fn shares_for(&self, tenant: Tenant) -> Result<Option<ByPhase<Shares>>, PredictError> {
        let others = || self.tenants.iter().filter(|(of, _)| **of != tenant).map(|(_, one)| one);
        let requests: f64 = others().map(|one| one.requests).sum();
        let known = || others().filter(|one| one.requests > 0.0);
        let Some(first) = known().next().filter(|_| requests >= LEAST_REQUESTS) else { return Ok(None) };
        ByPhase::try_each(|phase| {
            let mut sum = vec![0.0_f32; first.means.of(phase).len()];
            for one in known() {
                let pairs = sum.iter_mut().zip(one.means.of(phase));
                pairs.for_each(|(sum, mean)| *sum += one.requests as f32 * mean);
            }
            Shares::from_weights(first.experts, sum)
        })
        .map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: Tenant = Tenant(7);

    fn experience(expert: usize) -> Experience {
        let mut weights = vec![0.0; 4];
        weights[expert] = 1.0;
        let prefill = Shares::from_weights(4, weights).unwrap();
        Experience { vector: vec![1.0], prefill, decode: None }
    }

    #[test]
    fn prior_without_enough_requests_is_unknown() {
        let (mut prior, tenant) = (Prior::default(), Tenant::named("a"));
        prior.join(tenant, None);
        (0..3).for_each(|_| prior.note(tenant, &experience(1)));
        assert_eq!(prior.shares_for(NEW).unwrap(), None);
        prior.note(tenant, &experience(1));
        assert_eq!(prior.shares_for(NEW).unwrap().unwrap().decode.values(), [0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn tenant_that_leaves_takes_its_usage_along() {
        let (mut prior, a, b) = (Prior::default(), Tenant::named("a"), Tenant::named("b"));
        prior.join(a, None);
        (0..8).for_each(|_| prior.note(a, &experience(1)));
        let alone = prior.shares_for(NEW).unwrap();
        prior.join(b, None);
        (0..8).for_each(|_| prior.note(b, &experience(2)));
        assert_eq!(prior.shares_for(NEW).unwrap().unwrap().prefill.values(), [0.0, 0.5, 0.5, 0.0]);
        prior.leave(b);
        assert_eq!(prior.shares_for(NEW).unwrap(), alone);
        prior.note(b, &experience(2));
        assert_eq!(prior.shares_for(NEW).unwrap(), alone, "it shares nothing");
    }

    #[test]
    fn busy_tenant_weighs_no_more_than_its_window() {
        let (mut prior, busy, other) = (Prior::default(), Tenant::named("a"), Tenant::named("b"));
        [busy, other].into_iter().for_each(|tenant| prior.join(tenant, None));
        (0..10_000).for_each(|_| prior.note(busy, &experience(1)));
        (0..64).for_each(|_| prior.note(other, &experience(2)));
        assert!((prior.shares_for(NEW).unwrap().unwrap().prefill.values()[2] - 0.5).abs() < 1e-5);
    }
}
