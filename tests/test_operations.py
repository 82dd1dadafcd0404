"""What ``specli serve --operations-file`` prints: alerts, dashboard, scrape, unit and container, against the metrics.

``PYTHONPATH=.:tests python tests/test_operations.py`` renews the README's table of metrics.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from support import HANG_S

pytest.importorskip("fastapi")
pytest.importorskip("yaml")
import yaml
from prometheus_client.parser import text_string_to_metric_families

import specli as package
from specli.cli.main import application
from specli.cli.serve_flags import OPERATIONS
from specli.serve.metrics import Metrics
from specli.serve.server import DRAIN_S

ROOT = Path(package.__file__).parent.parent
README = ROOT / "README.md"
NAMES = ["Containerfile", "alerts.yml", "alerts_test.yml", "grafana.json", "prometheus.yml", "specli.service"]
NAME = re.compile(r"\bspecli_[a-z0-9_]+")
UNITS = ("_seconds", "_ratio", "_tokens", "_total", "_info")
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this machine's own, whatever the proxy
BEGIN, END = "<!-- metrics -->\n", "<!-- end -->"


def read(name: str) -> str:
    return (OPERATIONS / name).read_text("utf-8")


def first_scrape() -> str:
    metrics = Metrics(k_max=3, n_slots=2)
    metrics.set_bounds(None, 40.0)
    return metrics.expose(0.0, (None, None), {}).decode("utf-8")


def families():
    return list(text_string_to_metric_families(first_scrape()))


def told_names() -> set[str]:
    """Every name that a query may ask for."""
    return {sample.name for family in families() for sample in family.samples}


def dashboard():
    return json.loads(read("grafana.json"))


def panels():
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    """The dashboard's PromQL, with its variables filled in."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    fills = {"$__rate_interval": "5m", "$job": ".*", "$instance": ".*"}
    for name, value in fills.items():
        found = [query.replace(name, value) for query in found]
    assert not any("$" in query for query in found)
    return found


def rules():
    [group] = yaml.safe_load(read("alerts.yml"))["groups"]
    return group["rules"]


@pytest.fixture(scope="module")
def serve():
    """``specli serve`` as Typer made it."""
    return typer.main.get_command(application()).commands["serve"]


# -- finding them


def test_the_files_are_shipped_and_printed_as_they_are(specli):
    assert sorted(path.name for path in OPERATIONS.iterdir()) == NAMES
    for name in NAMES:
        printed = specli("serve", "--operations-file", name)
        assert (printed.code, printed.err, printed.out) == (0, "", read(name).encode("utf-8"))


@pytest.mark.parametrize("name", ["nothing.yml", "../MODEL_CARD.md", ""])
def test_any_other_name_is_refused_with_those_there_are(specli, name):
    refused = specli("serve", "--operations-file", name)
    assert refused.code == 2
    assert refused.error == f"--operations-file got {name!r}, expected one of {', '.join(NAMES)}"


def test_help_and_readme_name_the_files(serve):
    [option] = [param for param in serve.params if "--operations-file" in param.opts]
    readme = README.read_text("utf-8")
    for name in {*NAMES} - {"alerts_test.yml"}:
        assert name in option.help
        assert f"`{name}`" in readme


# -- names


def test_the_first_scrape_is_well_formed_and_its_names_keep_the_conventions():
    assert families()
    for family in families():
        assert family.documentation.endswith(".")
        assert re.fullmatch(r"specli_[a-z0-9_]+", family.name)
        assert not re.search(r"_(ms|milliseconds|minutes|percent|bytes_total|count|sum|bucket)$", family.name)
        samples = {sample.name for sample in family.samples}
        assert samples, family.name
        if family.type == "counter":
            assert samples == {f"{family.name}_total"}
        elif family.type == "histogram":
            assert family.name.endswith("_seconds")
            assert {name.removeprefix(family.name) for name in samples} == {"_bucket", "_count", "_sum"}
        else:
            assert family.type == "gauge"
            assert samples == {family.name}
            assert not family.name.endswith("_total")


def test_every_name_that_is_asked_for_is_there():
    known = told_names()
    for name in ("alerts.yml", "alerts_test.yml", "grafana.json"):
        asked = set(NAME.findall(read(name)))
        assert asked, name
        assert asked <= known, name
    # prose may name a histogram without what its samples end in
    assert {*NAME.findall(README.read_text("utf-8"))} <= known | {family.name for family in families()}


