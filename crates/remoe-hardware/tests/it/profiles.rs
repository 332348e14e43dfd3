//! Profiles and prices as files, and the problems made from them.

use crate::common;

use common::{measured, model, wishes};
use remoe_hardware::{DeploymentRequirements, Prices, ProblemError, Profile, problem};
use remoe_model::kv_pages::WindowedLayers;
use remoe_model::{DenseDtype, ExpertsDtype, Inspection};
use remoe_planner::{
    Billing, Contention, CpuProfile, Device, GpuProfile, Limits, MainSize, Options, PlanDraft, Request,
    evaluate, preallocate, solve,
};
use serde_json::{Value, json};

#[test]
fn a_profile_is_read_as_it_was_written() {
    let profile = measured();
    let text = serde_json::to_string(&profile).unwrap();
    assert_eq!(Profile::from_json(&text), Ok(profile));
    // Cut anywhere it is no profile.
    for end in (0..text.len()).step_by(97) {
        assert!(Profile::from_json(&text[..end]).is_err(), "{end}");
    }
}

#[test]
fn what_is_wrong_with_a_profile_is_named() {
    let contention = Some(Contention { functions: 2, step: 1.3, prefill: 1.0 });
    let written = serde_json::to_value(Profile { contention, ..measured() }).unwrap();
    let cases: [(&str, Value, &str); 12] = [
        ("/version", json!(2), "version"),
        ("/expert_seconds/tokens/0", json!(2.0), "expert_seconds.tokens"),
        ("/expert_seconds/vcpus/1", json!(0.1), "expert_seconds.vcpus"),
        ("/expert_seconds/seconds/1/2", json!(-1.0), "expert_seconds.seconds[1][2]"),
        ("/nonexpert_seconds/seconds/0", json!([1.0]), "nonexpert_seconds.seconds[0]"),
        ("/transport/bytes_per_second", json!(0.0), "transport.bytes_per_second"),
        ("/contention/functions", json!(1), "contention.functions"),
        ("/contention/step", json!(0.5), "contention.step"),
        ("/contention/prefill", json!(1e4), "contention.prefill"),
        ("/starts/main/process_seconds", json!(-1.0), "starts.main.process_seconds"),
        ("/memory/function_bytes", json!(1e300), "memory.function_bytes"),
        ("/machine/cores", json!("two"), "machine.cores"),
    ];
    for (pointer, value, field) in cases {
        let mut changed = written.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        let error = Profile::from_json(&changed.to_string()).unwrap_err();
        assert_eq!(error.field, field, "{error}");
    }
    let mut unknown = written;
    unknown["speed"] = json!(3);
    assert_eq!(Profile::from_json(&unknown.to_string()).unwrap_err().field, "speed");
}

#[test]
fn a_profile_of_something_else_is_refused() {
    let profile = measured();
    assert_eq!(profile.check_model(&model(), "bfloat16"), Ok(()));
    let other = Inspection { fingerprint: "cd".repeat(32), ..model() };
    assert!(matches!(profile.check_model(&other, "bfloat16"), Err(ProblemError::ForeignModel { .. })));
    assert!(matches!(profile.check_model(&model(), "float32"), Err(ProblemError::ForeignDtype { .. })));
    let quantised = Inspection { experts_dtype: Some(ExpertsDtype::Int8), ..model() };
    assert!(matches!(profile.check_model(&quantised, "bfloat16"), Err(ProblemError::ForeignDtype { .. })));
    assert_eq!(Profile::prior(&model(), "bfloat16").check_model(&other, "float32"), Ok(()));
}

#[test]
fn a_problem_has_every_byte_and_second_once() {
    let contention = Some(Contention { functions: 2, step: 1.3, prefill: 1.1 });
    let (facts, profile) = (model(), Profile { contention, ..measured() });
    let problem = problem(&facts, &profile, &wishes()).unwrap();
    assert_eq!((problem.device, problem.contention), (Device::Cpu, contention));
    // The dense layer is part of the one after it.
    let bytes: Vec<f64> = problem.layers.iter().map(|layer| layer.nonexpert_bytes).collect();
    assert_eq!(bytes, [8e6, 2e6, 3e6]);
    let cache: f64 = problem.layers.iter().map(|layer| layer.kv_bytes_per_token).sum();
    assert_eq!((cache, problem.head_bytes, problem.token_bytes), (4000.0, 5e6, 2048.0));
    let at = |table: &CpuProfile| table.seconds[2][1];
    let parts: f64 =
        problem.layers.iter().map(|layer| at(layer.cpu_nonexpert_seconds.as_ref().unwrap())).sum();
    assert!((parts / at(&profile.nonexpert_seconds) - 1.0).abs() < 1e-12);
    assert_eq!(problem.runtime_bytes, profile.memory.main_bytes + 4e7);
    // It can be planned, and the plan can be evaluated.
    preallocate(&problem).unwrap();
    let answer = solve(&problem, None, &Options::default()).unwrap();
    let evaluation = evaluate(&problem, &PlanDraft::from(&answer.plan), false).unwrap();
    assert_eq!(evaluation.total_cost, answer.evaluation.total_cost);
}

