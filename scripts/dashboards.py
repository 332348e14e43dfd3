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
MODEL = 'model=~"$model"'
REMOTE = MODEL + ', placement="remote"'
NANO = "1e9"
# Each gateway of a cluster says it of the same pods.
RATES = f"max by (model, tier) (remoe_cost_rate_nanodollars_per_hour{{{MODEL}}})"

HEIGHTS = {"stat": 4, "gauge": 6, "timeseries": 8, "piechart": 8, "bargauge": 8, "table": 3, "heatmap": 8}


def panel(title, kind, unit, targets, width, description, decimals=None, thresholds=None, stacked=False):
    """A panel of `targets`, as (query, legend)."""
    options = {
        "stat": {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}},
        "gauge": {"reduceOptions": {"calcs": ["lastNotNull"]}},
        "timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "piechart": {
            "pieType": "donut",
            "reduceOptions": {"calcs": ["lastNotNull"]},
            "legend": {"displayMode": "table", "placement": "right", "values": ["value", "percent"]},
        },
        "bargauge": {"orientation": "horizontal", "displayMode": "basic", "reduceOptions": {"calcs": ["lastNotNull"]}},
        "table": {"showHeader": True},
        "heatmap": {"calculate": False, "yAxis": {"unit": unit}},
    }[kind]
    instant = kind in ("stat", "piechart", "bargauge", "table", "gauge")
    if kind == "stat":
        instant = False
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
    if kind == "gauge":
        defaults |= {"min": 0, "max": 1}
    return {
        "title": title,
        "type": kind,
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
    model = {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(remoe_gateway_model_awake, model)", "refId": "model"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
    return {
        "uid": uid,
        "title": f"Remoe / {title}",
        "description": description,
        "tags": ["remoe"],
        "editable": False,
        "schemaVersion": 38,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [source, model]},
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
        f'sum by (part) ({SPENT}{{part=~"requests|overhead"}})',
        f'max by (part) ({SPENT}{{part=~"idle|cold_start|overlap"}})',
        f'label_replace(clamp_min(max(sum without (part) ({SPENT}{{part=~"requests|failed"}})) - sum({SPENT}{{part="requests"}}), 0), "part", "failed", "", "")',
    ]
)


def rate(metric, by="", labels=MODEL, window="$__rate_interval"):
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({metric}{{{labels}}}[{window}]))" if labels else f"sum{group} (rate({metric}[{window}]))"


def increase(metric, by="", labels=MODEL):
    group = f" by ({by})" if by else ""
    return f"sum{group} (increase({metric}{{{labels}}}[$__range]))"


def quantile(q, metric):
    return f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{{MODEL}}}[$__rate_interval])))"


COST = dashboard(
    "remoe-cost",
    "Cost",
    "What it costs now, what requests cost, and what it saves.",
    [
        panel(
            "All that is alive, an hour",
            "stat",
            "currencyUSD",
            [(f"sum({RATES}) / {NANO}", "an hour")],
            5,
            "What the functions that are alive now cost in an hour. A model that sleeps costs nothing.",
        ),
        panel(
            "Requests, in this time",
            "stat",
            "currencyUSD",
            [(f"{increase('remoe_cost_nanodollars_total')} / {NANO}", "requests")],
            5,
            "What answered requests cost: their shares of the time of functions.",
        ),
        panel(
            "A million tokens",
            "stat",
            "currencyUSD",
            [(f"{increase('remoe_cost_nanodollars_total')} / {NANO} / ({increase('remoe_gateway_tokens_total')} / 1e6)", "per million")],
            5,
            "Of prompts and answers, without idle time.",
        ),
        panel(
            "Saved against MIX",
            "stat",
            "percentunit",
            [(f'1 - {increase("remoe_cost_compared_nanodollars_total", "", MODEL + ", rival=" + chr(34) + "mix" + chr(34))} / {increase("remoe_cost_rival_nanodollars_total", "", MODEL + ", rival=" + chr(34) + "mix" + chr(34))}', "saved")],
            5,
            "Of the price of the same requests with all experts on the CPU beside the main function, on the same basis. Below 0 they cost more here.",
            1,
            [("red", None), ("green", 0)],
        ),
        panel(
            "Idle",
            "stat",
            "percentunit",
            [('max(remoe_cost_spent_nanodollars{part="idle"}) / max(remoe_cost_paid_nanodollars)', "idle")],
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
            "By the price of what is alive, busy or not, one on the other.",
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
            "Dollars an hour, as the plan's baselines would have served them.",
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
            [("remoe:budget_spent:ratio", "{{tenant}} {{model}}")],
            8,
            "Of tenants and models that have one.",
            None,
            [("orange", 0.8), ("red", 1)],
        ),
        panel(
            "Not accounted for",
            "stat",
            "percentunit",
            [("remoe:cost_residual:ratio", "of what was paid")],
            4,
            "What was paid less where the money went.",
            4,
            [("red", 0.01)],
        ),
        panel(
            "A wake, in the mean",
            "stat",
            "s",
            [(f"sum(remoe_gateway_wake_seconds_sum{{{MODEL}}}) / sum(remoe_gateway_wake_seconds_count{{{MODEL}}})", "a wake")],
            4,
            "What it takes to start again what sleeping saves.",
        ),
        panel("Prices", "table", "none", [("remoe_price_info", "{{source}}")], 24, "Where they stand, and of when they are."),
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
        panel("By tenant", "timeseries", "none", [(rate("remoe_gateway_tokens_total", "tenant"), "{{tenant}}")], 12, "Tokens a second."),
        panel(
            "Prompts found among kept keys and values",
            "timeseries",
            "percentunit",
            [(f"{rate('remoe_prefix_cache_hits_total')} / {rate('remoe_prefix_cache_queries_total')}", "of tokens")],
            12,
            "Tokens of prompts that were not computed again.",
        ),
    ],
)

