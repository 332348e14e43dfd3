//! Clustering tree: search results, insertion and removal, capacity, and saving.

use crate::support;

use bytes::Bytes;
use proptest::collection::vec;
use proptest::prelude::*;
use remoe_predictor::record::ActivationRecord;
use remoe_predictor::{
    Clustering, History, Method, Phase, PredictError, Predictor, PromptIndex, SimilarPrompts,
    TrainedPredictor, TrainingOptions, Tree, TreeOptions,
};
use std::sync::Arc;
use support::{EXPERTS, LAYERS, VOCABULARY};

const TREE: TreeOptions = TreeOptions { beta: 12, breadth: 40, rerank: 10, forks: 4, seed: 1 };
const ALPHA: usize = 5;

fn history(records: &[ActivationRecord]) -> Arc<History> {
    Arc::new(History::from_records(&support::embedding(), LAYERS, EXPERTS, records).unwrap())
}

fn sps(records: &[ActivationRecord]) -> SimilarPrompts {
    let similarity = Clustering::Centred;
    SimilarPrompts::with_tree("sps", support::embedding(), &history(records), similarity, TREE, ALPHA)
        .unwrap()
}

fn exhaustive_search(sps: &SimilarPrompts) -> SimilarPrompts {
    let (history, alpha) = (sps.history().clone(), sps.alpha());
    SimilarPrompts::new("bf", support::embedding(), history, PromptIndex::Exhaustive, alpha).unwrap()
}

fn tree(sps: &SimilarPrompts) -> &Tree {
    let PromptIndex::Tree(tree) = sps.index() else { panic!("no tree") };
    tree
}

/// Asserts that every prompt is in exactly one leaf, no leaf is too large, and searches return existing prompts.
fn assert_sound(sps: &SimilarPrompts) {
    let sizes = tree(sps).leaf_sizes();
    assert!(sizes.iter().all(|size| *size <= TREE.beta), "{sizes:?}");
    assert_eq!(sizes.iter().sum::<usize>(), sps.history().len());
    for slot in sps.history().slots().step_by(7) {
        let found = sps.neighbours(sps.history().prompt(slot)).unwrap();
        assert_eq!(found.len(), ALPHA.min(sps.history().len()));
        assert!(found.is_sorted_by(|a, b| a.similarity >= b.similarity));
        let mut slots: Vec<u32> = found.iter().map(|neighbour| neighbour.slot).collect();
        assert!(slots.iter().all(|&slot| !sps.history().prompt(slot).is_empty()));
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), found.len());
    }
}

#[test]
fn searches_find_most_of_what_brute_force_finds() {
    let sps = sps(&support::records(800, 1));
    assert_sound(&sps);
    // The leaves are tiny here, 12 of 800 prompts: a random leaf has one prompt in 67.
    let narrow = grown(TreeOptions { breadth: 0, rerank: 0, ..TREE });
    let wide = TreeOptions { breadth: 400, rerank: 400, ..TREE };
    let sketched = TreeOptions { rerank: 50, ..wide };
    let (narrow, wide, sketched) = (recall(&narrow), recall(&grown(wide)), recall(&grown(sketched)));
    assert!(narrow > 0.2 && wide > 0.9, "{narrow} {wide}");
    // Half of the prompts are candidates, a sixteenth is compared in full.
    assert!(sketched > 0.9 * wide, "{sketched} {wide}");
}

#[test]
fn search_of_unlimited_breadth_equals_brute_force() {
    for (breadth, rerank) in [(usize::MAX, usize::MAX), (usize::MAX, 800), (800, 0)] {
        let sps = grown(TreeOptions { breadth, rerank, ..TREE });
        let found = recall(&sps);
        assert!(if rerank == 0 { found > 0.4 } else { found == 1.0 }, "{breadth} {rerank}: {found}");
    }
}

/// Builds a predictor over 800 prompts.
fn grown(options: TreeOptions) -> SimilarPrompts {
    let (clustering, past) = (Clustering::Centred, history(&support::records(800, 1)));
    SimilarPrompts::with_tree("sps", support::embedding(), &past, clustering, options, ALPHA).unwrap()
}

/// Returns the share of the true neighbours that a search finds.
fn recall(sps: &SimilarPrompts) -> f64 {
    let all = exhaustive_search(sps);
    let (mut found, mut wanted) = (0, 0);
    for record in support::records(100, 2) {
        let truth = all.neighbours(&record.prompt).unwrap();
        let own = sps.neighbours(&record.prompt).unwrap();
        found += truth.iter().filter(|one| own.contains(one)).count();
        wanted += truth.len();
        // No result is better than the best.
        assert!(own[0].similarity <= truth[0].similarity);
    }
    f64::from(found as u32) / f64::from(wanted as u32)
}