/// Two of four layers hold a window of 128, 2,048 rows of a prefill, and the positions that pages round up to.
#[test]
fn windowed_layers_take_the_tokens_that_they_hold() {
    let model = Inspection { kv_windowed: Some(WindowedLayers { layers: 2, window: 128 }), ..model() };
    let request = Request { max_input_tokens: Some(100_000.0), concurrency: 8, ..wishes().request };
    let problem = problem(&model, &measured(), &DeploymentRequirements { request, ..wishes() }).unwrap();
    let bytes = 2000.0 * 100_050.0 + 2000.0 * 2208.0;
    assert!((problem.kv_bytes_in_memory() - bytes).abs() < 1.0);
    assert_eq!(model.resident_kv("bfloat16").of(100_050) as f64, bytes);
    let size = MainSize::of(&problem, 1e9, None);
    assert_eq!(size.kv_cache_bytes, bytes + 8.0 * 31.0 * 4000.0);
    assert!(size.memory_bytes > 1e9 + size.kv_cache_bytes);
}

#[test]
fn weights_in_another_dtype_take_other_room() {
    let profile = Profile::prior(&model(), "float32");
    let problem = problem(&model(), &profile, &wishes()).unwrap();
    assert_eq!((problem.layers[0].expert_bytes, problem.token_bytes), (2e7, 4096.0));
}

/// Experts alone: 34 and 18 bytes for 32 weights, 2 bytes each as they are stored.
#[test]
fn quantised_experts_take_less_room_and_time() {
    let sizes = |experts_dtype| {
        let model = Inspection { experts_dtype, ..model() };
        let profile = Profile::prior(&model, "bfloat16");
        assert_eq!(profile.check_model(&model, "bfloat16"), Ok(()));
        let problem = problem(&model, &profile, &wishes()).unwrap();
        let layer = &problem.layers[0];
        // One token, which is bound by reading, and the most tokens, which are bound by arithmetic.
        let seconds = &layer.expert_seconds.seconds;
        let last = seconds.last().unwrap()[0];
        assert_eq!(model.resident_total_bytes("bfloat16"), 18_000_000 + 24 * layer.expert_bytes as u64);
        (layer.expert_bytes, layer.nonexpert_bytes, problem.token_bytes, seconds[0][0], last)
    };
    let (bytes, others, token, one, most) = sizes(None);
    for (experts, share) in [(ExpertsDtype::Int8, 34.0 / 64.0), (ExpertsDtype::Int4, 18.0 / 64.0)] {
        let quantised = sizes(Some(experts));
        assert_eq!(
            (quantised.0, quantised.1, quantised.2, quantised.4),
            (bytes * share, others, token, most)
        );
        assert!(quantised.3 < one, "{quantised:?}");
    }
}

/// But for routers (8 outputs of 1024 elements) and what is neither embedding nor head (1000 rows of them each, once where they
/// are tied), and not on a GPU.
#[test]
fn other_weights_may_be_quantised_as_well() {
    let int8 = |bytes: u64, plain: u64| plain + (bytes - plain).div_ceil(64) * 34;
    let model = Inspection { dense_dtype: Some(DenseDtype::Int8), ..model() };
    assert_eq!(
        model.resident_layer_bytes("bfloat16"),
        [int8(7_000_000, 0), int8(1_000_000, 16_384), int8(2_000_000, 16_384), int8(3_000_000, 16_384)]
    );
    let outside = int8(5_000_000, 5_000_000 - 2 * 2_048_000);
    assert_eq!(model.resident_outside_bytes("bfloat16"), outside);
    let tied = Inspection { outside_bytes: 2_148_000, ..model.clone() };
    assert_eq!(tied.resident_outside_bytes("bfloat16"), int8(2_148_000, 100_000));
    let of_profile = |profile: Profile| {
        let problem = problem(&model, &profile, &wishes()).unwrap();
        (problem.layers[1].nonexpert_bytes, problem.head_bytes)
    };
    let profile = Profile::prior(&model, "bfloat16");
    assert_eq!(profile.model.precision(), "bfloat16-dense-int8");
    let plain = Profile::prior(&Inspection { dense_dtype: None, ..model.clone() }, "bfloat16");
    assert!(profile.nonexpert_seconds.seconds[0][0] < plain.nonexpert_seconds.seconds[0][0]);
    assert_eq!(of_profile(profile), (int8(2_000_000, 16_384) as f64, outside as f64));
}

