#!/usr/bin/env python3
"""Write Grafana's dashboards, as JSON, from what stands here: `scripts/dashboards.py [--check]`.

Each panel is a line: title, kind, unit, queries with their legends, and width. What Grafana needs beside
that is the same for all of them. With --check nothing is written, and a difference fails.
"""

import json
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "charts/remoe/files/dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
JOB = 'job=~"$job"'
MODEL = JOB + ', model=~"$model"'
REMOTE = MODEL + ', placement="remote"'
NANO = "1e9"
# Each gateway of a cluster says it of the same pods.
RATES = f"max by (model, tier) (remoe_cost_rate_nanodollars_per_hour{{{MODEL}}})"

HEIGHTS = {"stat": 4, "timeseries": 8, "piechart": 8, "bargauge": 6, "table": 4, "heatmap": 8, "rows": 8}


def panel(title, kind, unit, targets, width, description, decimals=None, thresholds=None, stacked=False):
    """A panel of `targets`, as (query, legend). `rows` is a heat map with a row for each series, the first of them on top."""
    options = {
        "stat": {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}},
        "timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "piechart": {
            "pieType": "donut",
            "reduceOptions": {"calcs": ["lastNotNull"]},
            "legend": {"displayMode": "table", "placement": "right", "values": ["value", "percent"]},
        },
        "bargauge": {"orientation": "horizontal", "displayMode": "basic", "reduceOptions": {"calcs": ["lastNotNull"]}},
        "table": {"showHeader": True},
        "heatmap": {"calculate": False, "yAxis": {"unit": unit}},
        "rows": {
            "calculate": False,
            "rowsFrame": {"layout": "auto"},
            "yAxis": {"unit": "none", "reverse": True},
            "cellValues": {"unit": unit},
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "min": 0},
            "tooltip": {"mode": "single", "yHistogram": False},
        },
    }[kind]
    instant = kind in ("piechart", "bargauge", "table")
    steps = [{"color": color, "value": value} for color, value in (thresholds or [])]
    if not steps or steps[0]["value"] is not None:
        steps.insert(0, {"color": "green", "value": None})
    defaults = {"unit": unit, "thresholds": {"mode": "absolute", "steps": steps}}
    if decimals is not None:
        defaults["decimals"] = decimals
    if kind == "timeseries":
        defaults["custom"] = {"fillOpacity": 10, "showPoints": "never"}
        if unit == "currencyUSD":
            defaults["min"] = 0
        if stacked:
            defaults["custom"] |= {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    return {
        "title": title,
        "type": "heatmap" if kind == "rows" else kind,
        "description": description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "gridPos": {"w": width, "h": HEIGHTS[kind]},
        "targets": [
            {
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
                "refId": chr(ord("A") + number),
                "instant": instant,
                "range": not instant,
                **({"format": "table"} if kind == "table" else {}),
                **({"format": "heatmap"} if kind == "heatmap" else {}),
            }
            for number, (query, legend) in enumerate(targets)
        ],
    }


def variable(name, query, everything):
    return {
        "name": name,
        "label": name.title(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": everything,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def dashboard(uid, title, description, panels, annotations=()):
    """A dashboard whose panels flow from left to right."""
    x = y = height = 0
    for number, one in enumerate(panels, 1):
        place = one["gridPos"]
        if x + place["w"] > 24:
            x, y, height = 0, y + height, 0
        one["id"] = number
        place |= {"x": x, "y": y}
        x, height = x + place["w"], max(height, place["h"])
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    job = variable("job", "label_values(remoe_gateway_model_awake, job)", ".+")
    # What is of no model is shown with all of them.
    model = variable("model", f"label_values(remoe_gateway_model_awake{{{JOB}}}, model)", ".*")
    return {
        "uid": uid,
        "title": f"Remoe / {title}",
        "description": description,
        "tags": ["remoe"],
        "editable": False,
        "schemaVersion": 38,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [source, job, model]},
        "annotations": {
            "list": [
                {"name": name, "datasource": SOURCE, "enable": True, "expr": query, "titleFormat": text, "iconColor": "blue"}
                for name, query, text in annotations
            ]
        },
        "links": [{"type": "dashboards", "tags": ["remoe"], "title": "Remoe", "asDropdown": False}],
        "panels": panels,
    }


# Every gateway counts all pods, and of requests its own. What functions did for others' requests has failed as far as one knows.
SPENT = "remoe_cost_spent_nanodollars"
WENT = " or ".join(
    [
        f'sum by (part) ({SPENT}{{{JOB}, part=~"requests|overhead"}})',
        f'max by (part) ({SPENT}{{{JOB}, part=~"idle|cold_start|overlap"}})',
        f'label_replace(clamp_min(max(sum without (part) ({SPENT}{{{JOB}, part=~"requests|failed"}})) - sum({SPENT}{{{JOB}, part="requests"}}), 0), "part", "failed", "", "")',
    ]
)


def rate(metric, by="", labels=MODEL):
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({metric}{{{labels}}}[$__rate_interval]))"


def increase(metric, by="", labels=MODEL):
    group = f" by ({by})" if by else ""
    return f"sum{group} (increase({metric}{{{labels}}}[$__range]))"


def saved(rival, by=""):
    """What requests cost less here than there, as a share of their cost there."""
    labels = f"{MODEL}, {rival}" if rival else MODEL
    return f"1 - {increase('remoe_cost_compared_nanodollars_total', by, labels)} / {increase('remoe_cost_rival_nanodollars_total', by, labels)}"


def mean(metric, by):
    """Of the requests that the plan said something about, as series by `by`."""
    return f"{rate(metric, by)} / on () group_left () {rate('remoe_plan_compared_requests_total')}"


def activation(of, by):
    """Work by where it was predicted to be or was observed, all gateways and both phases alike."""
    return f'avg by ({by}) (remoe_prediction_activation_ratio{{{MODEL}, of="{of}"}})'


def cold_start(part):
    """What that part of cold starts took in this time, in the mean."""
    increases = [f'sum(increase(remoe_gateway_cold_start_seconds_{of}{{{MODEL}, part="{part}"}}[$__range]))' for of in ("sum", "count")]
    return " / ".join(increases)


def quantile(q, metric):
    return f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{{MODEL}}}[$__rate_interval])))"


