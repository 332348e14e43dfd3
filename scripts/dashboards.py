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
    "What it costs now, what requests cost, and what it saves.",
    [
        panel(
            "All that runs now costs, an hour",
            "stat",
            "currencyUSD",
            [(f"sum({RATES}) / {NANO}", "an hour")],
            5,
            "What the functions that are alive now cost in an hour. A model that sleeps costs nothing.",
        ),
        panel(
            "Answered requests cost, in this time",
            "stat",
            "currencyUSD",
            [(f"{increase('remoe_cost_nanodollars_total')} / {NANO}", "requests")],
            5,
            "Their shares of the time of functions. Idle time is beside it.",
        ),
        panel(
            "A million tokens costs",
            "stat",
            "currencyUSD",
            [(f"{increase('remoe_cost_nanodollars_total')} / {NANO} / ({increase('remoe_gateway_tokens_total')} / 1e6)", "per million")],
            5,
            "Of prompts and answers, without idle time.",
        ),
        panel(
            "Saved against no remote experts (MIX)",
            "stat",
            "percentunit",
            [(saved('rival="mix"'), "saved")],
            5,
            "Of the price of the same requests with all experts on the CPU beside the main function, on the same basis. Below 0 they cost more here.",
            1,
            [("red", None), ("green", 0)],
        ),
        panel(
            "Of what is paid, idle",
            "stat",
            "percentunit",
            [(f'max({SPENT}{{{JOB}, part="idle"}}) / max(remoe_cost_paid_nanodollars{{{JOB}}})', "idle")],
            4,
            "Share of what was paid since the gateway started for functions that serve and had nothing to do.",
            1,
            [("orange", 0.5), ("red", 0.9)],
        ),
        panel(
            "What an hour costs",
            "timeseries",
            "currencyUSD",
            [(f"{RATES} / {NANO}", "{{model}} {{tier}}")],
            12,
            "By the price of what is alive, busy or not, one on the other. 0 while a model sleeps: an idle hour costs what runs in it.",
            stacked=True,
        ),
        panel(
            "Where the money went",
            "piechart",
            "currencyUSD",
            [(f"({WENT}) / {NANO}", "{{part}}")],
            12,
            "Since the gateways started. Each counts all pods and its own requests: what others answered is no failure.",
        ),
        panel(
            "Requests, an hour, by tier and phase",
            "timeseries",
            "currencyUSD",
            [(f"{rate('remoe_cost_nanodollars_total', 'tier, phase')} * 3600 / {NANO}", "{{tier}} {{phase}}")],
            12,
            "What answered requests cost: prompts (prefill) and answers (decode), one on the other.",
            stacked=True,
        ),
        panel(
            "The same requests elsewhere",
            "timeseries",
            "currencyUSD",
            [
                (f"{rate('remoe_cost_nanodollars_total')} * 3600 / {NANO}", "here"),
                (f"{rate('remoe_cost_rival_nanodollars_total', 'rival')} * 3600 / {NANO}", "{{rival}}"),
            ],
            12,
            "Dollars an hour, as the plan's baselines would have served them, alone and warm.",
        ),
        panel(
            "Saved against each rival",
            "bargauge",
            "percentunit",
            [(saved("", "rival"), "{{rival}}")],
            8,
            "Of what the same requests would have cost there. Below 0 they cost more here.",
            1,
            [("red", None), ("green", 0)],
        ),
        panel(
            "By tenant, in this time",
            "bargauge",
            "currencyUSD",
            [(f"{increase('remoe_cost_nanodollars_total', 'tenant')} / {NANO}", "{{tenant}}")],
            8,
            "What the answered requests of each tenant cost.",
        ),
        panel(
            "Budget of the day that is spent",
            "bargauge",
            "percentunit",
            [(f"remoe:budget_spent:ratio{{{JOB}}}", "{{tenant}} {{model}}")],
            8,
            "Of tenants and models that have one.",
            None,
            [("orange", 0.8), ("red", 1)],
        ),
        panel(
            "Not accounted for",
            "stat",
            "percentunit",
            [(f"remoe:cost_residual:ratio{{{JOB}}}", "of what was paid")],
            6,
            "What was paid less where the money went.",
            4,
            [("red", 0.01)],
        ),
        panel(
            "A wake takes, in the mean",
            "stat",
            "s",
            [(f"sum(remoe_gateway_wake_seconds_sum{{{MODEL}}}) / sum(remoe_gateway_wake_seconds_count{{{MODEL}}})", "a wake")],
            6,
            "What it takes to start again what sleeping saves.",
        ),
        panel("Prices", "table", "none", [(f"count by (source) (remoe_price_info{{{JOB}}})", "")], 12, "Where they stand, and of when they are."),
    ],
)

