//! `remoe eval` as its users see it.

use remoe_hardware::{Origin, Profile};
use remoe_model::Checkpoint;
use remoe_predictor::record::{ActivationRecord, DEFAULT_FILE_BYTES, RecordHeader, RecordWriter};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_remoe")).args(arguments).output().unwrap()
}

fn object(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Fails with the code of arguments and names the field.
fn refused(arguments: &[&str], field: &str, says: &str) {
    let output = run(&[&["eval", "--json"], arguments].concat());
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let error = &object(&output)["error"];
    assert_eq!(error["field"], field, "{error}");
    assert!(error["message"].as_str().unwrap().contains(says), "{error}");
}

/// Records whose first expert does most of the work.
fn records(path: &Path, model: &Path, count: u32) {
    let checkpoint = Checkpoint::open(model).unwrap();
    let facts = checkpoint.inspect().unwrap();
    let header = RecordHeader {
        model: checkpoint.fingerprint().unwrap().to_string(),
        layers: facts.moe_layers.iter().map(|&layer| layer as u32).collect(),
        experts: facts.experts as u32,
        top_k: facts.top_k as u32,
        dtype: facts.dtype,
        tokens: false,
    };
    let cells = header.cells();
    let mut writer = RecordWriter::new(Vec::new(), header, 0, DEFAULT_FILE_BYTES).unwrap();
    for n in 0..count {
        let prompt: Vec<u32> = (0..4 + n % 7).map(|t| (n * 5 + t * t) % facts.vocab_size as u32).collect();
        let counts = |first: u32| {
            (0..cells).map(|cell| if cell % facts.experts == 0 { first } else { 1 + n % 2 }).collect()
        };
        let record = ActivationRecord {
            prompt,
            prefill: counts(9),
            decode: counts(5),
            steps: 7,
            ..Default::default()
        };
        writer.append(&record).unwrap();
    }
    fs::write(path, writer.finish().unwrap()).unwrap();
}

#[test]
fn every_figure_becomes_a_table_a_csv_and_an_svg() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (file, predictor, out) = (at("records.npy"), at("predictor"), at("out"));
    let model = fixture("mixtral-basic");
    records(Path::new(&file), &model, 60);
    let model = model.to_str().unwrap();
    let built = run(&["predictor", "build", "--history", &file, "--model", model, "--out", &predictor]);
    assert!(built.status.success(), "{built:?}");

    let arguments = ["eval", "--model", model, "--records", &file, "--predictor", &predictor, "--out", &out];
    let output = run(&[&arguments[..], &["--json"]].concat());
    assert!(output.status.success(), "{output:?}");
    let report = object(&output);
    assert!(report["assumptions"]["machine"]["invoke_seconds"].is_number());
    let scenarios = report["scenarios"].as_array().unwrap();
    let names: Vec<&str> = scenarios.iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert!(
        names.contains(&"deepseek-v2-lite-narrow") && names.contains(&"checkpoint-enlarged-wide"),
        "{names:?}"
    );
    for scenario in scenarios {
        let folder = Path::new(&out).join(scenario["name"].as_str().unwrap());
        for strategy in scenario["figure_9"]["strategies"].as_array().unwrap() {
            assert_eq!(strategy["costs"].as_array().unwrap().len(), 50, "{strategy}");
        }
        for (figure, plots) in
            [("4", &["-decode", "-prefill"][..]), ("5", &[""]), ("9", &[""]), ("10", &[""]), ("11", &[""])]
        {
            let mut csv = csv::Reader::from_path(folder.join(format!("figure-{figure}.csv"))).unwrap();
            assert!(csv.headers().unwrap().len() > 1);
            assert!(csv.records().map(Result::unwrap).count() > 4, "figure {figure} of {folder:?}");
            for plot in plots {
                let text = fs::read_to_string(folder.join(format!("figure-{figure}{plot}.svg"))).unwrap();
                let svg = roxmltree::Document::parse(&text).unwrap();
                let drawn = svg.descendants().filter(|node| {
                    node.has_tag_name(("http://www.w3.org/2000/svg", "polyline"))
                        || node.has_tag_name(("http://www.w3.org/2000/svg", "rect"))
                });
                assert!(drawn.count() > 2, "figure {figure}{plot} of {folder:?}");
                assert!(
                    !text.contains("NaN") && !text.contains("inf"),
                    "figure {figure}{plot} of {folder:?}"
                );
            }
        }
    }
    // The page shows every figure that there is.
    let page = fs::read_to_string(Path::new(&out).join("README.md")).unwrap();
    let shown: Vec<&str> =
        page.split("](").filter_map(|part| part.split_once(".svg)")).map(|(path, _)| path).collect();
    assert_eq!(shown.len(), scenarios.len() * 6);
    for figure in shown {
        assert!(Path::new(&out).join(format!("{figure}.svg")).is_file(), "{figure}");
    }
    // What is measured, is measured where there is something to measure.
    let of = |name: &str| scenarios.iter().find(|one| one["name"] == name).unwrap();
    assert!(of("checkpoint-wide")["decisions"]["predict_seconds"].as_f64().unwrap() > 0.0);
    assert!(of("gpt2-moe-wide")["decisions"]["predict_seconds"].is_null());
    assert!(of("gpt2-moe-wide")["decisions"]["solve_seconds"].as_f64().unwrap() > 0.0);
    let tables = fs::read_to_string(Path::new(&out).join("tables.txt")).unwrap();
    for part in ["Assumptions", "figure 4:", "figure 5:", "figure 9:", "figure 10:", "figure 11:", "per hour"]
    {
        assert!(tables.contains(part), "{part}");
    }
}

