//! A model summary from a main function suffices for predictions.

use remoe_model::Checkpoint;
use remoe_predictor::record::{ActivationRecord, RecordHeader};
use remoe_predictor::{
    Activations, Embedding, EmbeddingType, PORTABLE_FILE, PREDICTOR_FILE, Phase, PortablePredictor,
    TrainedPredictor, TrainingOptions, TunedPredictor,
};
use remoe_usage::{
    ModelSummary, ModelSummaryError, PredictorOptions, PromptReader, RequestArrival, Retention, Tenant,
    UsagePredictor, write_model_summary,
};
use std::path::{Path, PathBuf};

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model")
}

fn header(checkpoint: &Checkpoint) -> RecordHeader {
    let config = checkpoint.config();
    let layers = config.moe_layers();
    let moe = config.moe(layers[0]).unwrap();
    RecordHeader {
        model: checkpoint.fingerprint().unwrap().to_string(),
        layers: layers.iter().map(|&layer| layer as u32).collect(),
        experts: moe.experts as u32,
        top_k: moe.top_k as u32,
        dtype: "float32".to_owned(),
        tokens: false,
    }
}

fn told() -> (RecordHeader, Vec<u8>) {
    told_by(&Checkpoint::open(demo()).unwrap())
}

fn told_by(checkpoint: &Checkpoint) -> (RecordHeader, Vec<u8>) {
    let (header, mut bytes) = (header(checkpoint), Vec::new());
    write_model_summary(checkpoint, &header, |part| {
        bytes.extend(part);
        true
    })
    .unwrap();
    (header, bytes)
}

fn embedding(checkpoint: &Checkpoint) -> Embedding {
    let tensor = checkpoint.embedding();
    let table = checkpoint.read(tensor).unwrap();
    let kind = if tensor.dtype.bytes() == 4 { EmbeddingType::F32 } else { EmbeddingType::Bf16 };
    Embedding::new(checkpoint.config().hidden_size, kind, table.into()).unwrap()
}

/// Trains predictors on a history in which the two halves of the vocabulary use different experts.
fn predictors(
    header: &RecordHeader,
    embedding: &Embedding,
) -> (Embedding, TrainedPredictor, PortablePredictor) {
    let half = embedding.vocabulary() as u32 / 2;
    let (layers, experts) = (header.layers.len(), header.experts as usize);
    let record = |number: u32| {
        let topic = number % 2;
        let prompt: Vec<u32> =
            (0..30).map(|at| topic * half + (number * 7919 + at * 104_729) % half).collect();
        let counts = |shift: usize| {
            let used = |cell: usize| u32::from((cell % experts + shift) % experts < experts / 4) * 30;
            (0..layers * experts).map(|cell| used(cell + topic as usize * experts / 2)).collect()
        };
        ActivationRecord { prompt, prefill: counts(0), decode: counts(1), steps: 8, experts: None }
    };
    let records: Vec<ActivationRecord> = (0..150).map(record).collect();
    let sketch = embedding.sketched(16).unwrap();
    let options = TrainingOptions::default();
    let fitted = TrainedPredictor::fit_with_portable(
        header.clone(),
        &records,
        (embedding, &sketch),
        options,
        &mut |_| (),
    );
    let (trained, portable) = fitted.unwrap();
    (sketch, trained, portable)
}