SERVING = dashboard(
    "remoe-serving",
    "Serving",
    "How fast answers come, and who waits.",
    [
        panel("Tokens a second", "stat", "none", [(rate("remoe_generation_tokens_total"), "answers")], 6, "Of answers, all models together.", 1),
        panel("Requests that functions work on", "stat", "none", [(f"sum(remoe_gateway_requests_in_flight{{{MODEL}}})", "")], 6, "At this moment, at all main functions."),
        panel("Requests that wait", "stat", "none", [(f"sum(remoe_gateway_requests_waiting{{{MODEL}}})", "")], 6, "Held by gateways: for a place, or for functions to start.", None, [("orange", 1)]),
        panel("Models awake", "stat", "none", [(f"sum(remoe_gateway_model_awake{{{MODEL}}})", "")], 6, "Models that take requests at once."),
        panel(
            "Time to first token",
            "timeseries",
            "s",
            [(quantile(q, "remoe_time_to_first_token_seconds"), name) for q, name in [(0.5, "half"), (0.9, "90 %"), (0.99, "99 %")]],
            12,
            "From the main function's queue; cold starts are beside it.",
        ),
        panel(
            "Time between tokens",
            "timeseries",
            "s",
            [(quantile(q, "remoe_inter_token_latency_seconds"), name) for q, name in [(0.5, "half"), (0.9, "90 %"), (0.99, "99 %")]],
            12,
            "From one token of an answer to the next.",
        ),
        panel(
            "Tokens",
            "timeseries",
            "none",
            [
                (rate("remoe_prompt_tokens_total"), "prompts"),
                (rate("remoe_generation_tokens_total"), "answers"),
            ],
            12,
            "A second, all models together.",
        ),
        panel(
            "Requests that wait and run",
            "timeseries",
            "none",
            [
                (f"sum by (model) (remoe_gateway_requests_waiting{{{MODEL}}})", "{{model}} waiting"),
                (f"sum by (model) (remoe_gateway_requests_in_flight{{{MODEL}}})", "{{model}} running"),
            ],
            12,
            "Held by gateways, and at main functions.",
        ),
        panel("Whole requests", "heatmap", "s", [(f"sum by (le) (increase(remoe_e2e_request_latency_seconds_bucket{{{MODEL}}}[$__rate_interval]))", "{{le}}")], 12, "From a request's arrival at its main function to its last token."),
        panel(
            "Wakes",
            "timeseries",
            "s",
            [(quantile(0.5, "remoe_gateway_wake_seconds"), "half"), (quantile(0.99, "remoe_gateway_wake_seconds"), "99 %")],
            12,
            "From the decision to wake until requests are taken.",
        ),
        panel(
            "Cold starts by part, in this time",
            "bargauge",
            "s",
            [(cold_start(part), part) for part in ("decide", "schedule", "start", "load", "ready", "first")],
            8,
            "Means of requests that came while nothing answered, one part after the other: until the wake was decided, the first function was started, all listened, weights were loaded, the request was handed over, and the first token.",
        ),
        panel("By tenant", "timeseries", "none", [(rate("remoe_gateway_tokens_total", "tenant"), "{{tenant}}")], 8, "Tokens a second."),
        panel(
            "Prompts found among kept keys and values",
            "timeseries",
            "percentunit",
            [(f"{rate('remoe_prefix_cache_hits_total')} / {rate('remoe_prefix_cache_queries_total')}", "of tokens")],
            8,
            "Tokens of prompts that were not computed again.",
        ),
    ],
)