#[test]
fn brute_force_is_exact() {
    let records = support::records(60, 3);
    let embedding = support::embedding();
    let all = SimilarPrompts::new("bf", embedding.clone(), history(&records), PromptIndex::Exhaustive, ALPHA)
        .unwrap();
    let query = embedding.prompt_vector(&[4, 8, 15]).unwrap();
    let mut expected: Vec<(f32, u32)> = (0..60)
        .map(|slot| {
            let vector = embedding.prompt_vector(&records[slot as usize].prompt).unwrap();
            (vector.iter().zip(&query).map(|(a, b)| a * b).sum(), slot)
        })
        .collect();
    expected.sort_by(|a, b| b.0.total_cmp(&a.0));
    let found = all.neighbours(&[4, 8, 15]).unwrap();
    for (found, (similarity, slot)) in found.iter().zip(expected) {
        assert_eq!(found.slot, slot);
        assert!((found.similarity - similarity).abs() < 1e-5);
    }
}

#[test]
fn full_pam_is_no_worse_than_the_customised_medoids() {
    let past = history(&support::records(100, 5));
    let options = TreeOptions { beta: 99, breadth: 0, rerank: 0, forks: 2, seed: 3 };
    let cost = |clustering| {
        // With two leaves, PAM minimises the distance to the nearer medoid.
        let tree = Tree::build(&past, clustering, options, 5).unwrap();
        assert_eq!(tree.leaf_sizes().len(), 2);
        tree.medoid_cost(&past)
    };
    assert!(cost(Clustering::Pam) <= cost(Clustering::Centred) + 1e-4);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn prompts_come_and_go(start in 1..60_usize, steps in vec((any::<u64>(), 1..80_usize), 1..60)) {
        let mut sps = sps(&support::records(start, 1));
        for (seed, capacity) in steps {
            let record = support::records(1, seed).remove(0);
            sps.learn(&record, capacity, 0.5).unwrap();
            prop_assert!(sps.history().len() <= capacity);
            // The newest prompt is present.
            let newest = sps.history().slots().any(|slot| sps.history().prompt(slot) == record.prompt);
            prop_assert!(newest);
        }
        assert_sound(&sps);
    }

    #[test]
    fn damaged_files_never_panic(changes in vec((0.0..1.0_f64, any::<u8>()), 1..30), cut: bool) {
        let records = support::records(40, 6);
        let mut bytes = trained(&records).to_bytes().unwrap();
        for (place, value) in changes {
            let at = (bytes.len() as f64 * place) as usize;
            bytes[at] = value;
            if cut {
                bytes.truncate(at.max(1));
            }
        }
        let model = support::header().model;
        if let Ok(loaded) = TrainedPredictor::from_bytes(&Bytes::from(bytes), &model, &support::embedding()) {
            for method in Method::ALL {
                for phase in Phase::ALL {
                    loaded.method(method).predict(&[1, 2, 3], phase).map(drop).unwrap_or_default();
                }
            }
        }
    }
}

#[test]
fn branches_that_are_empty_go() {
    let mut sps = sps(&support::records(200, 1));
    assert!(tree(&sps).nodes() > 20);
    let newcomer = support::records(1, 2).remove(0);
    sps.learn(&newcomer, 1, 0.5).unwrap();
    // Only the path to the remaining prompt is left.
    assert!(tree(&sps).nodes() < 8, "{}", tree(&sps).nodes());
    support::records(50, 3).iter().for_each(|record| sps.learn(record, 100, 0.5).unwrap());
    assert_sound(&sps);
}

#[test]
fn growing_one_by_one_gives_a_tree_as_good_as_one_build() {
    let records = support::records(400, 9);
    let mut grown = sps(&records[..20]);
    records[20..].iter().for_each(|record| grown.learn(record, 1000, 0.5).unwrap());
    assert_sound(&grown);
    assert_eq!(grown.history().len(), 400);
    let (built, all) = (sps(&records), exhaustive_search(&grown));
    let recall = |sps: &SimilarPrompts| {
        let queries = support::records(80, 10);
        let hits = queries.iter().map(|record| {
            let truth = all.neighbours(&record.prompt).unwrap();
            let own = sps.neighbours(&record.prompt).unwrap();
            truth.iter().filter(|one| own.iter().any(|other| other.slot == one.slot)).count()
        });
        hits.sum::<usize>()
    };
    assert!(recall(&grown) * 2 > recall(&built), "{} {}", recall(&grown), recall(&built));
}

#[test]
fn most_redundant_prompt_is_evicted_first() {
    // Two prompts are equal. A third, similar one is added to a full history.
    let alike = |id: u32| support::of_prompt(vec![id, 4, 8, 12], 0);
    let mut records = support::records(10, 12);
    records[3] = alike(16);
    let mut sps = SimilarPrompts::with_tree(
        "sps",
        support::embedding(),
        &history(&records),
        Clustering::Similarity,
        TreeOptions { beta: 50, breadth: 0, rerank: 0, forks: 2, seed: 0 },
        ALPHA,
    )
    .unwrap();
    let newcomer = alike(20);
    sps.learn(&newcomer, 10, 0.5).unwrap();
    assert_eq!(sps.history().len(), 10);
    let kept: Vec<&[u32]> = sps.history().slots().map(|slot| sps.history().prompt(slot)).collect();
    assert!(kept.contains(&newcomer.prompt.as_slice()));
    assert!(!kept.contains(&records[3].prompt.as_slice()), "the one like the newcomer stayed");
    assert!(
        records
            .iter()
            .enumerate()
            .filter(|(index, _)| *index != 3)
            .all(|(_, record)| kept.contains(&record.prompt.as_slice()))
    );
    assert!(matches!(sps.learn(&newcomer, 0, 0.5), Err(PredictError::Option { option: "capacity", .. })));
}

