//! `remoe record`: records equal the model's actual routing.

use remoe_predictor::record::{ActivationRecord, RecordHeader, RecordReader};
use remoe_predictor::{Activations, Phase};
use remoe_test_support::binaries::workspace;
use remoe_test_support::command::remoe;
use remoe_test_support::deadline::{SOON, until};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::main_http::MainHttp;
use remoe_test_support::raw;
use serde_json::Value;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

const PROMPTS: [&str; 3] = [
    "In the beginning God created the heaven and the earth.",
    "A protocol is a set of rules",
    "def main():\n    return 0",
];

struct RecordFixture {
    folder: tempfile::TempDir,
    model: String,
}

impl RecordFixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let lines: Vec<String> =
            PROMPTS.iter().map(|prompt| serde_json::json!({ "prompt": prompt }).to_string()).collect();
        std::fs::write(folder.path().join("prompts.jsonl"), lines.join("\n")).unwrap();
        Self { folder, model: workspace().join("demo/model").to_str().unwrap().to_owned() }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// Records the prompts in file `name`.
    async fn record(&self, name: &str, arguments: &[&str]) -> (Option<i32>, Value) {
        let (prompts, out) = (self.path("prompts.jsonl"), self.path(name));
        let command = ["record", "--model", &self.model, "--prompts", &prompts, "--out", &out];
        remoe(&[&command[..], &["--max-tokens", "12"], arguments].concat()).await
    }

    /// Returns the records in file `name`, in the order of the prompts.
    fn read(&self, name: &str) -> (RecordHeader, Vec<ActivationRecord>) {
        let file = File::open(self.folder.path().join(name)).unwrap();
        let mut reader = RecordReader::new(BufReader::new(file)).unwrap();
        let mut records: Vec<_> = reader.by_ref().map(Result::unwrap).collect();
        records.sort_by(|a, b| a.prompt.cmp(&b.prompt));
        (reader.header().clone(), records)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_say_which_experts_the_tokens_had() {
    let case = RecordFixture::new();
    let (code, summary) = case.record("counts.npy", &["--dtype", "float32"]).await;
    assert_eq!((code, &summary["records"]), (Some(0), &3.into()), "{summary}");
    let (header, records) = case.read("counts.npy");
    assert!(!header.tokens);
    let (layers, experts, top_k) = (header.layers.len(), header.experts as usize, header.top_k);
    let mut generated = 0;
    for record in &records {
        let ids: Vec<String> = record.prompt.iter().map(u32::to_string).collect();
        let ids = ids.join(",");
        let command = ["logits", "--model", &case.model, "--dtype", "float32", "--prompt-ids", &ids];
        let (_, logits) = remoe(&command).await;
        let mut expected = vec![0; layers * experts];
        for (layer, tokens) in logits["routing"].as_array().unwrap().iter().enumerate() {
            for token in tokens.as_array().unwrap() {
                for expert in token["experts"].as_array().unwrap() {
                    expected[layer * experts + expert.as_u64().unwrap() as usize] += 1;
                }
            }
        }
        assert_eq!(record.prefill, expected);
        for counts in record.decode.chunks(experts) {
            assert_eq!(counts.iter().sum::<u32>(), record.steps * top_k);
        }
        generated += u64::from(record.steps) + 1;
    }
    assert_eq!(summary["generated_tokens"], generated);

    // Placement changes nothing. The experts of all tokens sum to the counts.
    let (code, _) =
        case.record("tokens.npy", &["--dtype", "float32", "--tokens", "--remote-ratio", "0.5"]).await;
    assert_eq!(code, Some(0));
    let (header, with_tokens) = case.read("tokens.npy");
    assert!(header.tokens);
    for (record, other) in with_tokens.iter().zip(&records) {
        assert_eq!((&record.prefill, &record.decode), (&other.prefill, &other.decode));
        let ids = record.experts.as_ref().unwrap();
        let rows = record.prompt.len() + record.steps as usize;
        assert_eq!(ids.len(), layers * rows * top_k as usize);
        for (layer, ids) in ids.chunks(rows * top_k as usize).enumerate() {
            let (prompt, decode) = ids.split_at(record.prompt.len() * top_k as usize);
            for (ids, counts) in [(prompt, &record.prefill), (decode, &record.decode)] {
                let mut counted = vec![0; experts];
                ids.iter().for_each(|&id| counted[usize::from(id)] += 1);
                assert_eq!(counted, counts[layer * experts..][..experts]);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn record_file_resumes_after_a_crash_for_one_model() {
    let case = RecordFixture::new();
    assert_eq!(case.record("history.npy", &[]).await.0, Some(0));
    let path = case.folder.path().join("history.npy");
    let whole = std::fs::metadata(&path).unwrap().len();
    // The last record is incomplete.
    File::options().write(true).open(&path).unwrap().set_len(whole - 7).unwrap();
    assert_eq!(case.record("history.npy", &[]).await.0, Some(0));
    let (_, records) = case.read("history.npy");
    assert_eq!(records.len(), 5, "two that were whole and three new ones");

    let before = std::fs::read(&path).unwrap();
    let (code, answer) = case.record("history.npy", &["--dtype", "float32"]).await;
    assert_eq!(code, Some(1), "{answer}");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("dtype") && message.contains("float32"), "{message}");
    assert_eq!(std::fs::read(&path).unwrap(), before, "a refused file stays as it is");
}

#[tokio::test(flavor = "multi_thread")]
async fn prompt_sets_are_read_with_care() {
    let case = RecordFixture::new();
    let wrong: [(&str, &str); 3] = [
        ("{\"prompt\": \"a\"}\n{\"question\": 1}\n", "line 2"),
        ("\n\n", "no prompt"),
        ("{\"prompt\": \"a\"\n", "line 1"),
    ];
    for (text, named) in wrong {
        std::fs::write(case.path("prompts.jsonl"), text).unwrap();
        let (code, answer) = case.record("none.npy", &[]).await;
        assert_eq!((code, &answer["error"]["field"]), (Some(2), &"--prompts".into()), "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(named), "{answer}");
        assert!(!Path::new(&case.path("none.npy")).exists());
    }
}

/// The activations reported to a gateway equal the record of the request, streamed or not.
#[tokio::test(flavor = "multi_thread")]
async fn reported_activations_equal_the_record() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("records.npy");
    let arguments = ["--record-activations", file.to_str().unwrap()];
    let server = MainHttp::start(&ModelFixture::demo().folder, &arguments, &[]).await;
    let ask = async |stream: bool| {
        let body =
            serde_json::json!({"prompt": PROMPTS[0], "max_tokens": 6, "ignore_eos": true, "stream": stream});
        let asked = "TE: trailers\r\nConnection: close, TE\r\nx-remoe-timing: load;dur=1\r\nx-remoe-activations: counts\r\nHost";
        let request = raw::post("/v1/completions", &body.to_string()).replacen("Host", asked, 1);
        let mut connection = raw::Connection::open(server.address).await;
        connection.write(request).await.unwrap();
        let head = connection.head().await.unwrap();
        let told = head.header("x-remoe-activations").to_owned();
        let rest = String::from_utf8_lossy(&connection.rest().await).into_owned();
        let trailer = rest.lines().find_map(|line| line.strip_prefix("x-remoe-activations: "));
        trailer.map_or(told, |trailer| trailer.trim().to_owned())
    };
    let told = [ask(false).await, ask(true).await];
    let records = until(SOON, "two records", async || {
        let mut reader = RecordReader::new(BufReader::new(File::open(&file).ok()?)).ok()?;
        let header = reader.header().clone();
        let records: Vec<_> = reader.by_ref().map(Result::unwrap).collect();
        (records.len() == 2).then_some((header, records))
    });
    let (header, records) = records.await;
    for (text, record) in told.iter().zip(&records) {
        let told = Activations::from_text(text, &header).unwrap();
        assert_eq!(told.counts(Phase::Prefill), record.prefill);
        assert_eq!(told.counts(Phase::Decode), record.decode);
        let positions = Phase::ALL.map(|phase| told.positions(phase));
        assert_eq!(positions, [record.prompt.len() as u64, 5]);
    }
}