#[test]
fn the_prior_goes_by_the_bytes_that_are_computed_with() {
    let seconds = |model: &Inspection, dtype: &str| Profile::prior(model, dtype).expert_seconds.seconds[0][0];
    let stored = |dtype: &str| Inspection { dtype: dtype.to_owned(), ..model() };
    let as_stored = seconds(&stored("bfloat16"), "bfloat16");
    assert_eq!(seconds(&stored("bfloat16"), "float32"), 2.0 * as_stored);
    assert_eq!(seconds(&stored("float32"), "bfloat16"), 0.5 * as_stored);
    assert_eq!(seconds(&stored("float16"), "bfloat16"), as_stored);
}

#[test]
fn the_prior_starts_functions_by_the_bytes_at_rest() {
    let seconds = |experts_dtype: Option<ExpertsDtype>, dtype: &str| {
        let model = Inspection { experts_dtype, ..model() };
        let starts = Profile::prior(&model, dtype).starts;
        let main = starts.main.seconds(model.resident_total_bytes(dtype) as f64);
        (main, starts.remote.seconds(3.0 * model.resident_expert_bytes(dtype) as f64))
    };
    // Three experts of 10 MB, and all of 258 MB.
    let at_rest = (3.0 + 2.58e8 / 2e8, 3.0 + 3e7 / 2e8);
    for dtype in ["bfloat16", "float32"] {
        for experts in [None, Some(ExpertsDtype::Int8), Some(ExpertsDtype::Int4)] {
            let (main, remote) = seconds(experts, dtype);
            assert!((main - at_rest.0).abs() < 1e-9 && (remote - at_rest.1).abs() < 1e-9, "{main} {remote}");
        }
    }
}

#[test]
fn the_prior_of_a_gpu_plans_for_one() {
    let profile = Profile::prior_on_gpu(&model(), "bfloat16");
    Profile::from_json(&serde_json::to_string(&profile).unwrap()).unwrap();
    let prices = Prices { gpu_hour: Some(2.5), gpu_memory_mb: Some(16_000.0), ..Prices::default() };
    let limits = Limits { gpu_bytes: Some(1.6e10), ..wishes().limits };
    let wishes = DeploymentRequirements { pricing: prices.pricing().unwrap(), limits, ..wishes() };
    let problem = problem(&model(), &profile, &wishes).unwrap();
    assert_eq!(problem.device, Device::Gpu);
    // 18 MB of weights outside of experts: read for every token, and multiplied with for each of a prompt.
    let step: f64 = problem.layers.iter().map(|layer| layer.nonexpert_decode_seconds).sum();
    assert!((step - (4.0 * 3e-4 + 1.8e7 / 1.6e11)).abs() < 1e-9, "{step}");
    assert_eq!(problem.swap_seconds.per_token, 2048.0 / 8e9);
    let on_cpu = one_vcpu(&problem);
    assert!(on_cpu > step, "a GPU is taken to be faster than one vCPU");
    let baselines = solve(&problem, None, &Options::default()).unwrap().baselines;
    let (gpu, fetch) = (baselines.gpu.unwrap(), baselines.fetch.unwrap());
    // Two experts of 10 MB a token in each of three layers.
    let experts = 3.0 * 2.0 * (3e-5 + 1e7 / 1.6e11);
    // And the keys and values of the context.
    let context = wishes.request.input_tokens + (wishes.request.output_tokens + 1.0) / 2.0;
    let cache: f64 = problem.layers.iter().map(|layer| layer.kv_bytes_per_token).sum();
    let attention = context * cache / 1.6e11;
    assert!((gpu.tpot_seconds - step - experts - attention).abs() < 1e-9, "{gpu:?}");
    assert!(fetch.total_cost > 0.0);
}

