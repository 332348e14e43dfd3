"""Draws a dashboard from its own queries: HTML with figures as SVG, and a picture of it by Chromium."""

import html
import json
import math
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request

COLUMN, ROW, GAP = 56, 34, 8
COLORS = ["#73bf69", "#5794f2", "#f2cc0c", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#96d98d", "#ffcb7d", "#e0b400"]


def get(url, **parameters):
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(parameters)}", timeout=20) as answer:
        return json.load(answer)["data"]["result"]


def shown(value, unit, decimals=None):
    if value is None or math.isnan(value):
        return "no data"
    if unit == "percentunit":
        return f"{value * 100:.{1 if decimals is None else decimals}f} %"
    prefix = "$" if unit == "currencyUSD" else ""
    # A prefix of a unit stands before the unit.
    suffix = {"s": "s", "bytes": "B", "decbytes": "B"}.get(unit, "")
    space = " " if suffix else ""
    if value == 0:
        return f"{prefix}0{space}{suffix}"
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{prefix}{value / scale:.3g}{space}{letter}{suffix}"
    if abs(value) >= 0.01 and unit != "s" or abs(value) >= 1:
        return f"{prefix}{value:.3g}{space}{suffix}"
    if prefix:
        # As Grafana does: a thousandth of a dollar is no $1m.
        return f"{prefix}{value:.{2 - math.floor(math.log10(abs(value)))}f}"
    for scale, letter in ((1e3, "m"), (1e6, "µ"), (1e9, "n")):
        if abs(value) * scale >= 1:
            break
    return f"{value * scale:.3g}{space}{letter}{suffix}"


def legend(template, labels):
    text = template
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    text = text.split("{{")[0].strip()
    return text or ", ".join(value for name, value in labels.items() if name != "__name__") or "value"


def instants(api, panel, prepare):
    for target in panel["targets"]:
        for sample in get(f"{api}/query", query=prepare(target["expr"])):
            yield legend(target["legendFormat"], sample["metric"]), sample["metric"], float(sample["value"][1])