PLAN = dashboard(
    "remoe-plan",
    "Plan",
    "Where experts are computed, and what that takes.",
    [
        panel(
            "Computed remotely",
            "stat",
            "percentunit",
            [(f"{rate('remoe_expert_pairs_total', '', REMOTE)} / {rate('remoe_expert_pairs_total')}", "of pairs")],
            6,
            "Share of (token, expert) pairs.",
            1,
        ),
        panel("Routing generation", "stat", "none", [(f"max(remoe_routing_generation{{{MODEL}}})", "")], 6, "Grows with every change of the placement."),
        panel("Keys and values", "stat", "bytes", [(f"sum(remoe_kv_cache_bytes{{{MODEL}}})", "held")], 6, "Memory of requests that run, and of kept prompts."),
        panel("Experts loaded because nobody answered", "stat", "bytes", [(f"sum(remoe_expert_fallback_bytes{{{MODEL}}})", "held")], 6, "Memory of remote experts that main functions loaded themselves."),
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
            "Plans that followed requests",
            "timeseries",
            "none",
            [("sum by (cause) (increase(remoe_operator_replans_total[$__rate_interval])) or vector(0)", "{{cause}}")],
            12,
            "On a cluster, of all deployments: made for those who woke functions, and because what requests use drifted.",
        ),
        panel(
            "Replicas that followed load",
            "timeseries",
            "none",
            [("sum by (component, direction) (increase(remoe_operator_scalings_total[$__rate_interval])) or vector(0)", "{{component}} {{direction}}")],
            12,
            "On a cluster, of all deployments: times that there were to be more or fewer of a function.",
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
        panel("Sent again", "stat", "none", [("sum(increase(remoe_gateway_retries_total[$__range])) or vector(0)", "requests")], 6, "Requests whose function broke off."),
        panel("Computed again", "stat", "none", [("sum(increase(remoe_iterations_repeated_total[$__range]))", "forwards")], 6, "Forwards whose experts were out of reach."),
        panel("Ledger", "stat", "none", [("sum(increase(remoe_ledger_failures_total[$__range]))", "not written")], 6, "Records that the ledger did not take.", 0, [("red", 1)]),
        panel("Answers by status", "timeseries", "none", [("sum by (status) (rate(remoe_gateway_requests_total[$__rate_interval]))", "{{status}}")], 12, "A second."),
        panel(
            "Remote functions that do not answer",
            "timeseries",
            "none",
            [
                ("sum(rate(remoe_expert_retries_total[$__rate_interval]))", "messages sent again"),
                ("sum(rate(remoe_expert_fallback_loads_total[$__rate_interval]))", "experts loaded"),
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
        panel("Requests that gave way", "timeseries", "none", [("sum(rate(remoe_preemptions_total[$__rate_interval]))", "for room")], 12, "A second: their keys and values made room for others, and are computed again."),
        panel("Not accounted for", "timeseries", "percentunit", [("remoe:cost_residual:ratio", "of what was paid")], 12, "Alert above 1 %."),
        panel("Connections", "timeseries", "none", [("sum(remoe_http_connections)", "open"), ("sum(rate(remoe_connections_refused_total[$__rate_interval])) or vector(0)", "refused a second")], 12, "Of clients and functions."),
        panel("Alerts", "table", "none", [('count by (alertname, severity) (ALERTS{alertname=~"Remoe.*", alertstate="firing"}) or vector(0)', "")], 12, "Those that fire now; docs/runbooks has a page for each."),
        panel(
            "Operator",
            "timeseries",
            "none",
            [
                ("sum(rate(remoe_operator_reconciliations_total[$__rate_interval])) or vector(0)", "looks a second"),
                ("sum(rate(remoe_operator_reconciliation_errors_total[$__rate_interval])) or vector(0)", "that failed"),
                ("sum(remoe_operator_leader) or vector(0)", "leaders"),
            ],
            24,
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