/// Creates a folder with the demo model and `files` in its predictor folder.
fn model_with(files: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(demo()).unwrap().map(|file| file.unwrap()) {
        std::os::unix::fs::symlink(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let beside = folder.path().join("predictor");
    std::fs::create_dir(&beside).unwrap();
    files.iter().for_each(|(name, bytes)| std::fs::write(beside.join(name), bytes).unwrap());
    folder
}

/// Returns the predicted usage of a new tenant's first requests.
fn first_requests(mut predictor: UsagePredictor) -> Vec<Vec<f32>> {
    // One request for each half of the vocabulary.
    let ids = |first: u32| (0..100).map(|at| first + at * 104_729 % 2048).collect::<Vec<u32>>();
    let bodies = [
        serde_json::json!({"messages": [{"role": "user", "content": "And the LORD spake unto Moses"}]}),
        serde_json::json!({"prompt": ids(0), "max_tokens": 9}),
        serde_json::json!({"prompt": ids(2048)}),
    ];
    let expected = bodies.iter().map(|body| {
        let (tenant, body) = (Tenant::named("new"), body.to_string());
        predictor.begin_request(RequestArrival {
            id: 1,
            tenant,
            retention: Retention::Records,
            body: body.as_bytes(),
        });
        let mix = predictor.predict_joint_usage().unwrap().unwrap();
        predictor.end_request(1);
        mix.shares.values().to_vec()
    });
    expected.collect()
}

/// Returns the prediction of a program beside the model, with this predictor and embedding.
fn beside(model: &Path, embedding: Embedding, predictor: Box<dyn TunedPredictor>) -> UsagePredictor {
    let checkpoint = Checkpoint::open(model).unwrap();
    let prompts = PromptReader::open(&checkpoint).unwrap();
    let options = PredictorOptions::default();
    UsagePredictor::new(header(&checkpoint), embedding, prompts, Some(predictor), options).unwrap()
}

#[test]
fn gateway_with_a_sketch_predicts_as_the_portable_one_does() {
    let checkpoint = Checkpoint::open(demo()).unwrap();
    let (sketch, _, portable) = predictors(&header(&checkpoint), &embedding(&checkpoint));
    let model = model_with(&[(PORTABLE_FILE, portable.to_bytes().unwrap())]);
    let (_, bytes) = told_by(&Checkpoint::open(model.path()).unwrap());
    let head: serde_json::Value =
        serde_json::from_slice(bytes.split(|byte| *byte == b'\n').next().unwrap()).unwrap();
    assert_eq!(
        (&head["version"], &head["dimensions"], &head["element"]),
        (&2.into(), &16.into(), &"f16".into())
    );
    let summary = ModelSummary::from_bytes(&bytes.into()).unwrap();
    let far = first_requests(summary.open(PredictorOptions::default()).unwrap());
    assert_eq!(far, first_requests(beside(model.path(), sketch, Box::new(portable))));
    // The halves of the vocabulary use different experts: the prediction follows them, not the mean.
    assert_ne!(far[1], far[2]);
}

#[test]
fn gateway_with_full_embedding_predicts_like_full_predictor() {
    let checkpoint = Checkpoint::open(demo()).unwrap();
    let embedding = embedding(&checkpoint);
    let (_, trained, portable) = predictors(&header(&checkpoint), &embedding);
    let files =
        [(PREDICTOR_FILE, trained.to_bytes().unwrap()), (PORTABLE_FILE, portable.to_bytes().unwrap())];
    for files in [&files[..], &files[..1]] {
        let model = model_with(files);
        let (_, bytes) = told_by(&Checkpoint::open(model.path()).unwrap());
        let summary = ModelSummary::from_bytes(&bytes.into()).unwrap();
        let far = first_requests(summary.open(PredictorOptions::default()).unwrap());
        let near = beside(model.path(), embedding.clone(), Box::new(trained.clone()));
        assert_eq!(far, first_requests(near));
    }
}

/// Predicts the usage of a question after a similar one was learned.
fn expected(mut predictor: UsagePredictor, header: &RecordHeader) -> Vec<f32> {
    let mut activations = Activations::new(header.layers.len(), header.experts as usize);
    let used: Vec<(u32, f32)> = (0..header.top_k).map(|expert| (expert, 1.0)).collect();
    let body = |text: &str| serde_json::json!({"messages": [{"role": "user", "content": text}]}).to_string();
    let come = |predictor: &mut UsagePredictor, id, text: &str| {
        predictor.begin_request(RequestArrival {
            id,
            tenant: Tenant::named("a"),
            retention: Retention::Records,
            body: body(text).as_bytes(),
        });
    };
    come(&mut predictor, 1, "And the LORD spake unto Moses");
    for _ in 0..2048 {
        activations.count(Phase::Prefill, header.layers.iter().map(|_| used.as_slice()));
    }
    predictor.record_usage(1, &activations.to_text().unwrap()).unwrap();
    assert_eq!(predictor.history_size().requests, 1, "the chat template and the tokenizer made tokens of it");
    come(&mut predictor, 2, "And Moses spake unto the LORD");
    predictor.predict_joint_usage().unwrap().unwrap().shares.values().to_vec()
}

#[test]
fn predictions_are_those_of_one_who_has_the_model() {
    let (header, bytes) = told();
    let summary = ModelSummary::from_bytes(&bytes.into()).unwrap();
    assert_eq!(summary.model(), header.model);
    let far = summary.open(PredictorOptions::default()).unwrap();
    let checkpoint = Checkpoint::open(demo()).unwrap();
    let embedding = embedding(&checkpoint);
    let prompts = PromptReader::open(&checkpoint).unwrap();
    let near =
        UsagePredictor::new(header.clone(), embedding, prompts, None, PredictorOptions::default()).unwrap();
    assert_eq!(expected(far, &header), expected(near, &header));
}

#[test]
fn invalid_model_summary_is_refused() {
    let (_, bytes) = told();
    let line = bytes.iter().position(|byte| *byte == b'\n').unwrap();
    let head = String::from_utf8(bytes[..line].to_vec()).unwrap();
    let with = |head: &str| [head.as_bytes(), &bytes[line..]].concat();
    for (broken, why) in [
        (Vec::new(), "nothing"),
        (bytes[..line].to_vec(), "the first line alone"),
        (bytes[..line + 100].to_vec(), "cut"),
        (with("{}"), "no head"),
        (with(&head.replace("\"version\":1", "\"version\":3")), "another version"),
        (with(&head.replace("\"experts\":16", "\"experts\":4000000000")), "experts that no model has"),
        (with(&head.replace("\"dimensions\":", "\"dimensions\":9")), "rows of another length"),
        (with(&head.replace("\"files\":[[\"tok", "\"files\":[[\"x\",1],[\"tok")), "a file of another kind"),
        (with(&head.replace("\"predictor\":0", "\"predictor\":18446744073709551615")), "more than there is"),
    ] {
        let opened = ModelSummary::from_bytes(&broken.into())
            .and_then(|summary| summary.open(PredictorOptions::default()));
        assert!(opened.is_err(), "{why}");
    }
    let unwanted = ModelSummary::from_bytes(&vec![b'\n'; remoe_usage::MAX_MODEL_SUMMARY + 1].into());
    assert!(matches!(unwanted, Err(ModelSummaryError::Form(_))));
}

/// A sketch preserves similarity: of 200 prompts, most nearest neighbours stay the same.
#[test]
fn sketches_keep_who_is_near() {
    let checkpoint = Checkpoint::open(demo()).unwrap();
    let tensor = checkpoint.embedding();
    let table = checkpoint.read(tensor).unwrap();
    let kind = if tensor.dtype.bytes() == 4 { EmbeddingType::F32 } else { EmbeddingType::Bf16 };
    let hidden = checkpoint.config().hidden_size;
    let sketched = kind.sketch(hidden, hidden / 2, &table);
    let whole = Embedding::new(hidden, kind, table.into()).unwrap();
    let sketch = Embedding::new(hidden / 2, EmbeddingType::F16, sketched.into()).unwrap();
    assert_eq!(sketch.vocabulary(), whole.vocabulary());
    let vocabulary = whole.vocabulary() as u32;
    // Prompts of ten topics, each with the tokens of a tenth of the vocabulary.
    let prompt = |number: u32| -> Vec<u32> {
        (0..40)
            .map(|at| (number % 10) * (vocabulary / 10) + (number * 7919 + at * 104_729) % (vocabulary / 10))
            .collect()
    };
    let dot = |one: &[f32], two: &[f32]| one.iter().zip(two).map(|(a, b)| a * b).sum::<f32>();
    let nearest = |embedding: &Embedding, of: u32| {
        let vector = |number| embedding.prompt_vector(&prompt(number)).unwrap();
        let asked = vector(of);
        let others = (0..200).filter(|other| *other != of);
        others.max_by(|a, b| dot(&asked, &vector(*a)).total_cmp(&dot(&asked, &vector(*b)))).unwrap()
    };
    let same_topic = (0..200).filter(|of| nearest(&sketch, *of) % 10 == *of % 10).count();
    let of_whole = (0..200).filter(|of| nearest(&whole, *of) % 10 == *of % 10).count();
    assert!(same_topic + 20 >= of_whole && same_topic > 100, "{same_topic} of {of_whole}");
}
