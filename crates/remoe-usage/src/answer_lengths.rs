//! Mean answer length of each tenant, in decode steps. No tenant's answers affect another tenant.

use crate::tenant::Tenant;
use std::collections::HashMap;

/// Number of answers in a tenant's moving average.
const WINDOW: f64 = 35.0;
/// Largest number of tenants; answers of further tenants have the default length.
const MOST_TENANTS: usize = 1024;

/// Moving average of decode steps per answer, by tenant.
#[derive(Debug)]
pub(crate) struct AnswerLengths {
    default_steps: f64,
    /// Mean decode steps and number of answers, up to [`WINDOW`].
    means: HashMap<Tenant, (f64, f64)>,
}

impl AnswerLengths {
    /// Creates an empty table. Answers of unknown tenants take `default_steps`.
    pub(crate) fn new(default_steps: f64) -> Self {
        Self { default_steps, means: HashMap::new() }
    }

    /// Adds an answer of `steps` decode steps for `tenant`.
    pub(crate) fn record(&mut self, tenant: Tenant, steps: f64) {
        if self.means.len() >= MOST_TENANTS && !self.means.contains_key(&tenant) {
            return;
        }
        let (mean, answers) = self.means.entry(tenant).or_insert((self.default_steps, 0.0));
        *answers = (*answers + 1.0).min(WINDOW);
        *mean += (steps - *mean) / *answers;
    }

    /// Returns the expected decode steps of an answer for `tenant`.
    pub(crate) fn expected_steps(&self, tenant: Tenant) -> f64 {
        self.means.get(&tenant).map_or(self.default_steps, |(mean, _)| *mean)
    }
}
