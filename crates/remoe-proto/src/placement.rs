//! Placements by their content.

use crate::v1::{LayerExperts, Routing};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};

/// Prefix of the canonical form; another form has another name.
const FORM: &[u8] = b"remoe placement 1\n";

/// The name of a placement: SHA-256 over where hidden states go, in lower-case hexadecimal. The order of
/// endpoints, layers and experts means nothing, nor does naming one twice; the number of the generation and
/// its account are not part of it.
#[must_use]
pub fn placement_digest(routing: &Routing) -> String {
    let mut form = PlacementHash(Sha256::new_with_prefix(FORM));
    form.sets(&sorted(&routing.remote));
    let endpoints: BTreeSet<_> = routing
        .endpoints
        .iter()
        .map(|endpoint| {
            let layers: BTreeSet<u32> = endpoint.layers.iter().copied().collect();
            (endpoint.address.as_str(), layers, sorted(&endpoint.experts))
        })
        .collect();
    form.count(endpoints.len());
    for (address, layers, experts) in endpoints {
        form.count(address.len());
        form.0.update(address);
        form.numbers(&layers);
        form.sets(&experts);
    }
    form.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Hashed form of a placement: every list after its length, every number with eight bytes, so that no two placements
/// have the same bytes.
struct PlacementHash(Sha256);

impl PlacementHash {
    fn count(&mut self, count: usize) {
        self.0.update((count as u64).to_le_bytes());
    }

    fn numbers(&mut self, numbers: &BTreeSet<u32>) {
        self.count(numbers.len());
        numbers.iter().for_each(|&number| self.0.update(u64::from(number).to_le_bytes()));
    }

    fn sets(&mut self, sets: &BTreeMap<u32, BTreeSet<u32>>) {
        self.count(sets.len());
        for (layer, experts) in sets {
            self.0.update(u64::from(*layer).to_le_bytes());
            self.numbers(experts);
        }
    }
}

fn sorted(sets: &[LayerExperts]) -> BTreeMap<u32, BTreeSet<u32>> {
    let mut all: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for set in sets {
        all.entry(set.layer).or_default().extend(&set.experts);
    }
    all
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
    fn the_same_placement_has_the_same_name_however_it_is_written() {
        let mut other = routing();
        (other.generation, other.account) = (9, "{}".to_owned());
        other.endpoints.reverse();
        other.endpoints[1].layers = vec![2, 1, 2];
        other.remote = vec![set(2, &[0]), set(1, &[3, 2]), set(1, &[3])];
        assert_eq!(placement_digest(&other), placement_digest(&routing()));
        // The canonical form is part of the contract: an operator and functions of other versions talk.
        let known = "8371395e9e91ae6a697386158968db7eec691ef6c217dbe867a9f401bbe2abe4";
        assert_eq!(placement_digest(&routing()), known);
    }

    #[test]
    fn every_difference_shows() {
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
