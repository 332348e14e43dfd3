//! Lengths of answers, by tenant: no tenant's answers are used for another's.

use crate::tenant::Tenant;
use std::collections::HashMap;

/// A tenant's answer weighs in its mean as one in so many, once there are as many.
const WINDOW: f64 = 35.0;
/// Tenants whose answers are known, at most; the others' are as long as answers are where nothing is known.
const MOST_TENANTS: usize = 1024;

/// Mean decode steps of each tenant's answers, in which older ones weigh less.
#[derive(Debug)]
pub(crate) struct Steps {
    usual: f64,
    /// Mean, and answers to go by.
    means: HashMap<Tenant, (f64, f64)>,
}

impl Steps {
    /// Where nothing is known, answers take `usual` steps.
    pub(crate) fn new(usual: f64) -> Self {
        Self { usual, means: HashMap::new() }
    }

    /// An answer for `tenant` took `steps`.
    pub(crate) fn note(&mut self, tenant: Tenant, steps: f64) {
        if self.means.len() >= MOST_TENANTS && !self.means.contains_key(&tenant) {
            return;
        }
        let (mean, answers) = self.means.entry(tenant).or_insert((self.usual, 0.0));
        *answers = (*answers + 1.0).min(WINDOW);
        *mean += (steps - *mean) / *answers;
    }

    /// Steps of an answer for `tenant`.
    pub(crate) fn of(&self, tenant: Tenant) -> f64 {
        self.means.get(&tenant).map_or(self.usual, |(mean, _)| *mean)
    }
}
