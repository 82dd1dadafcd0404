"""Who may import whom, read from the source: imports inside functions and for type checkers count too."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import specli

PACKAGE = Path(specli.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# Outside packages with one home each. (`llama_cpp`: decoding, vocabulary-only loading, grammar, quantizing.)
HOMES = {
    "llama_cpp": ("engine",),
    "gguf": ("gguf_file",),
    "typer": ("cli",),
    "click": ("cli",),
    "rich": ("cli", "render"),
    "jinja2": ("chat",),
    "matplotlib": ("bench.plot", "loadtest.plot"),
    "httpx": ("loadtest.client",),
    **dict.fromkeys(("fastapi", "starlette", "pydantic", "uvicorn", "h11", "prometheus_client"), ("serve",)),
}
# What of specli each of these may import; the leaves nothing, or errors only.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "events": set(),
    "stats": {"events"},
    "text": {"errors", "events"},
    "chat": {"errors"},
    "config": {"errors"},
    "samplers": {"errors"},
    "sampling": {"errors", "events", "samplers"},
    "verify": {"samplers", "sampling", "drafters.base", "engine.base"},
    "estimates": set(),
    "record": set(),
    "controller": {"estimates", "record"},
    "drafters": {
        "verify",
        "errors",
        "events",
        "sampling",
        "controller",
        "record",
        "engine.base",
        "drafters.base",
        "drafters.model",
        "drafters.ngram",
    },
    "request": {"errors", "events", "sampling", "text", "drafters.base", "engine.base"},
    "decode": {"errors", "events", "request", "text", "verify", "drafters.base", "engine.base"},
    "engine.base": {"errors"},
    "engine.table": {"errors", "engine.base"},
    "gguf_file": {"errors"},
    "bits": {"engine.base"},
    "exact": {"bits", "config", "engine.base", "errors", "profile"},
    "bench.files": {"errors"},
    "bench.statistics": set(),
    "bench.workloads": {"errors"},
    "bench.harness": {"bench.workloads", "errors", "events", "stats"},
    "bench.report": {"bench.harness", "bench.statistics", "stats"},
    "bench.advice": {"bench.harness", "bench.report", "bench.workloads", "config"},
    "bench.compare": {"bench.advice", "bench.harness", "bench.statistics", "errors"},
    "loadtest.lengths": {"config", "errors"},
    "loadtest.arrivals": set(),
    "loadtest.sse": set(),
    "loadtest.records": set(),
    "loadtest.window": set(),
    "loadtest.search": set(),
    "loadtest.scrape": set(),
    "loadtest.prompts": {"bench.workloads", "config", "loadtest.lengths"},
    "loadtest.figures": {"bench.statistics", "loadtest.records"},
    "loadtest.client": {"config", "errors", "loadtest.prompts", "loadtest.records", "loadtest.sse"},
    "loadtest.run": {"config", "loadtest.arrivals", "loadtest.prompts", "loadtest.records", "loadtest.window"},
    "loadtest.document": {"bench.files", "errors", "loadtest.figures", "loadtest.search"},
    "loadtest.compare": {"bench.statistics", "errors", "loadtest.figures"},
    "loadtest": {
        *("bench.files", "bench.machine", "bench.plot", "bench.statistics", "bench.workloads", "config", "errors"),
        "loadtest.arrivals",
        "loadtest.client",
        "loadtest.document",
        "loadtest.figures",
        "loadtest.lengths",
        "loadtest.prompts",
        "loadtest.records",
        "loadtest.run",
        "loadtest.scrape",
        "loadtest.search",
        "loadtest.sse",
        "loadtest.window",
    },
    "serve.pace": set(),
    "serve.protocol": {"chat", "config"},
    "serve.replies": {"events", "stats", "text"},
    "serve.job": {"errors", "events", "verify"},
    "serve.metrics": {"events", "serve.pace", "stats"},
    "serve.guard": {"config", "serve.metrics", "serve.replies"},
    "serve.prompts": {"errors", "serve.protocol", "session"},
    "serve.scheduler": {
        *("decode", "drafters.base", "errors", "events", "prefix", "request", "session", "stats", "text"),
        *("serve.job", "serve.metrics", "serve.pace"),
    },
    "serve.app": {
        *("chain", "config", "errors", "events", "session", "verify", "serve.guard", "serve.job", "serve.metrics"),
        *("serve.prompts", "serve.protocol", "serve.replies", "serve.scheduler"),
    },
    "serve.server": {
        *("config", "errors", "session", "serve.app", "serve.metrics", "serve.pace", "serve.scheduler"),
    },
    "selftest": {
        "bits",
        "decode",
        "drafters.base",
        "drafters.model",
        "drafters.ngram",
        "engine.base",
        "errors",
        "events",
        "request",
        "samplers",
        "sampling",
        "selftest.continuations",
        "selftest.identity",
        "selftest.laws",
        "selftest.rollback",
        "selftest.subject",
        "verify",
    },
}


def name_of(path: Path) -> str:
    """The module's name inside specli: ``engine.base``; a package by its own name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path) -> Iterator[str]:
    """Every module that ``path`` imports, anywhere, by full name; ``from a import b`` gives a and a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def own_imports(path: Path) -> set[str]:
    """Modules of specli that ``path`` imports, by their names inside specli."""
    known = {name_of(module) for module in MODULES}
    inside = {full.removeprefix("specli.") for full in imports(path) if is_within(full, "specli")}
    return {name for name in inside if name in known and name}


def test_modules_were_found() -> None:
    assert {"decode", "verify", "engine.llama", "cli.main", "drafters.model", "render.live"} <= set(
        map(name_of, MODULES)
    )
    assert "rich.console" in set(imports(PACKAGE / "render" / "live.py"))
    assert "jinja2.sandbox" in set(imports(PACKAGE / "chat.py"))  # inside a function


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_outside_packages_stay_in_their_rooms(path: Path) -> None:
    for full in imports(path):
        homes = HOMES.get(full.split(".")[0])
        assert homes is None or any(is_within(name_of(path), home) for home in homes), f"{name_of(path)} imports {full}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_imports_the_command_line(path: Path) -> None:
    if name_of(path) != "__main__" and not is_within(name_of(path), "cli"):
        assert not [name for name in own_imports(path) if is_within(name, "cli")]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_inner_rooms_know_no_outer_ones(path: Path) -> None:
    for room, allowed in MAY_IMPORT.items():
        if is_within(name_of(path), room):
            packages = {name.rpartition(".")[0] for name in allowed}  # "from specli.engine.base" names specli.engine
            assert own_imports(path) <= allowed | packages, name_of(path)


def test_the_algorithm_imports_no_front_end() -> None:
    """Never config, session, registry, render, rich, typer or llama_cpp."""
    rooms = ("decode", "verify", "sampling", "drafters", "controller", "estimates", "record")
    inner = [path for path in MODULES if name_of(path).split(".")[0] in rooms]
    assert {"decode", "verify", "sampling", "drafters.base"} <= set(map(name_of, inner))
    for path in inner:
        outer = {"specli.config", "specli.session", "specli.registry", "specli.render", "rich", "typer", "llama_cpp"}
        assert not [full for full in imports(path) for name in outer if is_within(full, name)]


def test_a_heavy_import_is_not_paid_for_help() -> None:
    """At import time the command line reaches none of the heavy packages, over any chain of modules."""
    reached: set[str] = set()
    waiting = ["__main__", "cli.main"]
    by_name = {name_of(path): path for path in MODULES}
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        waiting += [
            full.removeprefix("specli.")
            for full in eager_imports(by_name[name])
            if full.removeprefix("specli.") in by_name
        ]
        heavy = {full.split(".")[0] for full in eager_imports(by_name[name])} & {
            "numpy",
            "llama_cpp",
            "gguf",
            "jinja2",
            "rich",
            "httpx",
            "fastapi",
            "pydantic",
            "uvicorn",
            "prometheus_client",
        }
        assert not heavy, f"{name} imports {heavy} at once"
    assert "cli.main" in reached
    assert "cli.run" not in reached, "a command is imported when it is asked for, not before"


def eager_imports(path: Path) -> set[str]:
    """What importing ``path`` imports: not in functions, not for type checkers only."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda) or (
            isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        ):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        waiting += ast.iter_child_nodes(node)
    return found