#[test]
fn prices_that_cannot_be_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prices.yaml");
    let with = |text: &str, field: &str, says: &str| {
        fs::write(&path, text).unwrap();
        refused(&["--pricing", path.to_str().unwrap()], field, says);
    };
    with("cpuCoreHour: 0\nmemoryGBHour: 0.004\n", "cpuCoreHour", "above 0");
    with("cpuCoreMinute: 1\nmemoryGBHour: 0.004\n", "cpuCoreMinute", "unknown field");
    with("cpuCoreHour: 0.04\nmemoryGBHour: 0.004\ngpuHour: 2\n", "gpuMemoryMB", "required with gpuHour");
    let missing = folder.path().join("none.yaml");
    refused(&["--pricing", missing.to_str().unwrap()], "--pricing", "cannot read");
}

#[test]
fn profiles_of_another_model_or_cut_short_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("profile.json");
    let model = fixture("mixtral-basic");
    let facts = Checkpoint::open(fixture("mixtral-bf16")).unwrap().inspect().unwrap();
    let profile = Profile { origin: Origin::Measured, ..Profile::prior(&facts, &facts.dtype) };
    let text = serde_json::to_string(&profile).unwrap();
    let arguments = ["--model", model.to_str().unwrap(), "--profile", path.to_str().unwrap()];
    fs::write(&path, &text).unwrap();
    refused(&arguments, "model", "profile of another checkpoint");
    fs::write(&path, &text[..text.len() / 2]).unwrap();
    let output = run(&[&["eval", "--json"], &arguments[..]].concat());
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(object(&output)["error"]["message"].as_str().unwrap().contains("EOF"), "{output:?}");
}

#[test]
fn predictions_are_worth_what_plans_by_them_save() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (first, second, predictor, out) = (at("first.npy"), at("second.npy"), at("predictor"), at("out"));
    let model = fixture("mixtral-basic");
    records(Path::new(&first), &model, 30);
    records(Path::new(&second), &model, 3);
    let model = model.to_str().unwrap();
    let built = run(&["predictor", "build", "--history", &first, "--model", model, "--out", &predictor]);
    assert!(built.status.success(), "{built:?}");
    let arguments =
        ["eval", "--only", "prediction", "--model", model, "--predictor", &predictor, "--out", &out];
    let output = run(&[&arguments[..], &["--json", "--records", &first, &second]].concat());
    assert!(output.status.success(), "{output:?}");
    let report = object(&output);
    assert!(report["scenarios"].is_null() && report["map"].is_null());
    let worths = report["prediction"].as_array().unwrap();
    for workload in ["first", "second", "mixed", "hourly"] {
        let of: Vec<&Value> = worths.iter().filter(|one| one["workload"] == workload).collect();
        assert!(of.len() > 1, "one for each scenario");
        for worth in of {
            let rows = worth["rows"].as_array().unwrap();
            let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
            let means = ["the workload's mean", "recent usage", "the first hour's mean"];
            let planned_by =
                [&["oracle", "blend", "tokens", "sps"][..], &means, &["dop", "uniform"]].concat();
            assert_eq!(names, planned_by);
            assert_eq!(worth["turns"].is_null(), workload != "hourly", "{worth}");
            let remote = |name| {
                let row = rows.iter().find(|row| row["name"] == name).unwrap();
                (row["remote"].as_f64().unwrap(), row["remote_pairs"].as_f64().unwrap())
            };
            // All experts but the first are used alike: a planner that knows that one leaves it local.
            assert!(remote("oracle") <= remote("uniform"), "{worth}");
            assert!(remote("dop").0 <= remote("uniform").0 * (1.0 + 1e-9), "{worth}");
        }
    }
    let csv = fs::read_to_string(Path::new(&out).join("prediction/worth.csv")).unwrap();
    assert!(
        csv.starts_with("workload,scenario,planned_by")
            && csv.contains("mixed,checkpoint-enlarged-wide,oracle")
    );
    refused(&["--only", "prediction"], "--records", "remoe record");
}

