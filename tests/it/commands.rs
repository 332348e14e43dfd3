//! `remoe logits` and `remoe generate` with real functions, as scripts use them.

use remoe_test_support::command;
use remoe_test_support::fixture::{ModelFixture, REFUSED};
use remoe_test_support::placement::pairs_per_position;
use serde_json::{Value, json};

/// Runs `remoe COMMAND --json --model MODEL` with `arguments`. Returns the exit code and the printed object.
async fn remoe(command: &str, model: &ModelFixture, arguments: &[&str]) -> (Option<i32>, Value) {
    let folder = model.folder.to_str().unwrap();
    command::remoe(&[&[command, "--model", folder], arguments].concat()).await
}

fn listed(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

#[tokio::test(flavor = "multi_thread")]
async fn generate_says_what_it_made_and_where() {
    let model = ModelFixture::fixture("qwen2moe-norm");
    let prompt = model.expected().unwrap().prompts.pop().unwrap();
    let tokens = prompt.greedy.len();
    let ids = listed(&prompt.ids);
    let arguments = ["--prompt-ids", &ids, "--max-tokens", &tokens.to_string(), "--ignore-eos"];
    for (placement, is_remote) in [(&[][..], false), (&["--remote-ratio", "0.5", "--replicas", "2"], true)] {
        let arguments = [&arguments, placement, &["--dtype", "float32"]].concat();
        let (code, answer) = remoe("generate", &model, &arguments).await;
        assert_eq!(code, Some(0), "{answer}");
        assert_eq!(answer["prompt_ids"], serde_json::json!(prompt.ids));
        assert_eq!(answer["tokens"], serde_json::json!(prompt.greedy));
        assert_eq!((&answer["text"], &answer["finish_reason"]), (&Value::Null, &"length".into()));
        assert_eq!(answer["usage"]["total_tokens"], prompt.ids.len() + tokens);
        let positions = (prompt.ids.len() + tokens - 1) as u64;
        assert_eq!(answer["forwarded_positions"], positions);
        let experts = |place: &str| answer["experts"][place].as_u64().unwrap();
        let pairs = positions * pairs_per_position(&model.checkpoint());
        assert_eq!(experts("local") + experts("remote"), pairs, "{answer}");
        assert_eq!(experts("remote") > 0, is_remote, "{answer}");
        assert_eq!(experts("fallback") + experts("retries"), 0, "{answer}");
        for timing in ["load_s", "ttft_s", "prefill_s", "decode_s"] {
            assert!(answer["timings"][timing].as_f64().unwrap() > 0.0, "{timing}: {answer}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn logits_are_those_of_the_reference() {
    let model = ModelFixture::fixture("mixtral-basic");
    let prompt = model.expected().unwrap().prompts.pop().unwrap();
    let arguments = ["--prompt-ids", &listed(&prompt.ids), "--remote-ratio", "0.25"];
    let (code, answer) = remoe("logits", &model, &arguments).await;
    assert_eq!(code, Some(0), "{answer}");
    assert_eq!(answer["argmax"], prompt.argmax);
    assert_eq!(answer["last_logits"].as_array().unwrap().len(), prompt.last_logits.len());
    let routing = answer["routing"].as_array().unwrap();
    assert_eq!(routing.len(), prompt.routing.len());
    for (layer, expected) in routing.iter().zip(&prompt.routing) {
        let tokens = layer.as_array().unwrap();
        assert_eq!(tokens.len(), expected.len());
        for (token, expected) in tokens.iter().zip(expected) {
            assert_eq!(token["experts"], serde_json::json!(expected.experts));
            assert_eq!(token["weights"].as_array().unwrap().len(), expected.weights.len());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_computed_is_refused_by_name() {
    for (name, field) in REFUSED {
        for command in ["generate", "logits", "up", "inspect"] {
            let prompt: &[&str] =
                if matches!(command, "generate" | "logits") { &["--prompt-ids", "1"] } else { &[] };
            let (code, answer) = remoe(command, &ModelFixture::fixture(name), prompt).await;
            assert_eq!(code, Some(4), "{command}: {answer}");
            let error = &answer["error"];
            assert_eq!((&error["code"], &error["field"]), (&"checkpoint".into(), &field.into()), "{answer}");
            assert!(error["path"].as_str().unwrap().ends_with("config.json"), "{answer}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn quantised_experts_foresee_a_text_nearly_as_well() {
    let model = ModelFixture::demo();
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "In the beginning God created the heaven and the earth. ".repeat(4)).unwrap();
    let (code, answer) = remoe("eval", &model, &["--perplexity", text.to_str().unwrap()]).await;
    assert_eq!(code, Some(0), "{answer}");
    let of = |form: usize, name: &str| {
        assert_eq!(answer["perplexity"][form]["experts"], name, "{answer}");
        answer["perplexity"][form]["perplexity"].as_f64().unwrap()
    };
    let (computed, int8, int4) = (of(0, "as computed"), of(1, "int8"), of(2, "int4"));
    let (throughout, mxfp4) = (of(3, "int4"), of(4, "mxfp4"));
    assert_eq!(answer["perplexity"][3]["dense"], "int4", "{answer}");
    assert!(computed > 1.0 && int8 != computed && int4 != int8 && mxfp4 != int4, "{answer}");
    assert!((int8 / computed).ln().abs() < 0.01 && (int4 / computed).ln().abs() < 0.1, "{answer}");
    assert!(throughout != int4 && (throughout / computed).ln().abs() < 0.15, "{answer}");
    assert!((mxfp4 / computed).ln().abs() < 0.2, "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn run_takes_penalty_and_least_share_from_the_model() {
    let demo = ModelFixture::demo();
    let folder = tempfile::tempdir().unwrap();
    for file in
        ["config.json", "chat_template.jinja", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    {
        std::os::unix::fs::symlink(demo.folder.join(file), folder.path().join(file)).unwrap();
    }
    let config = |more: Value| {
        let mut config = json!({"do_sample": true, "temperature": 1.0, "eos_token_id": [1, 0]});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        std::fs::write(folder.path().join("generation_config.json"), config.to_string()).unwrap();
    };
    let tokens = async |flags: &[&str]| {
        let place = folder.path().to_str().unwrap();
        let (code, answer) =
            command::remoe(&[&["run", place, "What is a lake?", "--max-tokens", "24"], flags].concat()).await;
        assert_eq!(code, Some(0), "{answer}");
        answer["answers"][0]["tokens"].clone()
    };
    config(json!({}));
    let plain = tokens(&[]).await;
    for (field, value, flag, off) in [
        ("repetition_penalty", json!(3.0), "--repetition-penalty", "1"),
        ("min_p", json!(0.5), "--min-p", "0"),
    ] {
        config(json!({}));
        let flagged = tokens(&[flag, &value.to_string()]).await;
        assert_ne!(flagged, plain, "{field} changes this answer");
        config(json!({ field: value }));
        assert_eq!(tokens(&[]).await, flagged, "{field} of the model");
        assert_eq!(tokens(&[flag, off]).await, plain, "{flag} overrides the model's");
    }
}