COST = dashboard(
    "remoe-cost",
    "Cost",
    "Current cost, cost of requests, and savings.",
    [
        panel(
            "Cost per hour, now",
            "stat",
            "currencyUSD",
            [(f"sum({RATES}) / {NANO}", "per hour")],
            5,
            "Price of the running functions per hour. A sleeping model costs nothing.",
        ),
        panel(
            "Cost of answered requests, selected range",
            "stat",
            "currencyUSD",
            [(f"{increase('remoe_cost_nanodollars_total')} / {NANO}", "requests")],
            5,
            "Price of the function time that the requests used, without idle time.",
        ),
        panel(
            "Cost per million tokens",
            "stat",
            "currencyUSD",
            [(f"{increase('remoe_cost_nanodollars_total')} / {NANO} / ({increase('remoe_gateway_tokens_total')} / 1e6)", "per million")],
            5,
            "Prompt and generated tokens, without idle time.",
        ),
        panel(
            "Saving against no remote experts (mix)",
            "stat",
            "percentunit",
            [(saved('rival="mix"'), "saving")],
            5,
            "Share of the cost of the same requests with all experts on the main function's CPUs, on the same billing basis. Below 0 they cost more here.",
            1,
            [("red", None), ("green", 0)],
        ),
        panel(
            "Idle share of cost",
            "stat",
            "percentunit",
            [(f'max({SPENT}{{{JOB}, part="idle"}}) / max(remoe_cost_paid_nanodollars{{{JOB}}})', "idle")],
            4,
            "Share of the cost since the gateway started that went to ready functions without work.",
            1,
            [("orange", 0.5), ("red", 0.9)],
        ),
        panel(
            "Cost per hour by tier",
            "timeseries",
            "currencyUSD",
            [(f"{RATES} / {NANO}", "{{model}} {{tier}}")],
            12,
            "Price of running functions, stacked by tier, busy or idle. 0 while a model sleeps.",
            stacked=True,
        ),
        panel(
            "Cost by part",
            "piechart",
            "currencyUSD",
            [(f"({WENT}) / {NANO}", "{{part}}")],
            12,
            "Requests, failed, idle, cold start, overlap and overhead, since the gateways started. Each gateway counts all pods and its own requests; requests of other gateways are not failures.",
        ),
        panel(
            "Cost of requests per hour, by tier and phase",
            "timeseries",
            "currencyUSD",
            [(f"{rate('remoe_cost_nanodollars_total', 'tier, phase')} * 3600 / {NANO}", "{{tier}} {{phase}}")],
            12,
            "Cost of answered requests, stacked: prompts (prefill) and generated tokens (decode).",
            stacked=True,
        ),
        panel(
            "Counterfactual cost of the same requests",
            "timeseries",
            "currencyUSD",
            [
                (f"{rate('remoe_cost_nanodollars_total')} * 3600 / {NANO}", "actual cost"),
                (f"{rate('remoe_cost_rival_nanodollars_total', 'rival')} * 3600 / {NANO}", "{{rival}}"),
            ],
            12,
            "Dollars per hour on the plan's baselines, each request alone and warm.",
        ),
        panel(
            "Saving against each baseline",
            "bargauge",
            "percentunit",
            [(saved("", "rival"), "{{rival}}")],
            8,
            "Share of the cost of the same requests on that baseline. Below 0 they cost more here.",
            1,
            [("red", None), ("green", 0)],
        ),
        panel(
            "Cost by tenant, selected range",
            "bargauge",
            "currencyUSD",
            [(f"{increase('remoe_cost_nanodollars_total', 'tenant')} / {NANO}", "{{tenant}}")],
            8,
            "Cost of the answered requests of each tenant.",
        ),
        panel(
            "Daily budget used",
            "bargauge",
            "percentunit",
            [(f"remoe:budget_spent:ratio{{{JOB}}}", "{{tenant}} {{model}}")],
            8,
            "Tenants and models with a budget.",
            None,
            [("orange", 0.8), ("red", 1)],
        ),
        panel(
            "Residual cost (not accounted for)",
            "stat",
            "percentunit",
            [(f"remoe:cost_residual:ratio{{{JOB}}}", "of the cost")],
            6,
            "Paid minus accounted cost, as a share of what was paid.",
            4,
            [("red", 0.01)],
        ),
        panel(
            "Mean wake time",
            "stat",
            "s",
            [(f"sum(remoe_gateway_wake_seconds_sum{{{MODEL}}}) / sum(remoe_gateway_wake_seconds_count{{{MODEL}}})", "wake")],
            6,
            "Mean time from the decision to wake until requests are accepted.",
        ),
        panel("Prices", "table", "none", [(f"count by (source) (remoe_price_info{{{JOB}}})", "")], 12, "Source and date of the price list."),
    ],
)

