//! Effort of a prediction in comparisons: it does not grow with the history.

use remoe_predictor::{
    Clustering, Embedding, History, SearchEffort, SimilarPrompts, TreeOptions, UsageSample, UsageShares,
};

const HIDDEN: usize = 8;
const ALPHA: usize = 15;

/// Returns a pseudo-random number from -1 to 1, the same on every machine.
fn random_value(seed: u64) -> f32 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x1234_5678_9abc_def1);
    state ^= state >> 29;
    state = state.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((state ^ state >> 32) % 20_001) as f32 / 10_000.0 - 1.0
}

/// Returns a unit vector about one of twenty topics, most of which are rare.
fn vector(number: u64) -> Vec<f32> {
    let topic = (random_value(number).abs().powi(3) * 20.0) as u64;
    let value =
        |at: u64| random_value(1 << 40 | topic << 8 | at) + 0.1 * random_value(1 << 50 | number << 8 | at);
    unit((0..HIDDEN as u64).map(value).collect())
}

fn unit(vector: Vec<f32>) -> Vec<f32> {
    let length = vector.iter().map(|value| value * value).sum::<f32>().sqrt();
    vector.into_iter().map(|value| value / length).collect()
}

fn embedding() -> Embedding {
    Embedding::from_rows(HIDDEN, &[1.0; HIDDEN]).unwrap()
}

fn sample(vector: Vec<f32>) -> UsageSample {
    UsageSample { vector, prefill: UsageShares::uniform(1, 2), decode: None }
}

/// Builds a history of `prompts` prompts with a tree.
fn similar_prompts(prompts: u64) -> SimilarPrompts {
    let vectors = (0..prompts).flat_map(vector).collect();
    let (shares, tokens) = (vec![0.5; 2 * prompts as usize], vec![Box::from([0]); prompts as usize]);
    let history = History::from_vectors(1, 2, vectors, shares, tokens).unwrap();
    let options = TreeOptions::default();
    SimilarPrompts::with_tree("sps", embedding(), &history, Clustering::Centred, options, ALPHA).unwrap()
}

/// Returns the largest effort of each kind over many prompts.
fn largest_effort(similar: &SimilarPrompts, vectors: impl Iterator<Item = Vec<f32>>) -> SearchEffort {
    vectors.map(|vector| similar.effort(&vector)).fold(SearchEffort::default(), |largest, effort| {
        SearchEffort {
            branches: largest.branches.max(effort.branches),
            candidates: largest.candidates.max(effort.candidates),
            compared: largest.compared.max(effort.compared),
        }
    })
}

fn queries() -> impl Iterator<Item = Vec<f32>> {
    let outliers = (0..200).map(|number| unit((0..8).map(|at| random_value(number << 8 | at)).collect()));
    (1 << 20..(1 << 20) + 1000).map(vector).chain(outliers)
}

#[test]
fn prediction_effort_is_independent_of_prompt_count() {
    let TreeOptions { beta, breadth, rerank, .. } = TreeOptions::default();
    for prompts in [1_000, 10_000, 100_000] {
        let effort = largest_effort(&similar_prompts(prompts), queries());
        assert!(effort.compared <= rerank, "{prompts}: {effort:?}");
        assert!(effort.candidates < breadth + beta, "{prompts}: {effort:?}");
        // As many nodes as leaves of a beta each, or a few times that.
        assert!(effort.branches <= breadth, "{prompts}: {effort:?}");
    }
}

#[test]
fn repeated_prompt_makes_no_deep_tree() {
    let mut similar = similar_prompts(1_000);
    let repeated = vector(3);
    let mut deepest = 0;
    for _ in 0..20_000 {
        let learned = similar.learn_from(&sample(repeated.clone()), 100_000, 0.5).unwrap();
        deepest = deepest.max(similar.depth_of(learned.slot));
    }
    // Each level at least halves: twenty halve more than a million.
    assert!(deepest <= 20, "{deepest} steps to a leaf");
    let effort = largest_effort(&similar, [repeated].into_iter().chain(queries()));
    assert!(effort.candidates < 1_650 && effort.branches <= 1_500, "{effort:?}");
}

#[test]
fn prediction_without_a_tree_compares_with_a_sample() {
    let first = sample(vector(0));
    let mut similar = SimilarPrompts::from_first_request("sps", embedding(), &first, ALPHA, 200).unwrap();
    for number in 1..5_000 {
        similar.learn_from(&sample(vector(number)), 4_000, 0.5).unwrap();
    }
    assert_eq!(similar.history().len(), 4_000);
    let effort = largest_effort(&similar, queries());
    assert!((100..=200).contains(&effort.compared), "{effort:?}");
    assert_eq!(effort.branches, 0);
    // The sampled prompts cover the history: every topic has neighbours.
    let mut few = SimilarPrompts::from_first_request("sps", embedding(), &first, ALPHA, 200).unwrap();
    for number in 1..150 {
        few.learn_from(&sample(vector(number)), 4_000, 0.5).unwrap();
    }
    assert_eq!(few.effort(&vector(7)).compared, 150, "all, where there are no more");
}