def test_labels_that_are_asked_for_are_there():
    values: dict[str, set[str]] = {}
    for family in families():
        for sample in family.samples:
            for label, value in sample.labels.items():
                values.setdefault(label, set()).add(value)
    asked = [*queries(), *(rule["expr"] for rule in rules())]
    told = re.findall(r'\b(kind|reason|state|part|objective)=~?"([^"]*)"', "\n".join(asked))
    assert told
    for label, value in told:
        assert {*value.split("|")} <= values[label]


def table() -> str:
    """The README's table of metrics."""
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in families():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        shown = []
        for label in sorted(labels):
            values = list(dict.fromkeys(sample.labels[label] for sample in family.samples))
            shown.append(f"`{label}`" if label in ("version", "position") else f"`{label}`: {', '.join(values)}")
        lines.append(f"| `{name}` | {family.type} | {'; '.join(shown)} | {family.documentation.rstrip('.')} |")
    return "\n".join(lines) + "\n"


def test_the_readme_has_the_table_of_metrics():
    assert BEGIN + table() + END in README.read_text("utf-8")


# -- alerts and scrape


def test_alerts_say_what_happened_and_what_to_do():
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["alert"].startswith("Specli")
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {*rule["annotations"]} == {"summary", "description"}
        assert len(rule["annotations"]["description"]) > 100


def test_every_alert_has_a_test_of_firing_and_of_silence():
    cases = yaml.safe_load(read("alerts_test.yml"))["tests"]
    silent = {case["alertname"] for case in cases[0]["alert_rule_test"] if not case.get("exp_alerts")}
    assert silent == {rule["alert"] for rule in rules()}
    text = read("alerts_test.yml")
    for rule in rules():
        fires = [part for part in cases if any(check.get("exp_alerts") for check in part.get("alert_rule_test", ()))]
        named = {check["alertname"] for part in fires for check in part["alert_rule_test"] if check.get("exp_alerts")}
        assert rule["alert"] in named or f'alertname="{rule["alert"]}"' in text


def test_options_that_alerts_advise_exist(serve):
    commands = typer.main.get_command(application()).commands
    known = {name for command in commands.values() for param in command.params for name in param.opts}
    known |= {name for command in commands.values() for param in command.params for name in param.secondary_opts}
    for name in ("alerts.yml", "prometheus.yml", "specli.service"):
        text = "\n".join(line for line in read(name).splitlines() if "useradd" not in line and "--now" not in line)
        for flag in re.findall(r"(?<![\w-])--?[a-z][a-z-]*\b", text):
            assert flag in known or flag in ("-u", "-c", "-g", "-d", "-m", "--config"), (name, flag)


def test_the_scrape_is_of_the_port_and_path_that_serve_has(serve):
    [job] = yaml.safe_load(read("prometheus.yml"))["scrape_configs"]
    [port] = [param.default for param in serve.params if "--port" in param.opts]
    assert job["job_name"] == "specli"
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{port}"]}]
    assert set(job["authorization"]) == {"credentials_file"}


# -- the dashboard


def test_the_dashboard_is_one_that_grafana_takes():
    board = dashboard()
    assert board["schemaVersion"] >= 36
    assert board["id"] is None
    source, *others = board["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    for variable in others:
        assert {*NAME.findall(variable["query"]["query"])} <= told_names()
    identities = [panel["id"] for panel in board["panels"]]
    assert len(set(identities)) == len(identities)
    for part in [*panels(), *(target for panel in panels() for target in panel["targets"]), *others]:
        assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels():
        assert panel["title"]
        assert panel["description"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) > 0


def test_panels_do_not_overlap():
    taken: dict[tuple[int, int], int] = {}
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["id"]) == panel["id"]


def test_every_metric_is_shown():
    shown = {*NAME.findall("\n".join(queries()))}
    for family in families():
        assert any(sample.name in shown for sample in family.samples), family.name


# -- with Prometheus' own tools


@pytest.fixture(scope="session")
def promtool():
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not on PATH (Debian: apt-get install prometheus)")

    def run(*arguments: str | Path, stdin: str = "") -> str:
        done = subprocess.run(
            [found, *arguments], input=stdin, capture_output=True, text=True, timeout=HANG_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture
def copied(tmp_path) -> Path:
    """The files in a folder of their own, with a key beside them."""
    for name in NAMES:
        (tmp_path / name).write_text(read(name), "utf-8")
    (tmp_path / "specli.key").write_text("secret\n")
    return tmp_path


def test_promtool_takes_the_files(promtool, copied):
    assert "SUCCESS" in promtool("check", "config", copied / "prometheus.yml")
    assert f"{len(rules())} rules found" in promtool("check", "rules", copied / "alerts.yml")
    assert "SUCCESS" in promtool("test", "rules", copied / "alerts_test.yml")


def test_promtool_finds_no_fault_with_the_names(promtool):
    assert promtool("check", "metrics", stdin=first_scrape()) == ""


def test_promtool_parses_every_query_of_the_dashboard(promtool, tmp_path):
    recorded = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries())]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": recorded}]}), "utf-8")
    assert f"{len(recorded)} rules found" in promtool("check", "rules", path)


