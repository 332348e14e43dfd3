//! Everything that a tenant can write, written so that the operator does harm: pods, Services, policies, budgets, plans,
//! records, ConfigMaps, what gateways say, the deployment itself with its annotations and status, logs of helpers and
//! answers of main functions.
//!
//! Input: two bytes for each choice of `operator/tests/cluster/spoiled.rs`, with texts between them; the first choice is the
//! deployment, the last one what its neighbour has lost.

use crate::memory;
use crate::spoiled::{AT_ONCE, Dice, as_read, check, is_healed, tenants};
use crate::world::World;
use remoe_operator::fleet::{Others, Silence};
use serde_json::json;
use std::sync::LazyLock;

/// A look at a deployment, and a plan for it.
const BASE: usize = 64 << 20;
/// Two bytes choose a value of a few KB, which is copied with all that is beside it.
const FACTOR: usize = 64 << 10;

/// Deployments that serve, and somebody else's, from which every input begins.
static BEGINNING: LazyLock<(Vec<World>, World)> = LazyLock::new(|| {
    let mut neighbour = World::new(json!({"replicas": 2}));
    neighbour.owner.metadata.name = Some("other".to_owned());
    neighbour.owner.metadata.uid = Some("uid-2".to_owned());
    neighbour.settle();
    (tenants(), neighbour)
});

pub fn run(data: &[u8]) {
    let (tenants, neighbour) = &*BEGINNING;
    memory::within(BASE + FACTOR * data.len(), || {
        let mut dice = Dice::Told(data);
        let mut world = tenants[dice.below(tenants.len())].clone();
        for _ in 0..=dice.below(AT_ONCE) {
            dice.spoil_world(&mut world);
        }
        as_read(&mut world);
        let (_, steps, stated) = world.look_and_state();
        check(&world, &steps, &stated);
        let others = Others::of("theirs", [("spoiled", Silence::among(&steps.pods))]);
        let lost = dice.below(neighbour.there.pods.len());
        is_healed(neighbour, lost, &world.there.pods, others);
    });
}

/// Choices of every kind for every deployment, by numbers that look like no order.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut dice = Dice::Thrown(1);
    let mut choice = |bound: usize| u16::try_from(dice.below(bound)).unwrap_or(u16::MAX).to_le_bytes();
    let kinds = 22;
    let seed = |index: usize| {
        let head = [(index % 8) as u16, 0, (index % kinds) as u16].map(u16::to_le_bytes);
        head.into_iter().chain((0..24).map(|_| choice(usize::from(u16::MAX)))).flatten().collect()
    };
    (0..8 * kinds).map(seed).collect()
}