def ranges(api, panel, prepare, seconds):
    now = time.time()
    for target in panel["targets"]:
        query = prepare(target["expr"])
        step = max(1, seconds // 60)
        for series in get(f"{api}/query_range", query=query, start=now - seconds, end=now, step=step):
            points = [(float(at), float(value)) for at, value in series["values"]]
            points = [(at, value) for at, value in points if not math.isnan(value)]
            if points:
                yield legend(target["legendFormat"], series["metric"]), points


def stacked(series):
    """Each curve on those before it."""
    below = {}
    for name, points in series:
        for at, value in points:
            below[at] = below.get(at, 0) + value
        yield name, [(at, below[at]) for at, _ in points]


def lines(series, unit, width, height, minimum=None, stack=False, moments=()):
    """Curves over time with their scale, and a mark at each of the `moments`."""
    series = list(stacked(series) if stack else series)
    if not series:
        return '<text x="10" y="40">no data</text>'
    times = [at for _, points in series for at, _ in points]
    values = [value for _, points in series for _, value in points]
    low, high = min(values + [0 if minimum is None else minimum]), max(values)
    # A tenth of nothing is no scale.
    high = high if high > low else low + {"percentunit": 0.01, "none": 4}.get(unit, 1)
    left, bottom = 70, height - 44
    x = lambda at: left + (at - min(times)) / max(1, max(times) - min(times)) * (width - left - 12)
    y = lambda value: bottom - (value - low) / (high - low) * (bottom - 8)
    drawn = []
    for number in range(5):
        value = low + (high - low) * number / 4
        drawn.append(f'<line x1="{left}" x2="{width - 12}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#333"/>')
        drawn.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{shown(value, unit)}</text>')
    for number in range(4):
        at = min(times) + (max(times) - min(times)) * number / 3
        anchor = ("start", "middle", "middle", "end")[number]
        drawn.append(f'<text x="{x(at):.1f}" y="{bottom + 16}" text-anchor="{anchor}">{time.strftime("%H:%M:%S", time.gmtime(at))}</text>')
    for at in moments:
        if min(times) <= at <= max(times):
            drawn.append(f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="8" y2="{bottom}" stroke="#5794f2" stroke-dasharray="3 3"/>')
    place = left
    for number, (name, points) in enumerate(series[:10]):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
        if stack:
            beneath = [(at, value) for at, value in (series[number - 1][1] if number else [])]
            floor = beneath or [(points[0][0], low), (points[-1][0], low)]
            area = path + " " + " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in reversed(floor))
            drawn.append(f'<polygon points="{area}" fill="{color}" fill-opacity="0.35"/>')
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        if place < width - 80:
            drawn.append(f'<rect x="{place}" y="{height - 16}" width="10" height="4" fill="{color}"/>')
            drawn.append(f'<text x="{place + 14}" y="{height - 11}">{html.escape(name)}</text>')
        place += 26 + 7 * len(name)
    return "".join(drawn)


def donut(parts, unit, width, height):
    parts = [(name, value) for name, _, value in parts]
    whole = sum(value for _, value in parts) or 1
    middle, radius, start, drawn = (height / 2 - 6, height / 2 - 20, 0, [])
    for number, (name, value) in enumerate(sorted(parts, key=lambda part: -part[1])):
        share, color = value / whole, COLORS[number % len(COLORS)]
        length = 2 * math.pi * radius
        drawn.append(
            f'<circle cx="{middle + 20}" cy="{middle}" r="{radius * 0.8}" fill="none" stroke="{color}" stroke-width="{radius * 0.36}" '
            f'stroke-dasharray="{share * length * 0.8:.2f} {length}" transform="rotate({start * 360 - 90:.2f} {middle + 20} {middle})"/>'
        )
        start += share
        at = 2 * middle + 60
        drawn.append(f'<rect x="{at}" y="{24 + 24 * number}" width="12" height="12" fill="{color}"/>')
        drawn.append(f'<text x="{at + 20}" y="{34 + 24 * number}">{html.escape(name)}: {shown(value, unit)} ({share * 100:.1f} %)</text>')
    return "".join(drawn)


def bars(parts, unit, width, height, color_of):
    """A bar for each of `parts`, as many as six, as far apart as there is room for."""
    step = min(38, (height - 8) / max(1, len(parts[:6])))
    most = 1 if unit == "percentunit" else max((value for *_, value in parts), default=1) or 1
    drawn = []
    for number, (name, _, value) in enumerate(parts[:6]):
        top = 6 + step * number
        color = color_of(value)
        drawn.append(f'<text x="8" y="{top + 10}">{html.escape(name)}</text>')
        drawn.append(f'<rect x="8" y="{top + 14:.1f}" width="{max(2, min(1, value / most) * (width - 110)):.1f}" height="{min(12, step - 19):.1f}" fill="{color}"/>')
        drawn.append(f'<text x="{width - 8}" y="{top + 14 + min(12, step - 19) / 2 + 4:.1f}" text-anchor="end" fill="#fff">{shown(value, unit)}</text>')
    return "".join(drawn)


def heat(series, unit, width, height):
    """Histogram buckets over time, of which each counts those below too."""
    found = {}
    for _, labels, points in series:
        found[float(labels["le"].replace("+Inf", "inf"))] = dict(points)
    bounds = sorted(found)
    times = sorted({at for points in found.values() for at in points})
    if not times:
        return '<text x="10" y="40">no data</text>'
    cells = {}
    for at in times:
        before = 0
        for number, bound in enumerate(bounds):
            value = found[bound].get(at, before)
            cells[at, number], before = max(0, value - before), value
    most = max(cells.values()) or 1
    left, bottom = 70, height - 24
    wide, tall = (width - left - 12) / len(times), (bottom - 8) / len(bounds)
    drawn = [
        f'<rect x="{left + times.index(at) * wide:.1f}" y="{bottom - (number + 1) * tall:.1f}" width="{wide + 0.3:.1f}" height="{tall:.1f}" '
        f'fill="rgb(242,{int(200 - 150 * value / most)},60)" fill-opacity="{0.15 + 0.85 * value / most:.2f}"/>'
        for (at, number), value in cells.items()
        if value > 0
    ]
    for number in range(0, len(bounds), 2):
        if math.isfinite(bounds[number]):
            drawn.append(f'<text x="{left - 6}" y="{bottom - number * tall:.1f}" text-anchor="end">{shown(bounds[number], unit)}</text>')
    return "".join(drawn)


def row_heat(series, unit, width, height):
    """A row for each of the `series` over time, the first on top; each cell has the color of its value."""
    if not series:
        return '<text x="10" y="40">no data</text>'
    number_of = lambda one: float(one[0].split("-")[0])
    series = sorted(series, key=number_of)
    times = sorted({at for _, points in series for at, _ in points})
    most = max(value for _, points in series for _, value in points) or 1
    left, bottom = 50, height - 24
    wide, tall = (width - left - 64) / len(times), (bottom - 8) / len(series)
    drawn = []
    for number, (name, points) in enumerate(series):
        top = 8 + number * tall
        drawn.append(f'<text x="{left - 6}" y="{top + tall / 2 + 4:.1f}" text-anchor="end">{html.escape(name)}</text>')
        for at, value in points:
            shade = max(0, value / most)
            drawn.append(
                f'<rect x="{left + times.index(at) * wide:.1f}" y="{top:.1f}" width="{wide + 0.3:.1f}" height="{tall - 1:.1f}" '
                f'fill="rgb({int(255 - 60 * shade)},{int(240 - 180 * shade)},{int(220 - 210 * shade)})"/>'
            )
        drawn.append(f'<text x="{width - 58}" y="{top + tall / 2 + 4:.1f}">{shown(points[-1][1], unit)}</text>')
    for number in range(3):
        at = times[(len(times) - 1) * number // 2]
        anchor = ("start", "middle", "end")[number]
        place = left + (width - left - 64) * number / 2
        drawn.append(f'<text x="{place:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{time.strftime("%H:%M:%S", time.gmtime(at))}</text>')
    return "".join(drawn)


def color(defaults, value):
    """By the thresholds of a panel."""
    steps = defaults["thresholds"]["steps"]
    reached = [step["color"] for step in steps if step["value"] is None or (value is not None and value >= step["value"])]
    return {"green": "#73bf69", "orange": "#ff9830", "red": "#f2495c"}[reached[-1]]


def figure(api, panel, prepare, seconds, width, height, moments):
    defaults = panel["fieldConfig"]["defaults"]
    unit, kind = defaults["unit"], panel["type"]
    if kind == "stat":
        values = list(instants(api, panel, prepare))
        value = values[0][2] if values else None
        text = shown(value, unit, defaults.get("decimals"))
        return f'<text x="{width / 2}" y="{height / 2 + 12}" text-anchor="middle" font-size="34" fill="{color(defaults, value)}">{text}</text>'
    if kind == "timeseries":
        return lines(ranges(api, panel, prepare, seconds), unit, width, height, defaults.get("min"), "stacking" in defaults["custom"], moments)
    if kind == "piechart":
        return donut(instants(api, panel, prepare), unit, width, height)
    if kind == "bargauge":
        parts = list(instants(api, panel, prepare))
        # What is one query of many comes in no order.
        parts = parts if len(panel["targets"]) > 1 else sorted(parts, key=lambda part: -part[2])
        return bars(parts, unit, width, height, lambda value: color(defaults, value))
    if kind == "heatmap" and panel["targets"][0].get("format") != "heatmap":
        return row_heat(list(ranges(api, panel, prepare, seconds)), unit, width, height)
    if kind == "heatmap":
        now, query = time.time(), prepare(panel["targets"][0]["expr"])
        found = get(f"{api}/query_range", query=query, start=now - seconds, end=now, step=max(2, seconds // 30))
        series = [("", one["metric"], [(float(at), float(value)) for at, value in one["values"]]) for one in found]
        return heat(series, unit, width, height)
    rows = [", ".join(f"{key}: {text}" for key, text in labels.items() if key not in ("__name__", "instance", "job")) or shown(value, unit) for _, labels, value in instants(api, panel, prepare)]
    return "".join(f'<text x="10" y="{26 + 22 * number}">{html.escape(row)}</text>' for number, row in enumerate(rows))


def dashboard(api, content, prepare, seconds, path):
    """Draws the dashboard `content` of the last `seconds` as `path`."""
    boxes, bottom, moments = [], 0, []
    for annotation in content["annotations"]["list"]:
        now, query = time.time(), prepare(annotation["expr"])
        for series in get(f"{api}/query_range", query=query, start=now - seconds, end=now, step=1):
            at = [float(at) for at, _ in series["values"]]
            # The moment in which it becomes true.
            moments += [moment for before, moment in zip([0, *at], at) if moment - before > 2]
    for panel in content["panels"]:
        place = panel["gridPos"]
        x, y = place["x"] * COLUMN, 60 + place["y"] * ROW
        width, height = place["w"] * COLUMN - GAP, place["h"] * ROW - GAP
        bottom = max(bottom, y + height)
        drawn = figure(api, panel, prepare, seconds, width, height - 28, moments)
        boxes.append(
            f'<div style="left:{x}px;top:{y}px;width:{width}px;height:{height}px"><b>{html.escape(panel["title"])}</b>'
            f'<svg width="{width}" height="{height - 28}">{drawn}</svg></div>'
        )
    page = f"""<!doctype html><meta charset="utf-8"><style>
        body {{ background:#111217; color:#ccccdc; font:12px 'DejaVu Sans', sans-serif; margin:8px }}
        h1 {{ font-size:18px; font-weight:500; margin:4px }} p {{ margin:4px; color:#9a9aaa }}
        div {{ position:absolute; background:#181b1f; border:1px solid #2a2c31; border-radius:3px; margin-left:8px }}
        b {{ font-weight:500; display:block; padding:6px 8px 4px; white-space:nowrap; overflow:hidden }} svg {{ fill:#ccccdc }}</style>
        <h1>{html.escape(content["title"])}</h1><p>{html.escape(content["description"])}</p>{"".join(boxes)}"""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        source = f"{work}/page.html"
        with open(source, "w", encoding="utf-8") as file:
            file.write(page)
        size = f"{24 * COLUMN + 16},{bottom + 16}"
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={work}/profile"]
        command += ["--hide-scrollbars", f"--window-size={size}", f"--screenshot={path.resolve()}", f"file://{source}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120)