def defined(path: Path, kind: type[ast.stmt]) -> Iterator[ast.stmt]:
    """Functions or classes of a module, not those inside others."""
    return (node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, kind))


def test_the_two_benches_share_what_they_have_in_common() -> None:
    """Of a model and of a server: no function is written twice, but for one that only calls another."""
    rooms = ("bench", "loadtest", "render", "cli.bench", "cli.load", "cli.deliver")
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        if any(is_within(name_of(path), room) for room in rooms):
            for node in defined(path, ast.FunctionDef):
                assert isinstance(node, ast.FunctionDef)
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                homes.setdefault("\n".join(map(ast.unparse, body)), []).append(f"{name_of(path)}.{node.name}")
    assert ["render.tables.percent"] in homes.values()
    assert not [names for body, names in homes.items() if len(names) > 1 and len(body) > 50]


def test_the_load_test_and_the_server_give_different_things_different_names() -> None:
    """Both are about requests, answers and windows of time, and whoever reads one soon reads the other."""
    classes = {name_of(path): {getattr(node, "name", "") for node in defined(path, ast.ClassDef)} for path in MODULES}
    load = set().union(*(names for room, names in classes.items() if is_within(room, "loadtest")))
    others = set().union(*(classes[room] for room in classes if is_within(room, "serve") or room == "events"))
    assert {"SteadyWindow", "RequestFailed"} <= load
    assert not [name for name in load & others if not name.startswith("_")]


def code_lines(path: Path) -> int:
    """Lines with code on them: no blank lines, comments or docstrings."""
    text = path.read_text(encoding="utf-8")
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    skipped.add(tokenize.ENCODING)
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in skipped:
                lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_loop_and_verifiers_fit_on_a_few_screens() -> None:
    assert code_lines(PACKAGE / "decode.py") + code_lines(PACKAGE / "verify.py") < 300


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_asks_whether_it_is_being_tested(path: Path) -> None:
    assert "pytest" not in path.read_text(encoding="utf-8").lower()
