//! Everything that a tenant can write, written so that the operator does harm: pods, Services, policies, budgets, plans,
//! records, ConfigMaps, what gateways say, the deployment itself with its annotations and status, logs of helpers and
//! answers of main functions. The operator's tests share it and replay its seeds.

use crate::memory;
use remoe_operator::testing::tenant;

/// A look at a deployment, and a plan for it.
const BASE: usize = 64 << 20;
/// Two bytes choose a value of a few KB, which is copied with all that is beside it.
const FACTOR: usize = 64 << 10;

pub fn run(data: &[u8]) {
    tenant::prepare();
    memory::within(BASE + FACTOR * data.len(), || tenant::run(data));
}

pub use tenant::seeds;
