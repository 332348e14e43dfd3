//! Fuzz target `tenant`: a hostile tenant writes everything that it can.
//!
//! The input has two bytes per choice of [`super::corrupted`], with texts between them; the first choice is the
//! deployment, the last one the pod that its neighbour has lost.

use super::corrupted::{AT_ONCE, SeededChoices, as_read, check, is_healed, tenants};
use super::world::World;
use crate::fleet::OtherDeployments;
use serde_json::json;
use std::sync::LazyLock;

/// Serving deployments, and one of another tenant, at the start of every input.
static BEGINNING: LazyLock<(Vec<World>, World)> = LazyLock::new(|| {
    let mut neighbour = World::new(json!({"replicas": 2}));
    neighbour.owner.metadata.name = Some("other".to_owned());
    neighbour.owner.metadata.uid = Some("uid-2".to_owned());
    neighbour.settle();
    (tenants(), neighbour)
});

/// Lets a tenant write what `data` chooses, reconciles, and checks the operator's writes.
pub fn run(data: &[u8]) {
    let (tenants, neighbour) = &*BEGINNING;
    let mut dice = SeededChoices::Told(data);
    let mut world = tenants[dice.below(tenants.len())].clone();
    for _ in 0..=dice.below(AT_ONCE) {
        dice.spoil_world(&mut world);
    }
    as_read(&mut world);
    let (_, diff, stated) = world.look_and_state();
    check(&world, &diff, &stated);
    let others = OtherDeployments::sum("theirs", [("spoiled", world.function_counts)]);
    let lost = dice.below(neighbour.observed.pods.len());
    is_healed(neighbour, lost, &world.observed.pods, others);
}

/// Prepares the start of every input.
pub fn prepare() {
    LazyLock::force(&BEGINNING);
}

/// Pseudo-random choices of every kind for every deployment.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut dice = SeededChoices::Thrown(1);
    let mut choice = |bound: usize| u16::try_from(dice.below(bound)).unwrap_or(u16::MAX).to_le_bytes();
    let kinds = 22;
    let seed = |index: usize| {
        let head = [(index % 8) as u16, 0, (index % kinds) as u16].map(u16::to_le_bytes);
        head.into_iter().chain((0..24).map(|_| choice(usize::from(u16::MAX)))).flatten().collect()
    };
    (0..8 * kinds).map(seed).collect()
}