#[test]
fn learning_does_not_change_who_shares_the_history() {
    let mut sps = sps(&support::records(30, 1));
    let shared = sps.history().clone();
    sps.learn(&support::records(1, 99)[0], 100, 0.5).unwrap();
    assert_eq!((shared.len(), sps.history().len()), (30, 31));
}

fn trained(records: &[ActivationRecord]) -> TrainedPredictor {
    let options = TrainingOptions { alpha: ALPHA, tree: TREE };
    TrainedPredictor::fit(support::header(), records, &support::embedding(), options).unwrap()
}

#[test]
fn saved_predictor_loads_bit_for_bit() {
    let embedding = support::embedding();
    let mut before = trained(&support::decoded(300, 30));
    assert!(before.sps().history().has_decode());
    // Saving removes gaps and renumbers new nodes.
    support::decoded(40, 31).iter().for_each(|record| before.learn(record, 290, 0.5).unwrap());
    let bytes = before.to_bytes().unwrap();
    assert_eq!(bytes, before.to_bytes().unwrap());
    let model = support::header().model;
    let mut unaligned = vec![0];
    unaligned.extend_from_slice(&bytes);
    for bytes in [Bytes::from(bytes), Bytes::from(unaligned).slice(1..)] {
        let mut after = TrainedPredictor::from_bytes(&bytes, &model, &embedding).unwrap();
        assert_eq!(after.header(), before.header());
        for phase in Phase::ALL {
            assert_eq!(after.tuning(phase), before.tuning(phase));
        }
        for record in support::records(50, 32) {
            for method in Method::ALL {
                let (one, two) = (before.method(method), after.method(method));
                for phase in Phase::ALL {
                    let [one, two] = [one.predict(&record.prompt, phase), two.predict(&record.prompt, phase)];
                    assert_eq!(one.unwrap(), two.unwrap());
                }
            }
        }
        assert_eq!(after.sps().history().len(), before.sps().history().len());
        // The loaded predictor continues to learn.
        support::records(40, 33).iter().for_each(|record| after.learn(record, 400, 0.5).unwrap());
        assert_sound(after.sps());
        assert_eq!(after.sps().history().len(), before.sps().history().len() + 40);
    }
}

#[test]
fn saved_predictors_of_other_models_and_other_files_are_refused() {
    let bytes = Bytes::from(trained(&support::records(20, 1)).to_bytes().unwrap());
    let error = TrainedPredictor::from_bytes(&bytes, "cdef", &support::embedding()).unwrap_err().to_string();
    assert!(error.contains("abab") && error.contains("expected cdef"), "{error}");
    for bytes in [Bytes::new(), Bytes::from_static(b"other"), bytes.slice(..bytes.len() - 1)] {
        let refused = TrainedPredictor::from_bytes(&bytes, &support::header().model, &support::embedding());
        assert!(matches!(refused, Err(PredictError::Saved(_))));
    }
    let other = safetensors::serialize([] as [(&str, safetensors::tensor::TensorView<'_>); 0], None).unwrap();
    let error = TrainedPredictor::from_bytes(&other.into(), "ab", &support::embedding()).unwrap_err();
    assert!(error.to_string().contains("predictor build"), "{error}");
}

/// Replaces parts of a saved predictor's JSON text with text of equal length.
fn altered(bytes: &[u8], from: &str, to: &str) -> Bytes {
    assert_eq!(from.len(), to.len());
    let at = bytes.windows(from.len()).position(|part| part == from.as_bytes()).expect("the text is there");
    [&bytes[..at], to.as_bytes(), &bytes[at + from.len()..]].concat().into()
}

#[test]
fn versions_and_temperatures_that_cannot_be_are_refused() {
    let bytes = trained(&support::records(20, 1)).to_bytes().unwrap();
    for (from, to, message) in [
        (r#"\"version\":3"#, r#"\"version\":1"#, "got 1"),
        (r#"\"temperature\":0.03"#, r#"\"temperature\":0.00"#, "invalid temperature 0"),
        (r#"\"seed\":"#, r#"\"sead\":"#, "missing field"),
    ] {
        let (model, embedding) = (support::header().model, support::embedding());
        let error = TrainedPredictor::from_bytes(&altered(&bytes, from, to), &model, &embedding).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
}

#[test]
fn tokens_outside_of_the_history_are_searched_too() {
    let sps = sps(&support::records(50, 2));
    for id in 0..VOCABULARY as u32 {
        assert_eq!(sps.neighbours(&[id]).unwrap().len(), ALPHA);
    }
    assert!(sps.bytes() > sps.history().bytes());
}