SERVING = dashboard(
    "remoe-serving",
    "Serving",
    "Latency, throughput and queues.",
    [
        panel("Tokens per second", "stat", "none", [(rate("remoe_generation_tokens_total"), "generated")], 6, "Generated tokens, all models together.", 1),
        panel("Running requests", "stat", "none", [(f"sum(remoe_gateway_requests_in_flight{{{MODEL}}})", "")], 6, "Now, at all main functions."),
        panel("Waiting requests", "stat", "none", [(f"sum(remoe_gateway_requests_waiting{{{MODEL}}})", "")], 6, "Queued in gateways for a slot or a wake.", None, [("orange", 1)]),
        panel("Models awake", "stat", "none", [(f"sum(remoe_gateway_model_awake{{{MODEL}}})", "")], 6, "Models that accept requests without a wake."),
        panel(
            "Time to first token",
            "timeseries",
            "s",
            [(quantile(q, "remoe_time_to_first_token_seconds"), name) for q, name in [(0.5, "p50"), (0.9, "p90"), (0.99, "p99")]],
            12,
            "From the main function's queue to the first token, without cold starts.",
        ),
        panel(
            "Inter-token latency",
            "timeseries",
            "s",
            [(quantile(q, "remoe_inter_token_latency_seconds"), name) for q, name in [(0.5, "p50"), (0.9, "p90"), (0.99, "p99")]],
            12,
            "Time between two tokens of an answer.",
        ),
        panel(
            "Tokens",
            "timeseries",
            "none",
            [
                (rate("remoe_prompt_tokens_total"), "prompt"),
                (rate("remoe_generation_tokens_total"), "generated"),
            ],
            12,
            "Per second, all models together.",
        ),
        panel(
            "Waiting and running requests",
            "timeseries",
            "none",
            [
                (f"sum by (model) (remoe_gateway_requests_waiting{{{MODEL}}})", "{{model}} waiting"),
                (f"sum by (model) (remoe_gateway_requests_in_flight{{{MODEL}}})", "{{model}} running"),
            ],
            12,
            "Queued in gateways, and running at main functions.",
        ),
        panel("End-to-end latency", "heatmap", "s", [(f"sum by (le) (increase(remoe_e2e_request_latency_seconds_bucket{{{MODEL}}}[$__rate_interval]))", "{{le}}")], 12, "From a request's arrival at its main function to its last token."),
        panel(
            "Wake time",
            "timeseries",
            "s",
            [(quantile(0.5, "remoe_gateway_wake_seconds"), "p50"), (quantile(0.99, "remoe_gateway_wake_seconds"), "p99")],
            12,
            "From the decision to wake until requests are accepted.",
        ),
        panel(
            "Mean cold start by part, selected range",
            "bargauge",
            "s",
            [(cold_start(part), part) for part in ("decide", "schedule", "start", "load", "ready", "first")],
            8,
            "Mean over cold requests, parts in order: decide to wake, schedule, start, load weights, hand over the request, first token.",
        ),
        panel("Tokens by tenant", "timeseries", "none", [(rate("remoe_gateway_tokens_total", "tenant"), "{{tenant}}")], 8, "Prompt and generated tokens per second."),
        panel(
            "Prefix cache hit rate",
            "timeseries",
            "percentunit",
            [(f"{rate('remoe_prefix_cache_hits_total')} / {rate('remoe_prefix_cache_queries_total')}", "hit rate")],
            8,
            "Share of prompt tokens taken from the prefix cache.",
        ),
    ],
)

