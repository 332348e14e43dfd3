//! Effort of a prediction, counted and not timed: it does not grow with the history.

use remoe_predictor::{
    Clustering, Effort, Embedding, Experience, History, Shares, SimilarPrompts, TreeOptions,
};

const HIDDEN: usize = 8;
const ALPHA: usize = 15;

/// Some number from -1 to 1, the same on every machine.
fn drawn(seed: u64) -> f32 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x1234_5678_9abc_def1);
    state ^= state >> 29;
    state = state.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((state ^ state >> 32) % 20_001) as f32 / 10_000.0 - 1.0
}

/// A vector of length 1 about one of twenty topics, most of which few requests are about.
fn vector(number: u64) -> Vec<f32> {
    let topic = (drawn(number).abs().powi(3) * 20.0) as u64;
    let value = |at: u64| drawn(1 << 40 | topic << 8 | at) + 0.1 * drawn(1 << 50 | number << 8 | at);
    unit((0..HIDDEN as u64).map(value).collect())
}

fn unit(vector: Vec<f32>) -> Vec<f32> {
    let length = vector.iter().map(|value| value * value).sum::<f32>().sqrt();
    vector.into_iter().map(|value| value / length).collect()
}

fn embedding() -> Embedding {
    Embedding::from_rows(HIDDEN, &[1.0; HIDDEN]).unwrap()
}

fn experience(vector: Vec<f32>) -> Experience {
    Experience { vector, prefill: Shares::uniform(1, 2), decode: None }
}

/// A history of so many prompts with a tree over it.
fn planted(prompts: u64) -> SimilarPrompts {
    let vectors = (0..prompts).flat_map(vector).collect();
    let (shares, tokens) = (vec![0.5; 2 * prompts as usize], vec![Box::from([0]); prompts as usize]);
    let history = History::from_vectors(1, 2, vectors, shares, tokens).unwrap();
    let options = TreeOptions::default();
    SimilarPrompts::with_tree("sps", embedding(), &history, Clustering::Centred, options, ALPHA).unwrap()
}

/// The most of each over many prompts.
fn most(similar: &SimilarPrompts, vectors: impl Iterator<Item = Vec<f32>>) -> Effort {
    vectors.map(|vector| similar.effort(&vector)).fold(Effort::default(), |most, one| Effort {
        branches: most.branches.max(one.branches),
        looked_at: most.looked_at.max(one.looked_at),
        compared: most.compared.max(one.compared),
    })
}

fn queries() -> impl Iterator<Item = Vec<f32>> {
    let outliers = (0..200).map(|number| unit((0..8).map(|at| drawn(number << 8 | at)).collect()));
    (1 << 20..(1 << 20) + 1000).map(vector).chain(outliers)
}

#[test]
fn prediction_effort_is_independent_of_prompt_count() {
    let TreeOptions { beta, breadth, rerank, .. } = TreeOptions::default();
    for prompts in [1_000, 10_000, 100_000] {
        let effort = most(&planted(prompts), queries());
        assert!(effort.compared <= rerank, "{prompts}: {effort:?}");
        assert!(effort.looked_at < breadth + beta, "{prompts}: {effort:?}");
        // As many nodes as leaves of a beta each, or a few times that.
        assert!(effort.branches <= breadth, "{prompts}: {effort:?}");
    }
}

#[test]
fn a_prompt_that_comes_again_and_again_makes_no_deep_tree() {
    let mut similar = planted(1_000);
    let again = vector(3);
    let mut deepest = 0;
    for _ in 0..20_000 {
        let learned = similar.learn_from(&experience(again.clone()), 100_000, 0.5).unwrap();
        deepest = deepest.max(similar.depth_of(learned.slot));
    }
    // Each step divides, so that twenty divide more than a million.
    assert!(deepest <= 20, "{deepest} steps to a leaf");
    let effort = most(&similar, [again].into_iter().chain(queries()));
    assert!(effort.looked_at < 1_650 && effort.branches <= 1_500, "{effort:?}");
}

#[test]
fn without_a_tree_a_prediction_compares_with_some() {
    let first = experience(vector(0));
    let mut similar = SimilarPrompts::begin("sps", embedding(), &first, ALPHA, 200).unwrap();
    for number in 1..5_000 {
        similar.learn_from(&experience(vector(number)), 4_000, 0.5).unwrap();
    }
    assert_eq!(similar.history().len(), 4_000);
    let effort = most(&similar, queries());
    assert!((100..=200).contains(&effort.compared), "{effort:?}");
    assert_eq!(effort.branches, 0);
    // They are from all over the history: of whatever topic there are neighbours.
    let mut few = SimilarPrompts::begin("sps", embedding(), &first, ALPHA, 200).unwrap();
    for number in 1..150 {
        few.learn_from(&experience(vector(number)), 4_000, 0.5).unwrap();
    }
    assert_eq!(few.effort(&vector(7)).compared, 150, "all, where there are no more");
}