#[test]
fn gpu_expert_times_are_measured_or_assumed_only_with_a_gpu() {
    let prices = Prices { gpu_hour: Some(2.5), gpu_memory_mb: Some(16_000.0), ..Prices::default() };
    let wishes = DeploymentRequirements { pricing: prices.pricing().unwrap(), ..wishes() };
    let on_gpu = |profile: &Profile| {
        let layers = problem(&model(), profile, &wishes).unwrap().layers;
        layers[0].gpu_expert_seconds.clone()
    };
    let assumed = Profile::prior_on_gpu(&model(), "bfloat16");
    let measured = Profile { gpu_expert_seconds: None, ..assumed.clone() };
    assert_eq!(on_gpu(&measured), assumed.gpu_expert_seconds);
    let stated = GpuProfile { tokens: vec![1.0, 64.0], seconds: vec![1e-4, 2e-4] };
    assert_eq!(
        on_gpu(&Profile { gpu_expert_seconds: Some(stated.clone()), ..assumed.clone() }),
        Some(stated)
    );
    assert_eq!(on_gpu(&Profile { device: None, ..assumed }), None);
}

#[test]
fn a_gpu_without_a_price_is_refused() {
    let profile = Profile::prior_on_gpu(&model(), "bfloat16");
    let refused = problem(&model(), &profile, &wishes()).unwrap_err();
    assert_eq!(refused, ProblemError::NoGpuPrice);
    assert!(refused.to_string().contains("gpuHour"), "{refused}");
}

#[test]
fn prices_of_gpus_change_nothing_on_cpus() {
    let gpus = Prices { gpu_hour: Some(2.5), gpu_memory_mb: Some(16_000.0), ..Prices::default() };
    let answer = |prices: Prices| {
        let wishes = DeploymentRequirements { pricing: prices.pricing().unwrap(), ..wishes() };
        let problem = problem(&model(), &measured(), &wishes).unwrap();
        solve(&problem, None, &Options::default()).unwrap()
    };
    let (with, without) = (answer(gpus), answer(Prices::default()));
    assert_eq!((with.plan, with.evaluation), (without.plan, without.evaluation));
}

/// Seconds of one decode step of the non-expert part on one vCPU.
fn one_vcpu(problem: &remoe_planner::Problem) -> f64 {
    let on_cpus = problem.layers.iter().filter_map(|layer| layer.cpu_nonexpert_seconds.as_ref());
    on_cpus.map(|table| table.seconds[0][2]).sum()
}

#[test]
fn a_model_without_experts_has_nothing_to_plan() {
    let dense = Inspection { moe_layers: Vec::new(), experts: 0, ..model() };
    assert!(matches!(problem(&dense, &measured(), &wishes()), Err(ProblemError::NoExperts { .. })));
}

#[test]
fn prices_have_the_units_of_bills() {
    let text =
        "billing: Invocation\ncpuCoreHour: \"0.03\"\nmemoryGBHour: 0.006\ngpuHour: 3.6\ngpuMemoryMB: 80000\n";
    let pricing = Prices::from_yaml(text).unwrap().pricing().unwrap();
    assert!((pricing.cpu_per_gb_second - 1e-5).abs() < 1e-18);
    // Memory that brings no core.
    assert!((pricing.memory_per_gb_second.unwrap() - 0.006 / 3600.0).abs() < 1e-18);
    assert_eq!((pricing.gpu_bytes_each, pricing.gpu_per_second_each), (Some(8e10), Some(0.001)));
    assert_eq!(pricing.billing, Billing::Invocation);
    assert_eq!(Prices::from_yaml(r#"{"cpuCoreHour": 1, "memoryGBHour": 1}"#).unwrap().gpu_hour, None);
    // Cores apart from memory.
    assert_eq!(pricing.cpu_per_core_second, None);
    let apart = Prices::from_yaml(text).unwrap().separate_pricing().unwrap();
    assert!((apart.cpu_per_core_second.unwrap() - 0.03 / 3600.0).abs() < 1e-18);
    assert_eq!(apart.memory_per_gb_second, pricing.memory_per_gb_second);
}

#[test]
fn memory_that_brings_vcpus_is_a_property_of_prices() {
    let lambda = "billing: Invocation\ncpuCoreHour: 0\nmemoryGBHour: 0.06\nmemoryPerVcpuMB: 1769\n";
    let pricing = Prices::from_yaml(lambda).unwrap().pricing().unwrap();
    assert_eq!(pricing.memory_per_vcpu_bytes, Some(1.769e9));
    assert!((pricing.cpu_per_gb_second - 0.06 / 3600.0).abs() < 1e-15);
    // Twice the memory for a vCPU is half a core's price in a GB.
    let priced = |more: &str| {
        let text = format!("cpuCoreHour: 0.04\nmemoryGBHour: 0.004\n{more}");
        Prices::from_yaml(&text).unwrap().pricing().unwrap().cpu_per_gb_second * 3600.0
    };
    assert!((priced("memoryPerVcpuMB: 2000") - 0.024).abs() < 1e-12);
    assert!((priced("memoryPerVcpuMB: 1000") - priced("")).abs() < 1e-12);
    // The same function has fewer vCPUs, and is slower.
    let one = |bytes_per_vcpu: Option<f64>| {
        let pricing = remoe_planner::Pricing { memory_per_vcpu_bytes: bytes_per_vcpu, ..wishes().pricing };
        let problem =
            problem(&model(), &measured(), &DeploymentRequirements { pricing, ..wishes() }).unwrap();
        let plan = PlanDraft::from_json(
            r#"{"main_bytes": 1000000000, "layers": [{"remote": [], "memory_bytes": 0,
            "replicas": 0}, {"remote": [], "memory_bytes": 0, "replicas": 0}, {"remote": [], "memory_bytes": 0, "replicas": 0}]}"#,
        );
        evaluate(&problem, &plan.unwrap(), false).unwrap().tpot_seconds
    };
    assert!((one(None) - one(Some(1e9))).abs() < 1e-15);
    assert!(one(Some(1.769e9)) > 1.3 * one(None));
    // vCPUs cannot be chosen apart from the memory that brings them.
    let apart = Prices::from_yaml(lambda).unwrap().separate_pricing().unwrap_err();
    assert_eq!(apart.field, "memoryPerVcpuMB");
}

