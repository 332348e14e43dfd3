//! The results in the form that people read.

use super::report::{Assumptions, Report, ScenarioReport, SensitivityReport};
use crate::output::table;
use crate::plan_report::{bytes, percent, seconds};
use remoe_experiments::{CORES, ExpertTime, Strategy, StrategyCost};
use remoe_planner::{Billing, dollars};

/// Everything, one figure after another.
pub(super) fn text(report: &Report) -> String {
    let mut parts = vec![assumptions(&report.assumptions)];
    for scenario in &report.scenarios {
        parts.extend([
            heading(scenario),
            costs(scenario),
            expert_times(scenario),
            phases(scenario),
            ratios(scenario),
            cold_starts(scenario),
        ]);
    }
    parts.extend(report.sensitivities.iter().map(sensitivity));
    parts.join("\n\n")
}

fn assumptions(of: &Assumptions) -> String {
    let (setting, machine, pricing) = (&of.setting, &of.machine, &of.setting.pricing);
    let gpu = match (pricing.gpu_bytes_each, pricing.gpu_per_second_each, pricing.gpu_per_gb_second) {
        (Some(size), Some(price), _) => {
            format!("GPUs of {} whole, {} per hour each", bytes(size), dollars(price * 3600.0))
        }
        (_, _, Some(price)) => format!("GPU memory {} per GB and hour", dollars(price * 3600.0)),
        _ => "GPU memory at the CPU's price (no GPU price given)".to_owned(),
    };
    let billing = match pricing.billing {
        Billing::Invocation => "remote functions are billed while they work",
        Billing::Reserved => "remote functions are billed for the time of a request",
    };
    let cpu = machine.cpu;
    let gigabytes = |rate: f64| format!("{:.1} GB/s", rate / 1e9);
    let mut pairs = vec![
        ("prices from", of.prices.clone()),
        (
            "prices",
            format!(
                "1 GB with 1 vCPU {} per hour; {gpu}; {billing}",
                dollars(pricing.cpu_per_gb_second * 3600.0)
            ),
        ),
        (
            "limits",
            format!(
                "TTFT {}, TPOT {}, warm; up to {} replicas, payload {}",
                seconds(setting.slo.ttft_seconds),
                seconds(setting.slo.tpot_seconds),
                setting.limits.max_replicas,
                setting.limits.payload_bytes.map_or_else(|| "unlimited".to_owned(), bytes),
            ),
        ),
        (
            "requests",
            format!(
                "{} of a class, {} decode steps; {} prompt tokens if not recorded (500 characters)",
                of.requests, setting.decode_steps, of.input_tokens
            ),
        ),
        (
            "routing",
            format!(
                "synthetic if not recorded: shares by rank to the power of -{}, single requests off by factors up \
                 to {}, seed {}",
                of.routing.skew, of.routing.spread, of.routing.seed
            ),
        ),
        (
            "assumed CPUs",
            format!(
                "a vCPU reads {} and computes {:.0} GFLOP/s, a function reads at most {}; wide: one expert \
                 uses all vCPUs, narrow: reads with at most 2 (Remoe paper, figure 6)",
                gigabytes(cpu.bytes_per_second_each),
                cpu.operations_per_second_each / 1e9,
                gigabytes(cpu.bytes_per_second_most),
            ),
        ),
        (
            "assumed GPU",
            format!(
                "reads {}, computes {:.0} TFLOP/s, launches take {} per layer and {} per expert, {} to the host",
                gigabytes(machine.gpu.bytes_per_second),
                machine.gpu.operations_per_second / 1e12,
                seconds(machine.gpu.layer_seconds),
                seconds(machine.gpu.expert_seconds),
                gigabytes(machine.gpu.host_bytes_per_second),
            ),
        ),
        (
            "assumed network",
            format!(
                "{}, {} per invocation",
                gigabytes(machine.network_bytes_per_second),
                seconds(machine.invoke_seconds)
            ),
        ),
        (
            "assumed functions",
            format!(
                "start in {}, load {}, take {} (main) and {} (remote) besides weights",
                seconds(machine.container_seconds),
                gigabytes(machine.load_bytes_per_second),
                bytes(machine.main_bytes),
                bytes(machine.function_bytes),
            ),
        ),
    ];
    pairs.extend(of.profile.clone().map(|profile| ("profile", profile)));
    pairs.extend(of.records.clone().map(|records| ("records", records)));
    format!("Assumptions\n{}", table::of_pairs(&pairs))
}