def get(url: str, key: str | None = None, content: object = None):
    """The JSON at ``url``; None while nobody answers there."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    body = None if content is None else json.dumps(content).encode("utf-8")
    try:
        with DIRECTLY.open(urllib.request.Request(url, body, headers), timeout=HANG_S) as reply:
            return json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return json.loads(error.read() or b"null")
    except (urllib.error.URLError, ConnectionError):
        return None


def wait_for(what, found):
    """``found()`` as soon as it is neither None nor false."""
    end_s = time.monotonic() + HANG_S
    while time.monotonic() < end_s:
        if value := found():
            return value
        time.sleep(0.1)
    raise AssertionError(f"{what}: waited in vain")


def address_in(path: Path, pattern: str):
    """A function that finds an address in a log, once it is there."""
    return lambda: (found := re.search(pattern, path.read_text("utf-8"))) and found[1]


@contextmanager
def prometheus_of(folder: Path, target: str) -> Iterator[str]:
    """Prometheus with the shipped configuration, but another target and a shorter interval; its address."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not on PATH (Debian: apt-get install prometheus)")
    path, log = folder / "prometheus.yml", folder / "prometheus.log"
    text = path.read_text("utf-8").replace("127.0.0.1:8080", target).replace("_interval: 15s", "_interval: 1s")
    path.write_text(text, "utf-8")
    options = [f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}", "--web.listen-address=127.0.0.1:0"]
    with log.open("wb") as out, subprocess.Popen([binary, *options], stdout=out, stderr=out) as process:
        try:
            yield "http://" + wait_for("prometheus", address_in(log, r'"Listening on" address=(\S+:[1-9]\d*)'))
        finally:
            process.kill()


def ask_prometheus(base: str, query: str):
    """The samples of an instant query: labels -> value."""
    reply = get(f"{base}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
    assert reply is None or reply["status"] == "success", reply
    return [] if reply is None else [(one["metric"], float(one["value"][1])) for one in reply["data"]["result"]]


@pytest.mark.model
def test_a_real_prometheus_reads_a_real_server(specli, copied, q4_0_path, draft_path):
    log, key = copied / "serve.log", "secret"
    options = ("-np", "2", "-c", "512", "-t", "1", "--draft-fixed", "--spec-draft-n-max", "3", "--sla-ttft", "60000")
    models = ("-m", q4_0_path, "-md", draft_path)
    arguments = ("serve", "--port", "0", "-a", "tiny", "--api-key-file", copied / "specli.key", *models, *options)
    with log.open("wb") as err, specli.start(*arguments, stderr=err):
        server = wait_for("specli serve", address_in(log, r"listening at (http://\S+)"))
        with prometheus_of(copied, server.removeprefix("http://")) as prometheus:
            usages = []
            for content in ("Count to ten.", "What is the capital of France?", "Name three colours."):
                asked = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 24}
                usages.append(get(f"{server}/v1/chat/completions", key, asked)["usage"])
            details = [usage["completion_tokens_details"] for usage in usages]
            accepted = sum(one["accepted_prediction_tokens"] for one in details)
            proposed = accepted + sum(one["rejected_prediction_tokens"] for one in details)
            assert 0 < accepted <= proposed

            def value(query: str) -> float | None:
                found = ask_prometheus(prometheus, query)
                return found[0][1] if len(found) == 1 else None

            wait_for("three answers", lambda: value("specli_time_to_first_token_seconds_count") == 3)
            names = ("accepted_tokens", "draft_tokens")
            acceptance = value(" / ".join(f"specli_spec_decode_num_{name}_total" for name in names))
            assert acceptance == pytest.approx(accepted / proposed)
            assert not value("specli_spec_decode_acceptance_rate") > 1  # of the last minute, so perhaps NaN
            mean_s = value("specli_time_to_first_token_seconds_sum / specli_time_to_first_token_seconds_count")
            p95_s = value("histogram_quantile(0.95, specli_time_to_first_token_seconds_bucket)")
            assert mean_s > 0
            assert p95_s > 0
            assert value("specli_generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
            assert value("specli_slots") == 2
            assert value('up{job="specli"}') == 1
            for query in queries():
                ask_prometheus(prometheus, query)  # asserts that it is valid
            [group] = get(f"{prometheus}/api/v1/rules")["data"]["groups"]
            assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in rules()]
            assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
            [target] = get(f"{prometheus}/api/v1/targets")["data"]["activeTargets"]
            assert target["lastError"] == ""