#[test]
fn records_need_a_model_and_a_predictor() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("records.npy");
    let model = fixture("mixtral-basic");
    records(&file, &model, 3);
    let (file, model) = (file.to_str().unwrap(), model.to_str().unwrap());
    refused(&["--records", file], "--model", "required");
    let none = folder.path().join("none");
    let arguments = ["--model", model, "--records", file, "--predictor", none.to_str().unwrap()];
    refused(&arguments, "--predictor", "remoe predictor build");
    let other = fixture("mixtral-bf16");
    refused(&["--model", other.to_str().unwrap(), "--records", file], "--predictor", "remoe predictor build");
}

#[test]
fn the_map_becomes_tables_csv_files_and_pictures() {
    let folder = tempfile::tempdir().unwrap();
    let (list, out) = (folder.path().join("nodes.yaml"), folder.path().join("out"));
    let text = "source: a test\nnodes:\n  \
                - {name: small, vcpus: 16, memoryGB: 64, perHour: 0.8}\n  \
                - {name: large, vcpus: 64, memoryGB: 512, perHour: 5}\n";
    fs::write(&list, text).unwrap();
    let (list, out) = (list.to_str().unwrap(), out.to_str().unwrap());
    let output = run(&["eval", "--only", "map", "--nodes", list, "--out", out, "--json"]);
    assert!(output.status.success(), "{output:?}");
    let answer = object(&output);
    // Only what was asked for.
    assert!(answer.get("scenarios").is_none() && answer["map"].get("prices").is_none(), "{answer}");
    assert!(answer["map"]["nodes"].as_str().unwrap().contains("a test"));
    let regimes = answer["map"]["regimes"].as_array().unwrap();
    let names: Vec<&str> = regimes.iter().map(|regime| regime["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["nodes-all", "nodes-patient", "nodes-rare", "nodes-modest"]);
    let folder = Path::new(out).join("map");
    let models = answer["map"]["models"].as_array().unwrap().len();
    for regime in regimes {
        let name = regime["name"].as_str().unwrap();
        let cells = regime["cells"].as_array().unwrap();
        assert_eq!(cells.len() % models, 0);
        // A row per cell and way, and a tile per cell.
        let rows = fs::read_to_string(folder.join(format!("{name}.csv"))).unwrap().lines().count();
        assert_eq!(rows, 1 + 6 * cells.len(), "{name}");
        let svg = fs::read_to_string(folder.join(format!("{name}.svg"))).unwrap();
        let svg = roxmltree::Document::parse(&svg).unwrap();
        let framed = svg.descendants().filter(|node| node.attribute("stroke-width") == Some("3")).count();
        let paying =
            cells.iter().filter(|cell| matches!(cell["best"].as_str(), Some("sliced" | "layers"))).count();
        assert_eq!(framed, paying, "{name}");
    }
    let page = fs::read_to_string(folder.join("README.md")).unwrap();
    assert!(names.iter().all(|name| page.contains(&format!("({name}.svg)"))), "{page}");
    let tables = fs::read_to_string(folder.join("tables.txt")).unwrap();
    assert!(tables.contains("Map of regimes") && tables.contains("Modest nodes"), "{tables}");
    // The figures of the paper are not written beside it.
    assert_eq!(fs::read_dir(out).unwrap().count(), 1);
}

#[test]
fn a_map_needs_prices() {
    refused(&["--only", "map"], "--only", "needs prices");
    refused(&["--only", "map", "--nodes", "/nowhere/nodes.yaml"], "--nodes", "cannot read");
}