PLAN = dashboard(
    "remoe-plan",
    "Plan",
    "Placement, quality of predictions, and resources.",
    [
        panel(
            "Remote experts",
            "stat",
            "percentunit",
            [(f"sum(remoe_placement_experts{{{REMOTE}}}) / sum(remoe_placement_experts{{{MODEL}}})", "remote")],
            6,
            "Share of the experts of all layers. No data while a model sleeps.",
            1,
        ),
        panel(
            "Remote work",
            "stat",
            "percentunit",
            [(f"{rate('remoe_expert_pairs_total', '', REMOTE)} / {rate('remoe_expert_pairs_total')}", "of pairs")],
            6,
            "Share of (token, expert) pairs computed remotely. It is below the share of experts where the most used experts are local.",
            1,
        ),
        panel(
            "Hot-expert recall",
            "stat",
            "percentunit",
            [(f"avg(remoe_prediction_hot_recall_ratio{{{MODEL}}})", "of the hot half")],
            6,
            "Of the work of the more used half of the experts, the share on experts predicted to be in it. Needs --replan or spec.prediction.",
            1,
        ),
        panel("Routing epoch", "stat", "none", [(f"max(remoe_routing_generation{{{MODEL}}})", "")], 6, "Number of the placement in force. Increases with every change."),
        panel(
            "Experts by placement",
            "timeseries",
            "none",
            [(f"sum by (placement) (remoe_placement_experts{{{MODEL}}})", "{{placement}}")],
            12,
            "Experts of all layers, stacked: in the main function (local) and in remote functions.",
            stacked=True,
        ),
        panel(
            "Memory by tier",
            "timeseries",
            "decbytes",
            [(f"max by (model, tier) (remoe_tier_memory_bytes{{{MODEL}}})", "{{model}} {{tier}}")],
            12,
            "Memory of running functions, stacked. 0 while a model sleeps.",
            stacked=True,
        ),
        panel(
            "Predicted usage by octile of experts",
            "rows",
            "percentunit",
            [(activation("predicted", "eighth"), "{{eighth}}")],
            12,
            "1: the eighth of each layer's experts with the highest predicted usage. Share of the work, mean of the latest requests. With a good prediction the panel beside it looks the same.",
        ),
        panel(
            "Observed usage by the same octiles",
            "rows",
            "percentunit",
            [(activation("observed", "eighth"), "{{eighth}}")],
            12,
            "Usage of the same requests, in the order of the prediction.",
        ),
        panel(
            "Mispredicted usage by layers",
            "rows",
            "percentunit",
            [(f"sum by (layers) (abs({activation('observed', 'layers, eighth')} - {activation('predicted', 'layers, eighth')})) / 2", "{{layers}}")],
            12,
            "Share of the work in other octiles than predicted, by neighbouring layers.",
        ),
        panel(
            "Prediction error (Jensen-Shannon divergence)",
            "timeseries",
            "none",
            [(f"avg by (phase) (remoe_prediction_divergence_nats{{{MODEL}}})", "{{phase}}")],
            12,
            "Divergence of predicted and observed usage, in nats: 0 if they are equal, 0.69 if they have nothing in common.",
            3,
        ),
        panel(
            "Hot-expert recall and cold-expert share by layers",
            "timeseries",
            "percentunit",
            [
                (f"avg by (layers) (remoe_prediction_layers_hot_recall_ratio{{{MODEL}}})", "hot: {{layers}}"),
                (f"avg by (layers) (remoe_prediction_layers_cold_share_ratio{{{MODEL}}})", "cold: {{layers}}"),
            ],
            12,
            "Hot: of the work of the more used half of the experts, the share on experts predicted to be in it. Cold: of all work, the share on the half predicted to be used least, which becomes remote first. By thirds of the layers, mean of both phases.",
        ),
        panel(
            "Prediction coverage and out-of-distribution share",
            "timeseries",
            "percentunit",
            [
                (f"avg by (layers) (remoe_prediction_layers_coverage_ratio{{{MODEL}}})", "coverage: {{layers}}"),
                (
                    f"sum(remoe_prediction_unfamiliar_requests{{{MODEL}}}) / sum(remoe_prediction_compared_requests{{{MODEL}}})",
                    "out of distribution",
                ),
            ],
            12,
            "Coverage: share of requests and layers with an error up to the predicted 95th percentile, 95 % if predictions are calibrated. Beside it, the share of out-of-distribution requests. Needs a trained predictor.",
        ),
        panel(
            "Time to first token: expected and measured",
            "timeseries",
            "s",
            [(mean("remoe_plan_time_to_first_token_seconds_total", "of"), "{{of}}")],
            8,
            "Means of requests under a plan: expected for their lengths, and measured, queueing included.",
        ),
        panel(
            "Time per output token: expected and measured",
            "timeseries",
            "s",
            [(mean("remoe_plan_time_per_output_token_seconds_total", "of"), "{{of}}")],
            8,
            "Means of the same requests.",
        ),
        panel(
            "Cost per thousand requests: expected and measured",
            "timeseries",
            "currencyUSD",
            [(f"{mean('remoe_plan_cost_dollars_total', 'of')} * 1000", "{{of}}")],
            8,
            "Mean of the same requests, as if each ran alone.",
        ),
        panel(
            "Pairs by placement",
            "timeseries",
            "none",
            [(rate("remoe_expert_pairs_total", "placement"), "{{placement}}")],
            12,
            "Per second. A pair is a token and one of its routed experts.",
        ),
        panel(
            "Wait for remote functions per layer",
            "timeseries",
            "s",
            [(quantile(q, "remoe_expert_wait_seconds"), name) for q, name in [(0.5, "p50"), (0.99, "p99")]],
            12,
            "From the end of the local experts to the last remote answer.",
        ),
        panel(
            "Price by tier",
            "timeseries",
            "currencyUSD",
            [(f"sum by (tier) ({RATES}) / {NANO}", "{{tier}}")],
            12,
            "Price of the planned sizes per hour.",
        ),
        panel(
            "Cost of requests by tier",
            "timeseries",
            "currencyUSD",
            [(f"{rate('remoe_cost_nanodollars_total', 'tier')} * 3600 / {NANO}", "{{tier}}")],
            12,
            "Per hour. A tier with a price and no request cost is idle.",
        ),
        panel("Iteration time", "heatmap", "s", [(f"sum by (le) (increase(remoe_iteration_seconds_bucket{{{MODEL}}}[$__rate_interval]))", "{{le}}")], 12, "One decode iteration of all running sequences, or one slice of a prefill."),
        panel(
            "Batch size per iteration",
            "timeseries",
            "none",
            [(f"{rate('remoe_forwarded_positions_total')} / {rate('remoe_iterations_total')}", "rows"), (f"sum(remoe_requests_running{{{MODEL}}})", "requests")],
            12,
            "Rows of a decode iteration or a prefill pass, and requests in the batch.",
        ),
        panel(
            "KV cache and fallback cache",
            "timeseries",
            "decbytes",
            [
                (f"sum(remoe_kv_cache_bytes{{{MODEL}}})", "KV cache"),
                (f"sum(remoe_expert_fallback_bytes{{{MODEL}}})", "fallback experts"),
            ],
            8,
            "KV cache of running requests and of the prefix cache; remote experts that main functions loaded themselves.",
        ),
        panel(
            "Replans",
            "timeseries",
            "none",
            [
                (f"sum by (cause) (increase(remoe_replans_total{{{MODEL}}}[$__rate_interval]))", "{{cause}}"),
                (f"sum by (cause) (increase(remoe_operator_replans_total{{{JOB}}}[$__rate_interval])) or vector(0)", "operator {{cause}}"),
            ],
            8,
            "Replans by cause: wake, drift, failed. On a cluster: the operator's, all deployments.",
        ),
        panel(
            "Scaling decisions",
            "timeseries",
            "none",
            [(f"sum by (component, direction) (increase(remoe_operator_scalings_total{{{JOB}}}[$__rate_interval])) or vector(0)", "{{component}} {{direction}}")],
            8,
            "On a cluster, all deployments: changes of the number of replicas because of load.",
        ),
        panel(
            "Sleeping remote groups",
            "timeseries",
            "none",
            [
                # Each gateway counts all of them.
                (f"sum by (model) (max by (job, model) (remoe_gateway_groups_asleep{{{MODEL}}}))", "{{model}} asleep"),
                (f"sum by (cause) (increase(remoe_gateway_group_wakes_total{{{MODEL}}}[$__rate_interval]))", "woken: {{cause}}"),
                (f"sum by (turn) (increase(remoe_operator_group_turns_total{{{JOB}}}[$__rate_interval])) or vector(0)", "operator {{turn}}"),
            ],
            12,
            "Groups asleep while their main function runs. Needs --remote-idle or spec.scaling.remoteIdleWindow. On a cluster the operator counts sleeps and wakes, all deployments.",
        ),
        panel(
            "Pairs for sleeping groups",
            "timeseries",
            "none",
            [(rate("remoe_gateway_group_sleeping_pairs_total"), "pairs")],
            12,
            "(token, expert) pairs per second of sleeping groups, which main functions computed themselves. Needs --remote-idle.",
        ),
    ],
    [("Placement", f"changes(remoe_routing_generation{{{MODEL}}}[1m]) > 0", "new placement")],
)

