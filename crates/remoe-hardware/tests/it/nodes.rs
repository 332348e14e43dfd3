//! Lists of nodes, and what to rent of them for published models.

use remoe_hardware::{Commitment, NodeList, Profile, ResidentWeights, node_shapes};
use remoe_model::{Folder, Outline};
use remoe_planner::{
    Arrangement, ArrangementEvaluation, Arrivals, NodesAnswer, NodesFlipFigure, Rental, Request, Reserve,
    ResidentModel, Slo, SpotPolicy, rent,
};
use std::path::PathBuf;

const MODELS: [&str; 4] = ["deepseek-v3", "mixtral-8x22b", "gpt-oss-120b", "qwen3-235b-a22b"];
const LISTS: [&str; 3] = ["aws-us-east-1.yaml", "gcp-us-central1.yaml", "azure-eastus.yaml"];

fn workspace(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn list(name: &str) -> NodeList {
    NodeList::from_yaml(&std::fs::read_to_string(workspace("examples/nodes").join(name)).unwrap()).unwrap()
}

/// A list with few shapes of every kind, on demand.
fn short_list() -> NodeList {
    let mut list = list(LISTS[0]);
    let kept = [
        "m7i.2xlarge",
        "m7i.8xlarge",
        "r7i.4xlarge",
        "r7i.12xlarge",
        "r7i.24xlarge",
        "r7i.48xlarge",
        "g4dn.xlarge",
        "g6.4xlarge",
        "g6e.4xlarge",
        "g6e.48xlarge",
        "p5.4xlarge",
        "p5.48xlarge",
        "p5en.48xlarge",
    ];
    list.nodes.retain(|node| kept.contains(&node.name.as_str()));
    assert_eq!(list.nodes.len(), kept.len());
    list.nodes.iter_mut().for_each(|node| node.spot_per_hour = None);
    list
}

fn rental(model: &str, list: &NodeList) -> Rental {
    let folder = workspace("tests/fixtures/published").join(model);
    let outline = Outline::open_in(&Folder::new(folder), None).unwrap();
    let facts = outline.inspection(model);
    let prior = Profile::prior(&facts, &facts.dtype);
    let weights = ResidentWeights::of_outline(&outline);
    let rest = facts.non_expert_layer_bytes.iter().sum::<u64>() + facts.outside_bytes;
    Rental {
        model: ResidentModel {
            layers: facts.moe_layers.len(),
            experts: facts.experts,
            top_k: facts.top_k,
            expert_bytes: facts.expert_bytes as f64,
            rest_bytes: rest as f64,
            main_rest_bytes: rest as f64,
            device_rest_bytes: rest as f64,
            kv_bytes_per_token: facts.kv_bytes_per_token as f64,
            kv_windowed: None,
            token_bytes: facts.token_bytes as f64,
        },
        request: Request {
            input_tokens: 128.0,
            output_tokens: 199.0,
            max_input_tokens: Some(4096.0),
            max_output_tokens: Some(1024.0),
            concurrency: 8,
        },
        slo: Slo::new(10.0, 0.2),
        arrivals: None,
        starts: Some(prior.starts),
        shapes: node_shapes(list, Commitment::OnDemand, &weights, None),
        reserve: Reserve::default(),
        spot: SpotPolicy::Remote,
        transport: prior.transport.of_rows(facts.token_bytes as f64),
        runtime_bytes: prior.memory.main_bytes,
        fallback_bytes: 2.0 * facts.top_k as f64 * facts.expert_bytes as f64,
        function_bytes: prior.memory.function_bytes,
        usage: None,
    }
}

fn weights_of(model: &str) -> ResidentWeights {
    let folder = workspace("tests/fixtures/published").join(model);
    ResidentWeights::of_outline(&Outline::open_in(&Folder::new(folder), None).unwrap())
}

fn rival(answer: &NodesAnswer, name: Arrangement) -> &ArrangementEvaluation {
    answer.verdict.rivals.iter().find(|rival| rival.name == name).unwrap()
}

/// Dollars per hour of the cheapest way with remote functions.
fn remote(answer: &NodesAnswer) -> f64 {
    let remote = [Arrangement::Layers, Arrangement::Sliced];
    remote.iter().filter_map(|name| rival(answer, *name).dollars_per_hour).fold(f64::INFINITY, f64::min)
}

#[test]
fn lists_that_cannot_be_are_refused_by_field() {
    let valid = "{name: a, vcpus: 4, memoryGB: 16, perHour: 0.2}";
    let with = |field: &str| format!("nodes: [{{name: a, vcpus: 4, memoryGB: 16, perHour: 0.2, {field}}}]");
    assert!(NodeList::from_yaml(&format!("nodes: [{valid}]")).is_ok());
    assert!(
        NodeList::from_yaml(r#"{"nodes": [{"name": "a", "vcpus": 4, "memoryGB": 16, "perHour": 0.2}]}"#)
            .is_ok()
    );
    let gpu = with(
        "gpus: 1, gpuMemoryGB: 24, spot: true, max: 2, memoryBandwidthGBs: 20, gpuBandwidthGBs: 300, gpuTeraflops: 121",
    );
    assert!(NodeList::from_yaml(&gpu).is_ok());
    let timed =
        with("sockets: 2, timing: {cpuBandwidthShare: 0.4, cpuLayerMicroseconds: 0}, spotPerHour: 0.1");
    assert!(NodeList::from_yaml(&timed).is_ok());
    assert!(NodeList::from_yaml(&with("gpus: 0, gpuMemoryGB: 0")).is_ok());
    let many: Vec<String> = (0..201).map(|n| valid.replace("name: a", &format!("name: a{n}"))).collect();
    for (text, field) in [
        ("nodes: []".to_owned(), "nodes"),
        (format!("nodes: [{}]", many.join(", ")), "nodes"),
        (format!("nodes: [{valid}]\nprice: 1"), "price"),
        ("source: x".to_owned(), "nodes"),
        ("[".to_owned(), ""),
        (format!("nodes: [{valid}, {valid}]"), "nodes[1].name"),
        (format!("nodes: [{}]", valid.replace("name: a", "name: ''")), "nodes[0].name"),
        (format!("nodes: [{}]", valid.replace("name: a", "name: \"a\\nb\"")), "nodes[0].name"),
        (format!("nodes: [{}]", valid.replace("name: a, ", "")), "nodes[0].name"),
        (format!("nodes: [{}]", valid.replace("perHour: 0.2", "perHour: 0")), "nodes[0].perHour"),
        (format!("nodes: [{}]", valid.replace("perHour: 0.2", "perHour: -1")), "nodes[0].perHour"),
        (format!("nodes: [{}]", valid.replace("perHour: 0.2", "perHour: .nan")), "nodes[0].perHour"),
        (format!("nodes: [{}]", valid.replace("perHour: 0.2", "perHour: .inf")), "nodes[0].perHour"),
        (format!("nodes: [{}]", valid.replace("perHour: 0.2", "perHour: cheap")), "nodes[0].perHour"),
        (format!("nodes: [{}]", valid.replace("vcpus: 4", "vcpus: 0")), "nodes[0].vcpus"),
        (format!("nodes: [{}]", valid.replace("vcpus: 4", "vcpus: 1e6")), "nodes[0].vcpus"),
        (format!("nodes: [{}]", valid.replace("memoryGB: 16", "memoryGB: 1e9")), "nodes[0].memoryGB"),
        (with("cpus: 4"), "nodes[0].cpus"),
        (with("gpus: 1"), "nodes[0].gpuMemoryGB"),
        (with("gpus: 1, gpuMemoryGB: 0"), "nodes[0].gpuMemoryGB"),
        (with("gpus: -1, gpuMemoryGB: 16"), "nodes[0].gpus"),
        (with("gpus: 65, gpuMemoryGB: 16"), "nodes[0].gpus"),
        (with("gpuMemoryGB: 16"), "nodes[0].gpus"),
        (with("gpuTeraflops: 100"), "nodes[0].gpuTeraflops"),
        (with("memoryBandwidthGBs: 0"), "nodes[0].memoryBandwidthGBs"),
        (with("owned: {price: 1000, years: 3, watts: 100, perKwh: 0.1}"), "nodes[0].owned"),
        (format!("nodes: [{}]", valid.replace(", perHour: 0.2", "")), "nodes[0].perHour"),
        (with("spotPerHour: 0"), "nodes[0].spotPerHour"),
        (with("oneYearPerHour: -1"), "nodes[0].oneYearPerHour"),
        (with("sockets: 0"), "nodes[0].sockets"),
        (with("gpuLinkGBs: 64"), "nodes[0].gpuLinkGBs"),
        (with("priceSource: nowhere"), "nodes[0].priceSource"),
        (with("timing: {cpuBandwidthShare: 1.5}"), "nodes[0].timing.cpuBandwidthShare"),
        (with("timing: {gpuLayerMicroseconds: -1}"), "nodes[0].timing.gpuLayerMicroseconds"),
        (format!("nodes: [{valid}]\ntiming: {{cpuSecondSocket: 0}}"), "timing.cpuSecondSocket"),
        (format!("nodes: [{valid}]\ndate: yesterday"), "date"),
        (format!("nodes: [{valid}]\nsources: {{a: {{date: '2026-13', text: x}}}}"), "sources.a.date"),
        (with("max: 0"), "nodes[0].max"),
        (with("max: 1.5"), "nodes[0].max"),
        (with("spot: 0.1"), "nodes[0].spot"),
    ] {
        let error = NodeList::from_yaml(&text).unwrap_err();
        assert_eq!(error.field, field, "{text}: {error}");
    }
}

#[test]
fn a_list_is_read_as_it_is_written() {
    for name in LISTS {
        let list = list(name);
        assert!(list.source.is_some() && list.date.is_some() && list.nodes.len() >= 15, "{name}");
        let text = serde_yaml::to_string(&list).unwrap();
        assert_eq!(NodeList::from_yaml(&text).unwrap(), list);
    }
}

#[test]
fn answers_keep_their_limits_and_are_the_cheapest_of_all_rivals() {
    let list = short_list();
    for model in MODELS {
        for arrivals in [None, comes(0.02, None), comes(1.0, None)] {
            let rental = Rental { arrivals, ..rental(model, &list) };
            let answer = rent(&rental).unwrap();
            let verdict = &answer.verdict;
            let best = rival(&answer, verdict.best.unwrap());
            assert_eq!(best.dollars_per_hour, answer.dollars_per_hour);
            assert_eq!(verdict.pays, best.name.is_remote());
            assert_eq!(verdict.rivals.len(), Arrangement::ALL.len());
            for rival in &verdict.rivals {
                assert_eq!(rival.feasible, rival.dollars_per_hour.is_some(), "{model} {rival:?}");
                let Some(dollars) = rival.dollars_per_hour else {
                    let broken = rival.broken.as_ref().unwrap();
                    assert!(broken.value > broken.allowed, "{model} {rival:?}");
                    continue;
                };
                assert!(dollars >= answer.dollars_per_hour.unwrap(), "{model} {rival:?}");
                let (expected, layout) = (rival.expected.unwrap(), rival.layout.unwrap());
                let met = expected.under_load;
                assert!(
                    met.ttft_seconds <= 10.0 + 1e-6 && met.tpot_seconds <= 0.2 + 1e-6,
                    "{model} {rival:?}"
                );
                assert!(met.ttft_seconds >= expected.ttft_seconds - 1e-9, "{model} {rival:?}");
                // More tokens read more experts than one, and fewer than so many times as many.
                let busy = expected.busy_tpot_seconds / expected.tpot_seconds;
                assert!((1.0..=f64::from(layout.slots)).contains(&busy), "{model} {rival:?}");
                // The price is that of the nodes, and every function is on one of them.
                let price =
                    |name: &str| rental.shapes.iter().find(|shape| shape.name == name).unwrap().per_hour;
                let sum: f64 =
                    rival.nodes.iter().map(|node| f64::from(node.count) * price(&node.shape)).sum();
                assert!((sum / dollars - 1.0).abs() < 1e-9, "{model} {rival:?}");
                let hosts: usize = rival.nodes.iter().map(|node| node.hosts.len()).sum();
                let mains = layout.stages as usize;
                assert_eq!(hosts, mains + layout.remote_functions, "{model} {rival:?}");
            }
        }
    }
}

/// Without a rate the stated number of requests is in flight; with one their number follows, and the stated one has no
/// effect.
#[test]
fn concurrency_beside_a_rate_changes_nothing() {
    let list = short_list();
    for model in ["deepseek-v3", "gpt-oss-120b"] {
        for per_second in [1e-4, 2.0] {
            let at = |concurrency: u32| {
                let base = rental(model, &list);
                let request = Request { concurrency, ..base.request.clone() };
                rent(&Rental { request, arrivals: comes(per_second, None), ..base }).unwrap()
            };
            let few = at(1);
            assert_eq!(few, at(8), "{model} {per_second}");
            assert_eq!(few, at(256), "{model} {per_second}");
            let expected = few.expected.unwrap();
            let steps = 199.0;
            let little =
                per_second * (expected.under_load.ttft_seconds + steps * expected.under_load.tpot_seconds);
            let ratio = expected.in_flight / little;
            assert!((0.5..1.5).contains(&ratio), "{model} {per_second}: {} {little}", expected.in_flight);
        }
    }
}

#[test]
fn requests_in_flight_are_served_together() {
    let list = short_list();
    let base = rental("gpt-oss-120b", &list);
    let mut before = 0.0;
    for concurrency in [1, 4, 16, 64] {
        let request = Request { concurrency, ..base.request.clone() };
        let answer = rent(&Rental { request, ..base.clone() }).unwrap();
        let (dollars, layout) = (answer.dollars_per_hour.unwrap(), answer.layout.unwrap());
        assert!(dollars >= before, "{concurrency}: {dollars} after {before}");
        assert!(layout.mains * layout.copies * layout.slots >= concurrency, "{layout:?}");
        assert_eq!(answer.expected.unwrap().in_flight, f64::from(concurrency));
        before = dollars;
    }
}

#[test]
fn committed_and_owned_nodes_cost_what_the_list_says() {
    let text = "nodes:\n\
        - {name: a, vcpus: 96, memoryGB: 800, memoryBandwidthGBs: 300, perHour: 6, spotPerHour: 2, oneYearPerHour: 4}\n\
        - {name: b, vcpus: 96, memoryGB: 800, owned: {price: 87660, years: 5, watts: 1000, perKwh: 0.1}}\n";
    let list = NodeList::from_yaml(text).unwrap();
    let of = |index: usize, commitment: Commitment| list.nodes[index].dollars_per_hour(commitment);
    assert_eq!(of(0, Commitment::OnDemand), 6.0);
    assert_eq!(of(0, Commitment::OneYear), 4.0);
    assert_eq!(of(0, Commitment::ThreeYears), 6.0);
    // 87,660 dollars over five years of 8,766 hours, and a kilowatt.
    assert!((of(1, Commitment::OneYear) - 2.1).abs() < 1e-12);
    let weights = weights_of("gpt-oss-120b");
    let shapes = node_shapes(&list, Commitment::OneYear, &weights, None);
    let seen: Vec<(&str, f64, bool)> =
        shapes.iter().map(|shape| (shape.name.as_str(), shape.per_hour, shape.spot)).collect();
    assert_eq!(seen[..2], [("a", 4.0, false), ("a (spot)", 2.0, true)]);
    assert_eq!(seen.len(), 3);
}

/// A pipeline of nodes holds what none of them holds, and several copies of a small model share a node's GPUs.
#[test]
fn gpus_and_nodes_are_divided_as_the_load_needs() {
    let list = short_list();
    let base = Rental { arrivals: comes(0.5, None), ..rental("deepseek-v3", &list) };
    let mut one = base.clone();
    one.shapes.retain(|shape| shape.name == "p5.48xlarge");
    let answer = rent(&one).unwrap();
    assert!(rival(&answer, Arrangement::Gpu).broken.as_ref().unwrap().limit == "GPU memory");
    let several = rival(&answer, Arrangement::Gpus);
    assert_eq!((several.layout.unwrap().stages, several.nodes[0].hosts.len()), (2, 2));
    let copies = |per_second: f64| {
        let mut one = Rental { arrivals: comes(per_second, None), ..rental("gpt-oss-120b", &list) };
        one.shapes.retain(|shape| shape.name == "p5en.48xlarge");
        let layout = rival(&rent(&one).unwrap(), Arrangement::Gpu).layout.unwrap();
        assert_eq!(layout.gpus * layout.copies, 8, "{layout:?}");
        layout.copies
    };
    let all: Vec<u32> = [1.0, 60.0, 120.0, 240.0, 480.0].map(copies).into();
    assert!(all[0] == 1 && all.iter().any(|copies| *copies > 1), "{all:?}");
}

#[test]
fn offload_keeps_as_many_layers_on_gpus_as_fit() {
    let list = short_list();
    let mut base = rental("gpt-oss-120b", &list);
    base.shapes.retain(|shape| shape.name == "g6e.4xlarge");
    base.slo = Slo::new(60.0, 10.0);
    let answer = rent(&base).unwrap();
    let layout = rival(&answer, Arrangement::Offload).layout.unwrap();
    let usable = 48e9 * 0.92;
    let layer = base.model.experts as f64 * base.model.expert_bytes;
    assert!(layout.gpu_bytes <= usable && layout.gpu_bytes + layer > usable, "{layout:?}");
    assert!(layout.hosted_layers > 0 && layout.hosted_layers < base.model.layers);
    let tpot = |name| rival(&answer, name).expected.unwrap().tpot_seconds;
    assert!(tpot(Arrangement::Offload) < tpot(Arrangement::Cpu));
}

#[test]
fn equal_prices_go_to_the_faster_way() {
    let list = short_list();
    for model in MODELS {
        let answer = rent(&Rental { slo: Slo::new(60.0, 10.0), ..rental(model, &list) }).unwrap();
        let best = rival(&answer, answer.verdict.best.unwrap());
        for other in
            answer.verdict.rivals.iter().filter(|other| other.dollars_per_hour == best.dollars_per_hour)
        {
            let tpot = |rival: &ArrangementEvaluation| rival.expected.unwrap().tpot_seconds;
            assert!(tpot(best) <= tpot(other), "{model}: {best:?} {other:?}");
        }
    }
}

#[test]
fn what_is_rented_holds_the_whole_model() {
    let list = short_list();
    for model in MODELS {
        let rental = rental(model, &list);
        let answer = rent(&rental).unwrap();
        for rival in answer.verdict.rivals.iter().filter(|rival| rival.name.is_remote() && rival.feasible) {
            let layout = rival.layout.as_ref().unwrap();
            let (model, functions) = (&rental.model, layout.remote_functions as f64);
            let slots = match rival.name {
                Arrangement::Layers => layout.remote_experts as f64 * functions,
                _ => layout.remote_experts as f64 * functions * model.layers as f64,
            };
            let remote = (model.experts - layout.local_experts) as f64 * model.layers as f64;
            assert!(slots >= remote, "{rival:?}");
            for node in rival.nodes.iter().skip(1) {
                let shape = rental.shapes.iter().find(|shape| shape.name == node.shape).unwrap();
                let each = node.hosts.len().div_ceil(node.count as usize) as f64;
                assert!(each * layout.remote_bytes <= shape.memory_bytes * 0.95 - 1e9, "{node:?} {layout:?}");
                assert!(each * layout.remote_vcpus <= shape.vcpus, "{node:?} {layout:?}");
                assert_eq!(shape.gpus, 0);
            }
        }
    }
}

#[test]
fn cheaper_nodes_and_looser_limits_never_cost_more() {
    let list = short_list();
    let base = rental("mixtral-8x22b", &list);
    let solved = |rental: &Rental| rent(rental).unwrap();
    let mut last = f64::INFINITY;
    for tpot in [0.1, 0.15, 0.2, 0.3, 0.5, 1.0] {
        let answer = solved(&Rental { slo: Slo::new(10.0, tpot), ..base.clone() });
        let dollars = answer.dollars_per_hour.unwrap_or(f64::INFINITY);
        assert!(dollars <= last, "{tpot}: {dollars} {last}");
        last = dollars;
    }
    let mut last = 0.0;
    for factor in [0.25, 0.5, 1.0, 2.0, 4.0] {
        let mut rental = base.clone();
        rental.shapes.iter_mut().filter(|shape| shape.gpus > 0).for_each(|shape| shape.per_hour *= factor);
        let dollars = solved(&rental).dollars_per_hour.unwrap();
        assert!(dollars >= last, "{factor}: {dollars} {last}");
        last = dollars;
    }
}

#[test]
fn spot_nodes_host_what_they_may_and_counts_are_kept() {
    let mut list = short_list();
    let cheap = list.nodes.iter().find(|node| node.name == "r7i.48xlarge").unwrap().clone();
    list.nodes.push(remoe_hardware::ListedNode {
        name: "spot".to_owned(),
        per_hour: cheap.per_hour.map(|dollars| dollars / 20.0),
        spot: true,
        max: Some(2),
        ..cheap
    });
    let base = rental("mixtral-8x22b", &list);
    let count = |answer: &NodesAnswer, host: &str| -> u32 {
        let sliced = &rival(answer, Arrangement::Sliced).nodes;
        let here =
            sliced.iter().filter(|node| node.spot && node.hosts.iter().any(|name| name.starts_with(host)));
        here.map(|node| node.count).sum()
    };
    let at = |spot| rent(&Rental { spot, slo: Slo::new(10.0, 0.4), ..base.clone() }).unwrap();
    let remote_only = at(SpotPolicy::Remote);
    assert_eq!(count(&remote_only, "main"), 0);
    assert!((1..=2).contains(&count(&remote_only, "group")));
    let everything = at(SpotPolicy::Everything);
    assert!(count(&everything, "main") + count(&everything, "group") <= 2);
    let never = at(SpotPolicy::Never);
    assert!(never.verdict.rivals.iter().all(|rival| rival.nodes.iter().all(|node| !node.spot)));
    assert!(remote(&everything) <= remote(&remote_only) && remote(&remote_only) < remote(&never));
}

#[test]
fn the_verdict_turns_where_it_says() {
    let list = short_list();
    for model in MODELS {
        let base = rental(model, &list);
        let verdict = rent(&base).unwrap().verdict;
        for flip in &verdict.flips {
            let mut there = base.clone();
            match flip.cause {
                NodesFlipFigure::TpotSeconds => there.slo.tpot_seconds = flip.at,
                NodesFlipFigure::GpuPriceFactor => {
                    let gpus = there.shapes.iter_mut().filter(|shape| shape.gpus > 0);
                    gpus.for_each(|shape| shape.per_hour *= flip.at);
                }
                // Sizes scale times too: the search does both.
                NodesFlipFigure::ModelSizeFactor => continue,
                NodesFlipFigure::RequestRateFactor => unreachable!("{flip:?}"),
            }
            let turned = rent(&there).unwrap().verdict;
            assert_eq!(turned.pays, !verdict.pays, "{model} {flip:?} {}", turned.sentence);
        }
    }
}

#[test]
fn nodes_that_sleep_cost_the_time_that_they_are_there() {
    let list = short_list();
    let base = rental("gpt-oss-120b", &list);
    let rare = Arrivals {
        per_second: 1e-4,
        burst: 1.0,
        recorded_seconds: None,
        idle_seconds: Some(300.0),
        input_variation: 0.0,
        output_variation: 0.0,
    };
    let answer = rent(&Rental { arrivals: Some(rare), ..base.clone() }).unwrap();
    assert!((0.02..0.05).contains(&answer.alive_share), "{}", answer.alive_share);
    let price = |name: &str| base.shapes.iter().find(|shape| shape.name == name).unwrap().per_hour;
    let full: f64 = answer.nodes.iter().map(|node| f64::from(node.count) * price(&node.shape)).sum();
    assert!((answer.dollars_per_hour.unwrap() / (full * answer.alive_share) - 1.0).abs() < 1e-9);
}

fn comes(per_second: f64, idle_seconds: Option<f64>) -> Option<Arrivals> {
    Some(Arrivals {
        per_second,
        burst: 1.0,
        recorded_seconds: None,
        idle_seconds,
        input_variation: 0.0,
        output_variation: 0.0,
    })
}

#[test]
fn what_is_rented_again_and_again_is_loaded_again_and_again() {
    let list = short_list();
    let base = Rental { arrivals: comes(1e-4, Some(60.0)), ..rental("gpt-oss-120b", &list) };
    let (answer, name) = (rent(&base).unwrap(), Arrangement::Cpu);
    let met = rival(&answer, name).expected.unwrap().under_load;
    assert!(met.cold_share > 0.9 && met.cold_ttft_seconds > met.ttft_seconds, "{met:?}");
    let mut slow = base;
    let starts = slow.starts.as_mut().unwrap();
    (starts.main.load_bytes_per_second, starts.remote.load_bytes_per_second) = (1e7, 1e7);
    let slow = rent(&slow).unwrap();
    assert!(rival(&slow, name).expected.unwrap().under_load.cold_ttft_seconds > 2.0 * met.cold_ttft_seconds);
    // Who loads is there meanwhile.
    let dollars = |answer| rival(answer, name).dollars_per_hour.unwrap();
    assert!(dollars(&slow) > 1.5 * dollars(&answer), "{} {}", dollars(&slow), dollars(&answer));
    let mut unstated = rental("gpt-oss-120b", &list);
    (unstated.arrivals, unstated.starts) = (comes(1e-4, Some(60.0)), None);
    assert_eq!(rent(&unstated).unwrap_err().field, "starts");
}

/// Figures that are said to change the verdict do change it, where nodes go in between.
#[test]
fn turns_go_by_what_nodes_cost_in_the_mean() {
    let list = short_list();
    let base = Rental { slo: Slo::new(10.0, 0.3), ..rental("mixtral-8x22b", &list) };
    let base = Rental { arrivals: comes(5.0 / 3600.0, Some(10.0)), ..base };
    let verdict = rent(&base).unwrap().verdict;
    for flip in verdict.flips.iter().filter(|flip| flip.cause == NodesFlipFigure::GpuPriceFactor) {
        assert!(!(0.999..1.001).contains(&flip.at), "{flip:?}");
        let mut there = base.clone();
        let gpus = there.shapes.iter_mut().filter(|shape| shape.gpus > 0);
        gpus.for_each(|shape| shape.per_hour *= flip.at);
        assert_eq!(rent(&there).unwrap().verdict.pays, !verdict.pays, "{flip:?}");
    }
}

#[test]
fn limits_hold_under_the_load_that_comes() {
    let list = short_list();
    let alone = Rental { slo: Slo::new(10.0, 0.3), ..rental("mixtral-8x22b", &list) };
    let answer = rent(&alone).unwrap();
    let mut before = answer.dollars_per_hour.unwrap();
    for per_day in [1.0, 1_000.0, 5_000.0] {
        let answer = rent(&Rental { arrivals: comes(per_day / 86_400.0, None), ..alone.clone() }).unwrap();
        let met = answer.expected.unwrap().under_load;
        assert!(met.tpot_seconds <= 0.3 + 1e-9 && met.ttft_seconds <= 10.0 + 1e-9, "{per_day} {met:?}");
        assert!(met.tpot_seconds >= answer.expected.unwrap().tpot_seconds * 0.99);
        let dollars = answer.dollars_per_hour.unwrap();
        assert!(dollars >= before - 1e-9, "{per_day}: {dollars} after {before}");
        before = dollars;
    }
}

/// A main function of this project uses one GPU, however many its node has.
#[test]
fn what_remoe_serves_is_on_one_gpu() {
    let list = short_list();
    let mut base = rental("deepseek-v3", &list);
    let before = rent(&base).unwrap();
    for rival in before.verdict.rivals.iter().filter(|rival| rival.name.is_served_by_remoe()) {
        assert!(rival.layout.as_ref().is_none_or(|layout| layout.gpus <= 1), "{rival:?}");
    }
    let all = rival(&before, Arrangement::Gpu).layout.as_ref();
    assert!(all.is_none_or(|layout| layout.gpus > 1), "{all:?}");
    // A second GPU beside it changes its price and nothing else.
    for shape in base.shapes.iter_mut().filter(|shape| shape.gpus > 0) {
        shape.gpus = 1;
        shape.gpu_groups.retain(|group| group.gpus == 1);
    }
    let after = rent(&base).unwrap();
    for name in [Arrangement::Mix, Arrangement::Layers, Arrangement::Sliced] {
        let of = |answer: &NodesAnswer| rival(answer, name).dollars_per_hour;
        assert_eq!(of(&before), of(&after), "{name:?}");
    }
}

#[test]
fn requests_that_cannot_come_are_refused_by_field() {
    let list = short_list();
    let base = rental("gpt-oss-120b", &list);
    let with = |arrivals: Arrivals| rent(&Rental { arrivals: Some(arrivals), ..base.clone() });
    let some = comes(1e-3, None).unwrap();
    for (arrivals, field) in [
        (Arrivals { per_second: 0.0, ..some.clone() }, "arrivals.per_second"),
        (Arrivals { per_second: f64::NAN, ..some.clone() }, "arrivals.per_second"),
        (Arrivals { burst: 0.5, ..some.clone() }, "arrivals.burst"),
        (Arrivals { idle_seconds: Some(-1.0), ..some.clone() }, "arrivals.idle_seconds"),
        (Arrivals { recorded_seconds: Some(Vec::new()), ..some.clone() }, "arrivals.recorded_seconds"),
        (Arrivals { recorded_seconds: Some(vec![2.0, 1.0]), ..some.clone() }, "arrivals.recorded_seconds"),
    ] {
        let refused = with(arrivals.clone()).map(|_| ()).unwrap_err();
        assert!(refused.field.starts_with(field), "{arrivals:?}: {refused}");
    }
    let mut long = base.clone();
    long.request.input_tokens = 1e13;
    assert_eq!(rent(&long).unwrap_err().field, "request.input_tokens");
}

#[test]
fn nodes_serve_all_that_comes() {
    let list = short_list();
    let base = rental("gpt-oss-120b", &list);
    let few = rent(&Rental { arrivals: comes(1e-3, None), ..base.clone() }).unwrap();
    // What one node of the cheapest kind can do, and more than that.
    let tokens = few.expected.unwrap().full_load_tokens_per_second;
    let most = tokens / (base.request.output_tokens + 1.0);
    let many = rent(&Rental { arrivals: comes(1.5 * most, None), ..base.clone() }).unwrap();
    assert!(many.expected.unwrap().full_load_tokens_per_second > 1.5 * tokens);
    assert!(many.dollars_per_hour > few.dollars_per_hour);
    let all = rent(&Rental { arrivals: comes(1e6, None), ..base }).unwrap();
    assert_eq!(all.verdict.best, None);
    assert!(all.verdict.rivals.iter().filter_map(|rival| rival.broken.as_ref()).any(|it| it.limit == "load"));
    // A million tokens cost what the nodes cost while they make them.
    let best = rival(&few, few.verdict.best.unwrap());
    let million = best.dollars_per_hour.unwrap() / 3600.0 / tokens * 1e6;
    assert!((best.dollars_per_million_tokens.unwrap() / million - 1.0).abs() < 1e-9);
}

/// Several main functions come to what one of them does for its part of the requests, as often as there are any, and there
/// are as many as make that the cheapest.
fn main_functions_share(model: &str) {
    let list = short_list();
    let base = Rental { slo: Slo::new(10.0, 0.4), ..rental(model, &list) };
    let at = |per_second| rent(&Rental { arrivals: comes(per_second, None), ..base.clone() }).unwrap();
    let mut seen = 0;
    for per_second in [0.5, 6.0, 40.0] {
        let answer = at(per_second);
        let (dollars, layout) = (answer.dollars_per_hour.unwrap(), answer.layout.unwrap());
        let met = answer.expected.unwrap().under_load;
        assert!(met.tpot_seconds <= 0.4 + 1e-9 && met.ttft_seconds <= 10.0 + 1e-9, "{met:?}");
        for mains in [2, 3, 4, 6] {
            let together = f64::from(mains) * at(per_second / f64::from(mains)).dollars_per_hour.unwrap();
            assert!(dollars <= together * (1.0 + 1e-9), "{model} {per_second} {mains}: {dollars} {together}");
        }
        let part = at(per_second / f64::from(layout.mains)).dollars_per_hour.unwrap();
        assert!((dollars / (part * f64::from(layout.mains)) - 1.0).abs() < 1e-9, "{model} {per_second}");
        let price = |name: &str| base.shapes.iter().find(|shape| shape.name == name).unwrap().per_hour;
        let paid = |node: &remoe_planner::RentedNodes| f64::from(node.count) * price(&node.shape);
        assert!((answer.nodes.iter().map(paid).sum::<f64>() / dollars - 1.0).abs() < 1e-9);
        assert!(answer.nodes.iter().all(|node| node.count % layout.mains == 0), "{:?}", answer.nodes);
        assert!(answer.expected.unwrap().full_load_tokens_per_second > 200.0 * per_second);
        seen = seen.max(layout.mains);
    }
    assert!(seen > 1, "{model}");
}

#[test]
fn main_functions_share_what_one_does_not_serve_gpt_oss() {
    main_functions_share("gpt-oss-120b");
}

#[test]
fn main_functions_share_what_one_does_not_serve_mixtral() {
    main_functions_share("mixtral-8x22b");
}

#[test]
fn no_more_main_functions_than_there_are_nodes() {
    let list = short_list();
    let base = Rental { arrivals: comes(60.0, None), ..rental("gpt-oss-120b", &list) };
    let answer = rent(&base).unwrap();
    let mains = answer.layout.unwrap().mains;
    assert!(mains > 1, "{answer:?}");
    let mut few = base;
    few.shapes.iter_mut().for_each(|shape| shape.max = Some(mains - 1));
    let answer = rent(&few).unwrap();
    assert!(answer.nodes.iter().all(|node| node.count < mains), "{:?}", answer.nodes);
}

#[test]
fn what_cannot_be_planned_is_said() {
    let list = short_list();
    let base = rental("deepseek-v3", &list);
    let answer = rent(&Rental { slo: Slo::new(10.0, 1e-4), ..base.clone() }).unwrap();
    assert_eq!((answer.verdict.best, answer.nodes.len(), answer.verdict.pays), (None, 0, false));
    for rival in &answer.verdict.rivals {
        assert_eq!(rival.broken.as_ref().unwrap().limit, "tpot", "{rival:?}");
        assert!(rival.why.contains("at least"), "{rival:?}");
    }
    let small = Rental { shapes: base.shapes[..2].to_vec(), ..base.clone() };
    let answer = rent(&small).unwrap();
    assert_eq!(rival(&answer, Arrangement::Cpu).broken.as_ref().unwrap().limit, "memory");
    assert!(rival(&answer, Arrangement::Gpu).why.contains("GPU"));
    let mut wrong = base;
    wrong.model.top_k = 0;
    assert_eq!(rent(&wrong).unwrap_err().field, "top_k");
}

#[test]
fn remote_experts_pay_where_no_single_node_is_large_enough() {
    let mut list = short_list();
    list.nodes.retain(|node| node.gpus <= 1 && node.memory_gb < 600.0);
    let rental = Rental { slo: Slo::new(10.0, 0.3), ..rental("deepseek-v3", &list) };
    let answer = rent(&rental).unwrap();
    let verdict = &answer.verdict;
    assert!(verdict.pays && verdict.sentence.starts_with("Remote experts pay: "), "{}", verdict.sentence);
    for name in [Arrangement::Gpu, Arrangement::Cpu, Arrangement::Mix, Arrangement::Fetch] {
        let broken = rival(&answer, name).broken.as_ref().unwrap();
        assert!(broken.limit.ends_with("memory"), "{name:?} {broken:?}");
    }
    let hosts: Vec<&String> = answer.nodes.iter().flat_map(|node| &node.hosts).collect();
    assert!(hosts.len() >= 2 && hosts[0] == "main" && hosts[1] == "group-0", "{hosts:?}");
}