# -- the unit and the container


def unit() -> list[tuple[str, str]]:
    """Directives in their order; lines that end in a backslash go on."""
    text = read("specli.service").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("#", "["))]
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


def test_the_unit_is_hardened_and_outlasts_the_drain(serve):
    found = dict(unit())
    assert found["User"] not in ("root", "")
    assert found["NoNewPrivileges"] == found["PrivateTmp"] == found["ProtectHome"] == "yes"
    assert (found["ProtectSystem"], found["CapabilityBoundingSet"], found["Restart"]) == ("strict", "", "on-failure")
    words = found["ExecStart"].split()
    assert words[1] == "serve"
    assert "${CREDENTIALS_DIRECTORY}/api-keys" in words
    assert found["LoadCredential"].startswith("api-keys:/")
    assert not any("key=" in value.lower() for name, value in unit() if name == "Environment")
    answer_s = int(words[words.index("--timeout") + 1].removesuffix("s"))
    assert answer_s + DRAIN_S < int(found["TimeoutStopSec"].removesuffix("s")) <= answer_s + 60
    known = {name for param in serve.params for name in param.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_systemd_finds_no_fault_with_the_unit(tmp_path):
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("there is no systemd-analyze here")
    path = tmp_path / "specli.service"
    path.write_text(read("specli.service").replace("/opt/specli/bin/specli", sys.executable), "utf-8")
    done = subprocess.run([tool, "verify", path], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert [line for line in done.stderr.splitlines() if "specli.service" in line] == []


def instructions() -> list[tuple[str, str]]:
    """Of the Containerfile: ``("FROM", "... AS build")``; comments out, continued lines joined."""
    kept = "\n".join(line for line in read("Containerfile").splitlines() if not line.startswith("#"))
    lines = [" ".join(line.split()) for line in kept.replace("\\\n", " ").splitlines() if line.strip()]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def test_the_container_is_built_in_stages_and_does_not_run_as_root(serve):
    found = instructions()
    names = [name for name, _ in found]
    known = "FROM RUN ARG COPY ENV VOLUME EXPOSE USER HEALTHCHECK STOPSIGNAL ENTRYPOINT"
    assert {*names} <= {*known.split()}
    assert names.count("FROM") == 2
    last = found[len(names) - names[::-1].index("FROM") - 1 :]
    stage = dict(last)
    assert found[0][1].endswith(" AS build")
    assert ("COPY", "--from=build /opt/specli /opt/specli") in last
    assert int(stage["USER"]) > 0
    assert "/health" in stage["HEALTHCHECK"]
    json.loads(stage["HEALTHCHECK"].partition("CMD ")[2])
    assert "/models" in json.loads(stage["VOLUME"])
    assert json.loads(stage["ENTRYPOINT"]) == ["specli", "serve"]
    assert not any("build-essential" in rest for name, rest in last if name == "RUN")
    [built] = [rest for name, rest in found if name == "RUN" and "llama-cpp-python" in rest]
    assert "--no-binary llama-cpp-python" in built
    variables = " ".join(str(param.envvar) for param in serve.params)
    assert all(name in variables for name in re.findall(r"LLAMA_ARG_\w+", read("Containerfile")))


def test_the_container_copies_what_there_is():
    for name, rest in instructions():
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
    pinned = re.findall(r"llama-cpp-python==[0-9.]*", (ROOT / "pyproject.toml").read_text("utf-8"))
    assert len(pinned) == 1  # what its grep finds


def test_the_health_check_of_the_container_runs():
    [check] = [rest for name, rest in instructions() if name == "HEALTHCHECK"]
    _, flag, code = json.loads(check.partition("CMD ")[2])
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    code = code.replace("8080", "9")  # discard: nobody is there, so it is not healthy
    done = subprocess.run(
        [sys.executable, flag, code], capture_output=True, env=environment, timeout=HANG_S, check=False
    )
    assert done.returncode == 1
    assert b"URLError" in done.stderr


if __name__ == "__main__":
    text = README.read_text("utf-8")
    start = text.index(BEGIN) + len(BEGIN)
    README.write_text(text[:start] + table() + text[text.index(END, start) :], "utf-8")