PLAN = dashboard(
    "remoe-plan",
    "Plan",
    "Where experts live, whether that was foreseen, and what it takes.",
    [
        panel(
            "Experts that live elsewhere",
            "stat",
            "percentunit",
            [(f"sum(remoe_placement_experts{{{REMOTE}}}) / sum(remoe_placement_experts{{{MODEL}}})", "remote")],
            6,
            "Of all layers, in remote functions. None while a model sleeps.",
            1,
        ),
        panel(
            "Work that is done elsewhere",
            "stat",
            "percentunit",
            [(f"{rate('remoe_expert_pairs_total', '', REMOTE)} / {rate('remoe_expert_pairs_total')}", "of pairs")],
            6,
            "Share of (token, expert) pairs. Less than of the experts: those that are used most live beside the main function.",
            1,
        ),
        panel(
            "Work on experts foreseen as busy",
            "stat",
            "percentunit",
            [(f"avg(remoe_prediction_hot_recall_ratio{{{MODEL}}})", "of the busy half")],
            6,
            "Of the work of the half of experts that was used most, the part on those that were predicted to be in it. There where requests are predicted: --replan, spec.prediction.",
            1,
        ),
        panel("Placement in force", "stat", "none", [(f"max(remoe_routing_generation{{{MODEL}}})", "")], 6, "Its number grows with every change."),
        panel(
            "Where experts live",
            "timeseries",
            "none",
            [(f"sum by (placement) (remoe_placement_experts{{{MODEL}}})", "{{placement}}")],
            12,
            "Experts of all layers: beside the main function (local) and in remote functions, one on the other.",
            stacked=True,
        ),
        panel(
            "Memory by tier",
            "timeseries",
            "decbytes",
            [(f"max by (model, tier) (remoe_tier_memory_bytes{{{MODEL}}})", "{{model}} {{tier}}")],
            12,
            "What the functions that are alive were given, one on the other. 0 while a model sleeps.",
            stacked=True,
        ),
        panel(
            "Work as predicted, by eighths of the experts",
            "rows",
            "percentunit",
            [(activation("predicted", "eighth"), "{{eighth}}")],
            12,
            "1: the eighth of each layer's experts that was predicted to be used most. Share of the work, mean of the latest requests. The same picture beside it is what a good prediction gives.",
        ),
        panel(
            "Work as observed, by the same eighths",
            "rows",
            "percentunit",
            [(activation("observed", "eighth"), "{{eighth}}")],
            12,
            "What the same requests truly used, in the order of the prediction.",
        ),
        panel(
            "Work elsewhere than predicted, by layers",
            "rows",
            "percentunit",
            [(f"sum by (layers) (abs({activation('observed', 'layers, eighth')} - {activation('predicted', 'layers, eighth')})) / 2", "{{layers}}")],
            12,
            "The share of work on other eighths than predicted, by neighbouring layers.",
        ),
        panel(
            "Predictions are off by",
            "timeseries",
            "none",
            [(f"avg by (phase) (remoe_prediction_divergence_nats{{{MODEL}}})", "{{phase}}")],
            12,
            "Jensen-Shannon divergence of what was predicted and what was used, in nats: 0 is the same, 0.69 has nothing in common.",
            3,
        ),
        panel(
            "Work on experts foreseen as busy, and as idle, by layers",
            "timeseries",
            "percentunit",
            [
                (f"avg by (layers) (remoe_prediction_layers_hot_recall_ratio{{{MODEL}}})", "busy: {{layers}}"),
                (f"avg by (layers) (remoe_prediction_layers_cold_share_ratio{{{MODEL}}})", "idle: {{layers}}"),
            ],
            12,
            "Busy: of the work of the half of experts that was used most, the part on those that were predicted to be in it. Idle: of all work, the part on the half that was predicted to be used least, which is what is remote first. By thirds of the layers, both phases alike.",
        ),
        panel(
            "Predictions that held",
            "timeseries",
            "percentunit",
            [
                (f"avg by (layers) (remoe_prediction_layers_coverage_ratio{{{MODEL}}})", "within error bars: {{layers}}"),
                (
                    f"sum(remoe_prediction_unfamiliar_requests{{{MODEL}}}) / sum(remoe_prediction_compared_requests{{{MODEL}}})",
                    "requests unlike the history",
                ),
            ],
            12,
            "Requests and layers that were off by no more than the predicted 95th percentile, which should be 95 %, and the part of requests about which the predictors are more at odds than about any of the history. There with a trained predictor.",
        ),
        panel(
            "Time to first token: plan and truth",
            "timeseries",
            "s",
            [(mean("remoe_plan_time_to_first_token_seconds_total", "of"), "{{of}}")],
            8,
            "Means of requests that ran under a plan: as it expected of their lengths, and as they were measured, waiting included.",
        ),
        panel(
            "Time per output token: plan and truth",
            "timeseries",
            "s",
            [(mean("remoe_plan_time_per_output_token_seconds_total", "of"), "{{of}}")],
            8,
            "Means of the same requests.",
        ),
        panel(
            "A thousand requests cost: plan and truth",
            "timeseries",
            "currencyUSD",
            [(f"{mean('remoe_plan_cost_dollars_total', 'of')} * 1000", "{{of}}")],
            8,
            "By the mean of the same requests, as if each were alone.",
        ),
        panel(
            "Pairs by where they were computed",
            "timeseries",
            "none",
            [(rate("remoe_expert_pairs_total", "placement"), "{{placement}}")],
            12,
            "A second: a pair is a token and one of the experts that it goes to.",
        ),
        panel(
            "Waiting for remote functions, a layer",
            "timeseries",
            "s",
            [(quantile(q, "remoe_expert_wait_seconds"), name) for q, name in [(0.5, "half"), (0.99, "99 %")]],
            12,
            "After the local experts were done.",
        ),
        panel(
            "Price by tier",
            "timeseries",
            "currencyUSD",
            [(f"sum by (tier) ({RATES}) / {NANO}", "{{tier}}")],
            12,
            "Of the sizes that the plan gave them, an hour.",
        ),
        panel(
            "Cost of requests by tier",
            "timeseries",
            "currencyUSD",
            [(f"{rate('remoe_cost_nanodollars_total', 'tier')} * 3600 / {NANO}", "{{tier}}")],
            12,
            "An hour. A tier that is paid for and has no share of requests is idle.",
        ),
        panel("A forward", "heatmap", "s", [(f"sum by (le) (increase(remoe_iteration_seconds_bucket{{{MODEL}}}[$__rate_interval]))", "{{le}}")], 12, "Of all requests in the batch."),
        panel(
            "Requests in a forward",
            "timeseries",
            "none",
            [(f"{rate('remoe_forwarded_positions_total')} / {rate('remoe_iterations_total')}", "rows"), (f"sum(remoe_requests_running{{{MODEL}}})", "requests")],
            12,
            "Rows of a forward, and requests that are in the batch.",
        ),
        panel(
            "Memory that requests take",
            "timeseries",
            "decbytes",
            [
                (f"sum(remoe_kv_cache_bytes{{{MODEL}}})", "keys and values"),
                (f"sum(remoe_expert_fallback_bytes{{{MODEL}}})", "experts loaded because nobody answered"),
            ],
            8,
            "Of requests that run and of kept prompts; and remote experts that main functions loaded themselves.",
        ),
        panel(
            "Plans that followed requests",
            "timeseries",
            "none",
            [
                (f"sum by (cause) (increase(remoe_replans_total{{{MODEL}}}[$__rate_interval]))", "{{cause}}"),
                (f"sum by (cause) (increase(remoe_operator_replans_total{{{JOB}}}[$__rate_interval])) or vector(0)", "operator {{cause}}"),
            ],
            8,
            "Made for those who woke functions, and because what requests use drifted; on a cluster the operator's, of all deployments.",
        ),
        panel(
            "Replicas that followed load",
            "timeseries",
            "none",
            [(f"sum by (component, direction) (increase(remoe_operator_scalings_total{{{JOB}}}[$__rate_interval])) or vector(0)", "{{component}} {{direction}}")],
            8,
            "On a cluster, of all deployments: times that there were to be more or fewer of a function.",
        ),
        panel(
            "Remote groups that sleep",
            "timeseries",
            "none",
            [
                # Each gateway counts all of them.
                (f"sum by (model) (max by (job, model) (remoe_gateway_groups_asleep{{{MODEL}}}))", "{{model}} asleep"),
                (f"sum by (cause) (increase(remoe_gateway_group_wakes_total{{{MODEL}}}[$__rate_interval]))", "woken: {{cause}}"),
                (f"sum by (turn) (increase(remoe_operator_group_turns_total{{{JOB}}}[$__rate_interval])) or vector(0)", "operator {{turn}}"),
            ],
            12,
            "While their main function runs, where --remote-idle or spec.scaling.remoteIdleWindow lets them; on a cluster the operator counts their turns, of all deployments.",
        ),
        panel(
            "Work asked of groups that slept",
            "timeseries",
            "none",
            [(rate("remoe_gateway_group_sleeping_pairs_total"), "pairs")],
            12,
            "(token, expert) pairs a second that main functions computed by themselves, with --remote-idle: what sleep costs in time.",
        ),
    ],
    [("Placement", f"changes(remoe_routing_generation{{{MODEL}}}[1m]) > 0", "a new placement is in force")],
)

