//! Target: hostile objects of a tenant, which must not make the operator harm others. They are pods, Services, policies,
//! budgets, plans, records, ConfigMaps, gateway reports, the deployment with its annotations and status, logs of helper
//! pods, and responses of main functions. The operator's tests share this target, and replay its seeds.

use crate::memory;
use remoe_operator::testing::tenant;

/// Fixed part of the memory limit: one reconciliation of a deployment, and a plan for it.
const BASE_BYTES: usize = 64 << 20;
/// Memory limit per byte: two bytes select a value of a few KB, which is copied with its whole object.
const BYTES_PER_INPUT_BYTE: usize = 64 << 10;

pub fn run(data: &[u8]) {
    tenant::prepare();
    memory::with_limit(BASE_BYTES + BYTES_PER_INPUT_BYTE * data.len(), || tenant::run(data));
}

pub use tenant::seeds;