fn heading(scenario: &ScenarioReport) -> String {
    let (shape, facts) = (&scenario.shape, &scenario.shape.facts);
    let range = |range: remoe_planner::SizeRange| {
        format!("{} to {}, step {}", bytes(range.min_bytes), bytes(range.max_bytes), bytes(range.step_bytes))
    };
    let pairs = table::of_pairs(&[
        ("scenario", scenario.meaning.clone()),
        (
            "experts",
            format!(
                "{} layers of {}, {} per token, {} each, {} total",
                facts.moe_layers.len(),
                facts.experts,
                facts.top_k,
                table::bytes(facts.expert_bytes),
                bytes(shape.expert_bytes())
            ),
        ),
        ("non-expert part", bytes(shape.other_bytes())),
        ("main functions", range(shape.specs.main)),
        ("remote functions", range(shape.specs.remote)),
    ]);
    format!("== {} ==\n{pairs}", scenario.name)
}

fn costs(scenario: &ScenarioReport) -> String {
    let costs = &scenario.figure_9;
    let of_mix = costs.of(Strategy::Mix);
    let mix = of_mix.map(|mix| mix.mean_cost);
    let dearer = |costs: &[f64]| {
        // Equal plans cost the same but for rounding.
        let above = |(cost, mix): (&f64, &f64)| *cost > mix * (1.0 + 1e-9);
        of_mix.map(|mix| costs.iter().zip(&mix.costs).filter(|pair| above(*pair)).count())
    };
    let against = |cost: f64| mix.map_or_else(String::new, |mix| signed_percent(cost / mix - 1.0));
    let rows = costs.strategies.iter().map(|one| {
        vec![
            one.strategy.name().to_owned(),
            one.main_bytes.map_or_else(String::new, bytes),
            one.remote_experts.map_or_else(String::new, |count| count.to_string()),
            dollars(one.mean_cost),
            against(one.mean_cost),
            one.expected_cost.map_or_else(String::new, dollars),
            seconds(one.mean_ttft_seconds),
            seconds(one.mean_tpot_seconds),
            one.late.to_string(),
            dearer(&one.costs).map_or_else(String::new, |count| count.to_string()),
        ]
    });
    let mut rows: Vec<Vec<String>> = rows.collect();
    let impossible = costs.impossible.iter().map(|strategy| {
        let mut row = vec![strategy.name().to_owned(), "no size fits, or none meets the limits".to_owned()];
        row.resize(10, String::new());
        row
    });
    rows.extend(impossible);
    let header = [
        "figure 9: strategy",
        "main function",
        "remote experts",
        "mean cost",
        "to MIX",
        "planned",
        "prefill",
        "decode step",
        "late",
        "above MIX",
    ];
    table::with_header(&header, rows)
}

fn expert_times(scenario: &ScenarioReport) -> String {
    let of = |cores: u32| scenario.figure_4.iter().filter(move |time| time.cores == cores);
    let [few, many] = CORES;
    let cells = |time: Option<&ExpertTime>| {
        time.map_or_else(Default::default, |time| {
            [seconds(time.decode_seconds), seconds(time.prefill_seconds)]
        })
    };
    let rows = of(few).map(|time| {
        let other = of(many).find(|other| other.ratio == time.ratio);
        let ([decode, prefill], [other_decode, other_prefill]) = (cells(Some(time)), cells(other));
        vec![percent(time.ratio), decode, other_decode, prefill, other_prefill]
    });
    let titles = [("decode step", few), ("decode step", many), ("prefill", few), ("prefill", many)];
    let titles = titles.map(|(phase, cores)| format!("{phase}, {cores} vCPUs"));
    let header: Vec<&str> =
        std::iter::once("figure 4: remote ratio").chain(titles.iter().map(String::as_str)).collect();
    table::with_header(&header, rows.collect())
}