#[test]
fn the_examples_are_prices() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/pricing");
    let files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() >= 2);
    for file in files {
        let prices = Prices::from_yaml(&std::fs::read_to_string(&file).unwrap()).unwrap();
        assert!(prices.source.is_some() && prices.date.is_some(), "{file:?}");
    }
}

#[test]
fn prices_that_cannot_be_are_named() {
    let cases = [
        ("cpuCoreHour: 0\nmemoryGBHour: 1", "cpuCoreHour"),
        ("cpuCoreHour: -1\nmemoryGBHour: 1\nmemoryPerVcpuMB: 1769", "cpuCoreHour"),
        ("cpuCoreHour: 0\nmemoryGBHour: 0\nmemoryPerVcpuMB: 1769", "memoryGBHour"),
        ("cpuCoreHour: 1\nmemoryGBHour: 1\nmemoryPerVcpuMB: 0", "memoryPerVcpuMB"),
        ("cpuCoreHour: 1\nmemoryGBHour: 1\nmemoryPerVcpuMB: .nan", "memoryPerVcpuMB"),
        ("cpuCoreHour: 1\nmemoryGBHour: -1", "memoryGBHour"),
        ("cpuCoreHour: 1\nmemoryGBHour: .nan", "memoryGBHour"),
        ("cpuCoreHour: 1\nmemoryGBHour: 1\ngpuHour: 1", "gpuMemoryMB"),
        ("cpuCoreHour: 1\nmemoryGBHour: 1\ngpuMemoryMB: 1", "gpuHour"),
        ("cpuCoreHour: many\nmemoryGBHour: 1", "cpuCoreHour"),
    ];
    for (text, field) in cases {
        assert_eq!(Prices::from_yaml(text).unwrap_err().field, field, "{text}");
    }
    for text in [
        "cpuCoreMinute: 1\nmemoryGBHour: 1",
        "memoryGBHour: 1",
        "",
        "- 1",
        "cpuCoreHour: 1\nmemoryGBHour: 1\nbilling: Monthly",
    ] {
        assert!(Prices::from_yaml(text).is_err(), "{text}");
    }
    let unknown = Prices::from_yaml("cpuCoreMinute: 1\nmemoryGBHour: 1").unwrap_err();
    assert!(unknown.to_string().contains("cpuCoreMinute") && unknown.to_string().contains("cpuCoreHour"));
}

#[test]
fn prior_is_slower_with_tokens_and_faster_with_vcpus() {
    let table = Profile::prior(&model(), "bfloat16").expert_seconds;
    for rows in table.seconds.windows(2) {
        assert!(rows[0].iter().zip(&rows[1]).all(|(less, more)| less <= more));
    }
    assert!(table.seconds.iter().all(|row| row.is_sorted_by(|a, b| a >= b)));
}