HEALTH = dashboard(
    "remoe-health",
    "Health",
    "Errors, retries, and reconciliation of cost.",
    [
        panel("Error rate", "stat", "percentunit", [("remoe:request_errors:ratio_rate5m", "of responses")], 6, "Responses with status 5xx and failed streams, of all responses.", 2, [("red", 0.01)]),
        panel("Retried requests", "stat", "none", [(f"{increase('remoe_gateway_retries_total', '', JOB)} or vector(0)", "requests")], 6, "Sent again because their function broke off."),
        panel("Repeated iterations", "stat", "none", [(increase('remoe_iterations_repeated_total', '', JOB), "iterations")], 6, "Computed again because experts were out of reach."),
        panel("Failed ledger records", "stat", "none", [(increase('remoe_ledger_failures_total', '', JOB), "not written")], 6, "Requests continue; the records are in the gateway's log.", 0, [("red", 1)]),
        panel("Responses by status", "timeseries", "none", [(rate('remoe_gateway_requests_total', 'status', JOB), "{{status}}")], 12, "Per second."),
        panel(
            "Retries and fallback loads",
            "timeseries",
            "none",
            [
                (rate('remoe_expert_retries_total', '', JOB), "retried messages"),
                (rate('remoe_expert_fallback_loads_total', '', JOB), "loaded experts"),
            ],
            12,
            "Per second. A message that gets no answer goes to another replica, then the main function loads the expert.",
        ),
        panel(
            "Failed streams",
            "timeseries",
            "none",
            [(rate("remoe_gateway_streams_failed_total", "reason"), "{{reason}}")],
            12,
            "Per second, after status 200: no function began an answer, or one broke off.",
        ),
        panel("Preemptions", "timeseries", "none", [(rate('remoe_preemptions_total', '', JOB), "preemptions")], 12, "Per second. A preempted request gives its KV cache back and is computed again."),
        panel("Residual cost (not accounted for)", "timeseries", "percentunit", [(f"remoe:cost_residual:ratio{{{JOB}}}", "of the cost")], 12, "Share of what was paid. An alert fires above 1 %."),
        panel("Connections", "timeseries", "none", [(f"sum(remoe_http_connections{{{JOB}}})", "open"), (f"{rate('remoe_connections_refused_total', '', JOB)} or vector(0)", "refused/s")], 12, "Connections of clients and functions."),
        panel("Alerts", "table", "none", [('count by (alertname, severity) (ALERTS{alertname=~"Remoe.*", alertstate="firing"}) or on () vector(0)', "")], 12, "Firing alerts; docs/runbooks has a page for each."),
        panel(
            "Operator",
            "timeseries",
            "none",
            [
                (f"{rate('remoe_operator_reconciliations_total', '', JOB)} or vector(0)", "reconciliations/s"),
                (f"{rate('remoe_operator_reconciliation_errors_total', '', JOB)} or vector(0)", "errors/s"),
                (f"sum(remoe_operator_leader{{{JOB}}}) or vector(0)", "leaders"),
            ],
            12,
            "On a cluster: reconciliations, errors, and pods that lead.",
        ),
    ],
)


def main():
    different = []
    for one in (COST, SERVING, PLAN, HEALTH):
        path = FOLDER / f"{one['uid'].removeprefix('remoe-')}.json"
        text = json.dumps(one, indent=2) + "\n"
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            different.append(path.name)
    if different:
        sys.exit(f"{', '.join(different)}: out of date; run scripts/dashboards.py")


main()
