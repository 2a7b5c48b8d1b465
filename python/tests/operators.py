"""The examples for Prometheus and Grafana, read by Grafana's data model and a parser of PromQL.

    python3 operators.py FOLDER
"""

import json
import pathlib
import sys

import promql_parser
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

folder = pathlib.Path(sys.argv[1])


def lost(before, after, path=""):
    """Where a dashboard has fields that Grafana's model does not know, or changes."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after.get(key), f"{path}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after)):
            yield from lost(*pair, f"{path}/{number}")
    elif before != after:
        yield path


dashboard = json.loads((folder / "grafana-dashboard.json").read_text())
read = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
assert not list(lost(dashboard, read)), list(lost(dashboard, read))

queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
alerts = yaml.safe_load((folder / "prometheus-alerts.yml").read_text())
rules = [rule for group in alerts["groups"] for rule in group["rules"]]
assert len(queries) >= 10 and len(rules) >= 4, (queries, rules)
for query in queries + [rule["expr"] for rule in rules]:
    promql_parser.parse(query.replace("$__rate_interval", "5m").replace("$socket", ".*"))
print(f"Grafana's model reads the dashboard; {len(queries)} queries and {len(rules)} alerts are PromQL")
