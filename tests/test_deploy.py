"""What is under deploy/ fits the package: settings exist, metrics are served."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import generate_latest

from hicache_mooncake.config import Settings
from hicache_mooncake.config_sources import ENV_PREFIX
from hicache_mooncake.node.metrics import PREFIX, NodeMetrics

DEPLOY = Path(__file__).parent.parent / "deploy"


def test_every_setting_in_the_manifest_exists_and_is_allowed() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "pool.yaml").read_text()))
    (engine,) = [found for found in documents if found["metadata"]["name"] == "sglang"]
    (container,) = engine["spec"]["template"]["spec"]["containers"]
    env = {entry["name"]: entry.get("value", "10.0.0.9") for entry in container["env"]}
    env = {name: re.sub(r"\$\((\w+)\)", lambda found: env[found.group(1)], text) for name, text in env.items()}
    settings = Settings.load(env={name: value for name, value in env.items() if name.startswith(ENV_PREFIX)})
    assert settings.advertise == "10.0.0.9"
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(Path(settings.secret_file).parent) in mounted
    ports = {port["containerPort"] for port in container["ports"]}
    assert {settings.metrics_port, int(settings.listen.rpartition(":")[2])} <= ports
    assert int(re.sub(r"\D", "", container["resources"]["limits"]["memory"])) << 30 > settings.segment_size
    services = {found["metadata"]["name"]: found for found in documents if found["kind"] == "Service"}
    assert re.findall(r"//([\w-]+):", settings.redis_url) == list(services)


def test_every_metric_on_the_dashboard_is_served() -> None:
    metrics = NodeMetrics(dict, pool="p", node="n")
    for op in ("get", "put", "exists"):
        metrics.observe(op, 0.1)
    served = set(re.findall(rf"^({PREFIX}\w+)", generate_latest(metrics.registry).decode(), re.M))
    dashboard = json.loads((DEPLOY / "grafana" / "hicache-mooncake.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [_query(variable) for variable in dashboard["templating"]["list"]]
    used = {name for text in expressions for name in re.findall(rf"{PREFIX}\w+", text)}
    assert len(used) > 12
    assert used <= served


def test_the_panels_do_not_overlap() -> None:
    panels = json.loads((DEPLOY / "grafana" / "hicache-mooncake.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def _query(variable: dict[str, Any]) -> str:
    query = variable["query"]
    return str(query["query"] if isinstance(query, dict) else query)