HEALTH = dashboard(
    "remoe-health",
    "Health",
    "What fails, what is tried again, and whether money adds up.",
    [
        panel("Answers that failed", "stat", "percentunit", [("remoe:request_errors:ratio_rate5m", "of answers")], 6, "Status 5xx, of all.", 2, [("red", 0.01)]),
        panel("Requests sent again", "stat", "none", [(f"{increase('remoe_gateway_retries_total', '', JOB)} or vector(0)", "requests")], 6, "Requests whose function broke off."),
        panel("Forwards computed again", "stat", "none", [(increase('remoe_iterations_repeated_total', '', JOB), "forwards")], 6, "Forwards whose experts were out of reach."),
        panel("Records that the ledger did not take", "stat", "none", [(increase('remoe_ledger_failures_total', '', JOB), "not written")], 6, "Answers went on; the gateway's log has them.", 0, [("red", 1)]),
        panel("Answers by status", "timeseries", "none", [(rate('remoe_gateway_requests_total', 'status', JOB), "{{status}}")], 12, "A second."),
        panel(
            "Remote functions that do not answer",
            "timeseries",
            "none",
            [
                (rate('remoe_expert_retries_total', '', JOB), "messages sent again"),
                (rate('remoe_expert_fallback_loads_total', '', JOB), "experts loaded"),
            ],
            12,
            "A second: a message goes to another replica, then the expert is loaded here.",
        ),
        panel(
            "Streams that failed",
            "timeseries",
            "none",
            [(rate("remoe_gateway_streams_failed_total", "reason"), "{{reason}}")],
            12,
            "A second, after their head had said 200: no function began an answer, or one broke off.",
        ),
        panel("Requests that gave way", "timeseries", "none", [(rate('remoe_preemptions_total', '', JOB), "for room")], 12, "A second: their keys and values made room for others, and are computed again."),
        panel("Not accounted for", "timeseries", "percentunit", [(f"remoe:cost_residual:ratio{{{JOB}}}", "of what was paid")], 12, "Alert above 1 %."),
        panel("Connections", "timeseries", "none", [(f"sum(remoe_http_connections{{{JOB}}})", "open"), (f"{rate('remoe_connections_refused_total', '', JOB)} or vector(0)", "refused a second")], 12, "Of clients and functions."),
        panel("Alerts", "table", "none", [('count by (alertname, severity) (ALERTS{alertname=~"Remoe.*", alertstate="firing"}) or on () vector(0)', "")], 12, "Those that fire now; docs/runbooks has a page for each."),
        panel(
            "Operator",
            "timeseries",
            "none",
            [
                (f"{rate('remoe_operator_reconciliations_total', '', JOB)} or vector(0)", "looks a second"),
                (f"{rate('remoe_operator_reconciliation_errors_total', '', JOB)} or vector(0)", "that failed"),
                (f"sum(remoe_operator_leader{{{JOB}}}) or vector(0)", "leaders"),
            ],
            12,
            "On a cluster.",
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
        sys.exit(f"{', '.join(different)}: not what scripts/dashboards.py writes; run it")


main()
