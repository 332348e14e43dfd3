//! Content digests of placements.

use crate::v1::{LayerExperts, Routing};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};

/// First bytes that are hashed. If the encoding below changes, so must the number.
const FORMAT_PREFIX: &[u8] = b"remoe placement 1\n";

/// Returns the digest of a placement in lower-case hexadecimal: SHA-256 over the remote experts of each layer, and over the
/// endpoints with what they host. The order and repetition of endpoints, layers and experts are ignored, and so are
/// `generation` and `account`.
#[must_use]
pub fn placement_digest(routing: &Routing) -> String {
    let mut hash = PlacementHash(Sha256::new_with_prefix(FORMAT_PREFIX));
    hash.add_experts_by_layer(&experts_by_layer(&routing.remote));
    let endpoints: BTreeSet<_> = routing
        .endpoints
        .iter()
        .map(|endpoint| {
            let layers: BTreeSet<u32> = endpoint.layers.iter().copied().collect();
            (endpoint.address.as_str(), layers, experts_by_layer(&endpoint.experts))
        })
        .collect();
    hash.add_count(endpoints.len());
    for (address, layers, experts) in endpoints {
        hash.add_count(address.len());
        hash.0.update(address);
        hash.add_numbers(&layers);
        hash.add_experts_by_layer(&experts);
    }
    hash.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Hash of the canonical form: each list follows its length and each number takes eight bytes, so that different
/// placements have different bytes.
struct PlacementHash(Sha256);

impl PlacementHash {
    fn add_count(&mut self, count: usize) {
        self.0.update((count as u64).to_le_bytes());
    }

    fn add_numbers(&mut self, numbers: &BTreeSet<u32>) {
        self.add_count(numbers.len());
        numbers.iter().for_each(|&number| self.0.update(u64::from(number).to_le_bytes()));
    }

    fn add_experts_by_layer(&mut self, by_layer: &BTreeMap<u32, BTreeSet<u32>>) {
        self.add_count(by_layer.len());
        for (layer, experts) in by_layer {
            self.0.update(u64::from(*layer).to_le_bytes());
            self.add_numbers(experts);
        }
    }
}

/// Returns the sorted experts of each layer. Entries of the same layer are merged.
fn experts_by_layer(entries: &[LayerExperts]) -> BTreeMap<u32, BTreeSet<u32>> {
    let mut by_layer: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for entry in entries {
        by_layer.entry(entry.layer).or_default().extend(&entry.experts);
    }
    by_layer
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::Endpoint;

    fn set(layer: u32, experts: &[u32]) -> LayerExperts {
        LayerExperts { layer, experts: experts.to_vec() }
    }

    fn endpoint(address: &str, layers: &[u32], experts: Vec<LayerExperts>) -> Endpoint {
        Endpoint { address: address.to_owned(), layers: layers.to_vec(), experts }
    }

    fn routing() -> Routing {
        Routing {
            generation: 3,
            endpoints: vec![
                endpoint("10.0.0.1:9001", &[1, 2], vec![]),
                endpoint("10.0.0.2:9001", &[], vec![set(1, &[3])]),
            ],
            remote: vec![set(1, &[2, 3]), set(2, &[0])],
            account: String::new(),
        }
    }

    #[test]
    fn digest_ignores_order_and_repetition() {
        let mut other = routing();
        (other.generation, other.account) = (9, "{}".to_owned());
        other.endpoints.reverse();
        other.endpoints[1].layers = vec![2, 1, 2];
        other.remote = vec![set(2, &[0]), set(1, &[3, 2]), set(1, &[3])];
        assert_eq!(placement_digest(&other), placement_digest(&routing()));
        // The canonical form is part of the contract between operators and functions of different versions.
        let known = "8371395e9e91ae6a697386158968db7eec691ef6c217dbe867a9f401bbe2abe4";
        assert_eq!(placement_digest(&routing()), known);
    }

    #[test]
    fn digest_differs_for_every_change() {
        let changes: [fn(&mut Routing); 8] = [
            |r| r.endpoints[0].address = "10.0.0.9:9001".to_owned(),
            |r| r.endpoints[0].layers = vec![1],
            |r| r.endpoints[1].experts = vec![set(1, &[2])],
            |r| r.endpoints[1].experts = vec![set(2, &[3])],
            |r| drop(r.endpoints.pop()),
            |r| r.remote[0].experts = vec![2],
            |r| r.remote[1].layer = 3,
            |r| drop(r.remote.pop()),
        ];
        let digests = changes.map(|change| {
            let mut routing = routing();
            change(&mut routing);
            placement_digest(&routing)
        });
        let all: BTreeSet<String> = digests.into_iter().chain([placement_digest(&routing())]).collect();
        assert_eq!(all.len(), 9);
    }
}
