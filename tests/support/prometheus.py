"""A real Prometheus server, and the queries of the boards and rules in compose/."""

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from support.compose import COMPOSE
from support.nats import free_port
from support.wait import PATIENCE_S

RULES = COMPOSE / "prometheus" / "rules.yml"
NAME = re.compile(r"\b(?:kvmesh[:_][a-z0-9_:]+|up\b)")
UNPACKED = Path(__file__).parents[2] / ".prometheus" / "usr" / "bin"


def program(name: str) -> str | None:
    """Path of `prometheus` or `promtool`: the system's, else the one that make unpacked."""
    return shutil.which(name) or shutil.which(name, path=str(UNPACKED))


def rules(kind: str) -> dict[str, str]:
    """Expressions by name; `kind` is "record" or "alert"."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule[kind]: rule["expr"] for group in groups for rule in group["rules"] if kind in rule}


def panels(range_: str = "1m") -> dict[str, str]:
    """Expressions of the boards by board, panel and query; rates are over `range_`."""
    found = {}
    for file in sorted((COMPOSE / "grafana" / "boards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                key = f"{file.stem}: {panel['title']} {target['refId']}"
                found[key] = target["expr"].replace("$__rate_interval", range_)
    return found


class PrometheusServer:
    """A server that scrapes the given ports by job, each second, under the shipped rules."""

    def __init__(self, folder: Path, ports: Mapping[str, list[int]]) -> None:
        self.port = free_port()
        self._folder = folder
        self._ports = ports
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        jobs = [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{p}" for p in ports]}]}
            for job, ports in self._ports.items()
        ]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": jobs,
        }
        file = self._folder / "prometheus.json"  # JSON is YAML
        file.write_text(json.dumps(config))
        binary = program("prometheus")
        assert binary is not None
        options = [f"--config.file={file}", f"--storage.tsdb.path={self._folder / 'tsdb'}"]
        options += [f"--web.listen-address=127.0.0.1:{self.port}"]
        options += ["--enable-feature=exemplar-storage"]
        with (self._folder / "prometheus.log").open("ab") as log:
            self._process = subprocess.Popen([binary, *options], stdout=log, stderr=log)

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=PATIENCE_S) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def query(self, expression: str) -> list[Any]:
        """The samples of an expression now; raises HTTPError if it does not parse."""
        path = f"/api/v1/query?query={urllib.parse.quote(expression)}"
        with urllib.request.urlopen(self._url + path, timeout=PATIENCE_S) as answer:
            found = json.load(answer)["data"]
        return list(found["result"])

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(PATIENCE_S)

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.port}"