fn phases(scenario: &ScenarioReport) -> String {
    let rows = scenario.figure_5.iter().map(|phases| {
        vec![
            phases.tokens.to_string(),
            seconds(phases.prefill_seconds),
            seconds(phases.decode_seconds),
            percent(phases.prefill_seconds / phases.decode_seconds),
        ]
    });
    table::with_header(&["figure 5: tokens", "prefill", "decode", "prefill / decode"], rows.collect())
}

fn ratios(scenario: &ScenarioReport) -> String {
    let rows = scenario.figure_10.iter().map(|ratio| {
        let lengths = format!("{:.0} : {:.0}", ratio.input_tokens, ratio.decode_steps);
        std::iter::once(lengths).chain(of_the_paper(&ratio.costs)).collect()
    });
    table::with_header(&header_of_the_paper("figure 10: prefill : decode"), rows.collect())
}

fn cold_starts(scenario: &ScenarioReport) -> String {
    let rows = scenario.figure_11.iter().map(|start| {
        vec![
            start.strategy.name().to_owned(),
            seconds(start.ready_seconds),
            seconds(start.ready_on_shared_storage_seconds),
            seconds(start.ready_one_after_another_seconds),
        ]
    });
    let header = ["figure 11: cold start", "ready after", "on one shared storage", "one part after another"];
    let decisions = &scenario.decisions;
    let predict = decisions.predict_seconds.map_or_else(|| "no predictor".to_owned(), seconds);
    let measured = table::of_pairs(&[
        ("measured: predict", predict),
        ("measured: pre-allocate", seconds(decisions.preallocate_seconds)),
        ("measured: plan", seconds(decisions.solve_seconds)),
    ]);
    format!("{}\n{measured}", table::with_header(&header, rows.collect()))
}

fn sensitivity(of: &SensitivityReport) -> String {
    let cost = |costs: &[StrategyCost], strategy| {
        costs.iter().find(|one| one.strategy == strategy).map(|one| one.cost)
    };
    let rows = of.rows.iter().map(|row| {
        let cheapest = row.costs.iter().min_by(|a, b| a.cost.total_cmp(&b.cost));
        let against_mix = cost(&row.costs, Strategy::Remoe).zip(cost(&row.costs, Strategy::Mix));
        let mut cells = vec![row.change.clone(), row.scaling.name().to_owned()];
        cells.extend(of_the_paper(&row.costs));
        cells.push(against_mix.map_or_else(String::new, |(remoe, mix)| signed_percent(remoe / mix - 1.0)));
        cells.push(cheapest.map_or("none meets the limits", |one| one.strategy.name()).to_owned());
        cells
    });
    let mut header = header_of_the_paper("figure 9, one assumption changed");
    header.insert(1, "CPUs");
    header.extend(["Remoe to MIX", "cheapest"]);
    format!("== {} ==\n{}", of.model, table::with_header(&header, rows.collect()))
}

fn header_of_the_paper(first: &str) -> Vec<&str> {
    std::iter::once(first).chain(Strategy::OF_THE_PAPER.map(Strategy::name)).collect()
}

fn of_the_paper(costs: &[StrategyCost]) -> impl Iterator<Item = String> {
    Strategy::OF_THE_PAPER.into_iter().map(|strategy| {
        let cost = costs.iter().find(|one| one.strategy == strategy);
        cost.map_or_else(|| "-".to_owned(), |one| dollars(one.cost))
    })
}

fn signed_percent(share: f64) -> String {
    if share.abs() < 5e-4 { "0.0 %".to_owned() } else { format!("{:+.1} %", share * 100.0) }
}
