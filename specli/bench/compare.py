"""Two kept benches of the same models: what became faster, with intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from specli.bench.advice import label
from specli.bench.harness import Setting
from specli.bench.statistics import Estimate, Pair, median, speedup
from specli.errors import ConfigError

_CELL_KEYS = ("workload", "drafter", "k", "temperature", "verify")
_NOTED = ("n_predict", "n_ctx", "flash_attn", "cache_type_k", "cache_type_v", "threads", "threads_batch")


@dataclass(frozen=True, slots=True)
class Change:
    """One cell of both files, over the prompts that both measured. Ratios are new / old in speed: above 1 is faster.

    ``plain`` is what the machine did meanwhile, ``speculative`` what a user sees, ``relative`` the change of the
    speedup, in which the machine's own change cancels out.
    """

    workload: str
    setting: Setting
    n_prompts: int
    plain: Estimate
    speculative: Estimate
    relative: Estimate

    @property
    def words(self) -> str:
        """Whether the speedup changed."""
        low, high = self.relative.interval or (self.relative.value, self.relative.value)
        return "better" if low > 1 else "worse" if high < 1 else "no sure change"


@dataclass(frozen=True, slots=True)
class Comparison:
    """``changes`` of the cells that both files have; ``notes`` on what else differs."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...]


def compare(old: Mapping[str, object], new: Mapping[str, object]) -> Comparison:
    """Compare two loaded files. Raises ``ConfigError`` for different models, or when no cell is in both."""
    for role in ("target", "draft"):
        before, after = (_model(document, role) for document in (old, new))
        if before is not None and after is not None and before[1] != after[1]:
            raise ConfigError(
                f"--compare got files of different {role} models: {before[0]} ({before[1][:12]}) and "
                f"{after[0]} ({after[1][:12]}); speed is compared for one model"
            )
    try:
        changes = list(_changes(old, new))
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--compare got a file that is damaged ({error!r}); measure again") from error
    if not changes:
        raise ConfigError("--compare got files without a common cell (workload, setting, prompt); nothing to compare")
    return Comparison(tuple(changes), tuple(_notes(old, new)))


def _changes(old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[Change]:
    old_prompts, new_prompts = _mapping(old, "prompts"), _mapping(new, "prompts")
    same = {name for name, text in old_prompts.items() if new_prompts.get(name) == text}
    theirs = {_key(cell): cell for cell in _cells(old)}
    for cell in _cells(new):
        before = theirs.get(_key(cell))
        if before is not None and (change := _change(before, cell, same)) is not None:
            yield change


def _change(old: Mapping[str, object], new: Mapping[str, object], prompts: set[str]) -> Change | None:
    before, after = _times(old, prompts), _times(new, prompts)
    common = [name for name in before if name in after]
    if not common:
        return None
    rows = [(name, *before[name], *after[name][1:]) for name in common]  # name, tokens, plain, own, plain, own
    estimates = (
        speedup([Pair(name, tokens, plain, new_plain) for name, tokens, plain, _own, new_plain, _new in rows]),
        speedup([Pair(name, tokens, own, new_own) for name, tokens, _plain, own, _new, new_own in rows]),
        speedup(
            [
                Pair(name, tokens, own / plain, new_own / new_plain)
                for name, tokens, plain, own, new_plain, new_own in rows
            ]
        ),
    )
    plain, speculative, relative = estimates
    assert plain is not None
    assert speculative is not None
    assert relative is not None
    workload, drafter, k, temperature, verify = (new[name] for name in _CELL_KEYS)
    setting = Setting(str(drafter), _int(k), float(str(temperature)), str(verify))
    return Change(str(workload), setting, len(common), plain, speculative, relative)


def _times(cell: Mapping[str, object], prompts: set[str]) -> dict[str, tuple[float, float, float]]:
    """Per prompt: tokens, plain and own ms per token, medians over repetitions."""
    pairs, found = cell["pairs"], dict[str, list[Pair]]()
    assert isinstance(pairs, list)
    for name, tokens, before, after in pairs:
        if name in prompts:
            found.setdefault(name, []).append(Pair(name, tokens, before, after))
    return {
        name: (
            sum(pair.tokens for pair in own) / len(own),
            median([pair.before for pair in own]) or 0.0,
            median([pair.after for pair in own]) or 0.0,
        )
        for name, own in found.items()
    }


def _notes(old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[str]:
    before, after = _mapping(old, "settings"), _mapping(new, "settings")
    for name in _NOTED:
        if before.get(name) != after.get(name):
            yield f"{name} was {before.get(name)} and is {after.get(name)}"
    for name in ("library", "specli"):
        if old.get(name) != new.get(name):
            yield f"{name} was {old.get(name)} and is {new.get(name)}"
    if _mapping(old, "hardware").get("cpu") != _mapping(new, "hardware").get("cpu"):
        yield f"cpu was {_mapping(old, 'hardware').get('cpu')} and is {_mapping(new, 'hardware').get('cpu')}"


def _model(document: Mapping[str, object], role: str) -> tuple[str, str] | None:
    model = _mapping(document, "models").get(role)
    return (str(model.get("name")), str(model.get("sha256"))) if isinstance(model, Mapping) else None


def _mapping(document: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = document.get(name)
    return found if isinstance(found, Mapping) else {}


def _cells(document: Mapping[str, object]) -> list[Mapping[str, object]]:
    found = document["cells"]
    return [cell for cell in found if isinstance(cell, Mapping)] if isinstance(found, list) else []


def _key(cell: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(cell.get(name) for name in _CELL_KEYS)


def _int(value: object) -> int | None:
    return int(str(value)) if value is not None else None


def change_dict(change: Change) -> dict[str, object]:
    """JSON types only; ratios are new / old in speed."""
    return {
        "workload": change.workload,
        "drafter": change.setting.drafter,
        "k": change.setting.k,
        "temperature": change.setting.temperature,
        "verify": change.setting.verify,
        "label": label(change.setting),
        "prompts": change.n_prompts,
        "plain_ratio": dataclasses.asdict(change.plain),
        "decode_ratio": dataclasses.asdict(change.speculative),
        "speedup_ratio": dataclasses.asdict(change.relative),
        "verdict": change.words,
    }
