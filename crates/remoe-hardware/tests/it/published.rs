//! Predicted times beside published measurements.

use remoe_hardware::{Commitment, ListedNode, NodeTiming, Profile, ResidentWeights, node_shape};
use remoe_model::{Folder, Outline};
use remoe_planner::{
    Arrangement, ExpectedTimes, Rental, Request, Reserve, ResidentModel, Slo, SpotPolicy, rent,
};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Tokens where a measurement states none.
const PROMPT: f64 = 128.0;
const OUTPUT: f64 = 128.0;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Measurement {
    id: String,
    model: String,
    way: String,
    expert_bits: f64,
    rest_bits: f64,
    cpu: Option<MeasuredCpu>,
    gpu: Option<MeasuredGpu>,
    /// Layers with their experts on GPUs, where others have them on CPUs.
    gpu_layers: Option<f64>,
    prompt_tokens: Option<f64>,
    output_tokens: Option<f64>,
    batch: u32,
    metric: String,
    value: f64,
    source: String,
    date: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct MeasuredCpu {
    sockets: u32,
    cores: f64,
    #[serde(rename = "GBsPerSocket")]
    gbs_per_socket: f64,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct MeasuredGpu {
    count: u32,
    #[serde(rename = "GBs")]
    gbs: f64,
    teraflops: Option<f64>,
    link: Option<String>,
}

fn workspace(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn measurements() -> Vec<Measurement> {
    let text = std::fs::read_to_string(workspace("tests/fixtures/measurements.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

impl Measurement {
    fn weights(&self, outline: &Outline) -> ResidentWeights {
        let plain = ResidentWeights::of_outline(&outline.in_dtype("bfloat16"));
        let rest = plain.rest_parameters * self.rest_bits / 8.0;
        ResidentWeights {
            expert_bytes: plain.expert_parameters * self.expert_bits / 8.0,
            rest_bytes: rest,
            main_rest_bytes: rest,
            device_rest_bytes: rest,
            ..plain
        }
    }

    fn node(&self) -> ListedNode {
        let (cpu, gpu) = (self.cpu.as_ref(), self.gpu.as_ref());
        ListedNode {
            name: "node".to_owned(),
            // Two hardware threads of each core.
            vcpus: cpu.map_or(96.0, |cpu| 2.0 * cpu.cores),
            memory_gb: 50_000.0,
            sockets: cpu.map(|cpu| cpu.sockets),
            memory_bandwidth_gbs: cpu.map(|cpu| cpu.gbs_per_socket * f64::from(cpu.sockets)),
            gpus: gpu.map_or(0, |gpu| gpu.count),
            gpu_memory_gb: gpu.map(|_| 80.0),
            gpu_bandwidth_gbs: gpu.map(|gpu| gpu.gbs),
            gpu_teraflops: gpu.and_then(|gpu| gpu.teraflops),
            gpu_link_gbs: gpu.and_then(|gpu| gpu.link.as_deref()).map(|link| match link {
                "nvlink" => 300.0,
                _ => 20.0,
            }),
            per_hour: Some(1.0),
            max: Some(1),
            ..ListedNode::default()
        }
    }

    /// Times of the way that was measured, on the machine that it was measured on.
    fn expected(&self) -> ExpectedTimes {
        let folder = Folder::new(workspace("tests/fixtures/published").join(&self.model));
        let outline = Outline::open_in(&folder, None).unwrap();
        let facts = outline.in_dtype("bfloat16").inspection(&self.model);
        let weights = self.weights(&outline);
        let outside = facts.outside_bytes as f64 * self.rest_bits / 16.0;
        let rest_bytes = weights.rest_bytes + outside;
        let prior = Profile::prior(&facts, &facts.dtype);
        let request = Request {
            input_tokens: self.prompt_tokens.unwrap_or(PROMPT).max(1.0),
            output_tokens: self.output_tokens.unwrap_or(OUTPUT) - 1.0,
            max_input_tokens: None,
            max_output_tokens: None,
            concurrency: self.batch,
        };
        let mut shape =
            node_shape(&self.node(), &NodeTiming::default(), Commitment::OnDemand, &weights, None);
        shape.gpu_bytes = 1e15;
        if let Some(layers) = self.gpu_layers {
            // As much memory as this many layers need beside the rest and the requests.
            let tokens =
                f64::from(self.batch.next_power_of_two()) * (request.input_tokens + request.output_tokens);
            let experts = layers * facts.experts as f64 * weights.expert_bytes;
            let context = tokens * (weights.kv_bytes_per_token + weights.token_bytes);
            shape.gpu_bytes = (rest_bytes + context + experts * 1.0001) / f64::from(shape.gpus) / 0.92 + 1e6;
        }
        let rental = Rental {
            model: ResidentModel {
                layers: facts.moe_layers.len(),
                experts: facts.experts,
                top_k: facts.top_k,
                expert_bytes: weights.expert_bytes,
                rest_bytes,
                main_rest_bytes: rest_bytes,
                device_rest_bytes: rest_bytes,
                kv_bytes_per_token: weights.kv_bytes_per_token,
                kv_windowed: None,
                token_bytes: weights.token_bytes,
            },
            request,
            slo: Slo::new(1e6, 1e6),
            arrivals: None,
            starts: None,
            shapes: vec![shape],
            reserve: Reserve::default(),
            spot: SpotPolicy::Never,
            transport: prior.transport.of_rows(weights.token_bytes),
            runtime_bytes: prior.memory.main_bytes,
            fallback_bytes: 0.0,
            function_bytes: prior.memory.function_bytes,
            usage: None,
        };
        let way = match self.way.as_str() {
            "cpu" => Arrangement::Cpu,
            "gpu" => Arrangement::Gpu,
            _ => Arrangement::Offload,
        };
        let answer = rent(&rental).unwrap();
        let rival = answer.verdict.rivals.iter().find(|rival| rival.name == way).unwrap();
        assert!(rival.feasible, "{}: {}", self.id, rival.why);
        rival.expected.unwrap()
    }

    /// The predicted speed over the measured one.
    fn ratio(&self) -> f64 {
        let expected = self.expected();
        let step = if self.batch > 1 { expected.under_load.tpot_seconds } else { expected.tpot_seconds };
        let (batch, steps) = (f64::from(self.batch), self.output_tokens.unwrap_or(OUTPUT) - 1.0);
        match self.metric.as_str() {
            "decode_tps_per_request" => 1.0 / step / self.value,
            "tpot_ms" => self.value / 1e3 / step,
            "decode_tps_total" => batch / expected.busy_tpot_seconds / self.value,
            "prefill_tps" => self.prompt_tokens.unwrap() / expected.ttft_seconds / self.value,
            // A batch that begins together.
            "latency_s" => self.value / (batch * expected.ttft_seconds + steps * expected.busy_tpot_seconds),
            other => unreachable!("{}: {other}", self.id),
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Decode speeds are within a factor of two of every measurement, and right in the median of each way. Prefills depend
/// more on the engine than on the machine: on one machine two of them differ by a factor of 3.3.
#[test]
fn predictions_are_near_published_measurements() {
    let mut by_kind: BTreeMap<String, Vec<(f64, String)>> = BTreeMap::new();
    for one in measurements() {
        assert!(one.source.starts_with("https://") && !one.date.is_empty(), "{}", one.id);
        let kind = match (one.metric.as_str(), one.batch) {
            ("prefill_tps", _) => format!("{} prefill", one.way),
            (_, 1) => format!("{} decode", one.way),
            _ => format!("{} decode in batches", one.way),
        };
        by_kind.entry(kind).or_default().push((one.ratio(), one.id));
    }
    assert_eq!(by_kind.len(), 7);
    for (kind, ratios) in by_kind {
        let (middle, widest) =
            if kind.ends_with("prefill") { (0.6..1.4, 0.45..2.2) } else { (0.8..1.25, 0.5..2.0) };
        for (ratio, id) in &ratios {
            assert!(widest.contains(ratio), "{kind}: {ratio} {id}");
        }
        let count = ratios.len();
        let median = median(ratios.into_iter().map(|(ratio, _)| ratio).collect());
        println!("{kind}: {count} measurements, predicted over measured {median:.2} in the median");
        assert!(middle.contains(&median), "{kind}: {median}");
        assert!(count >= if kind == "gpu prefill" { 6 } else { 10 }, "{kind}: {count}");
    }
}
