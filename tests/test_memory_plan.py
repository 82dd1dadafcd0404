"""The arithmetic and the verdict of a memory plan, on a table of sizes: milliseconds, no llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import write_tiny

from specli import gguf_file
from specli.config import ModelOptions
from specli.errors import EngineError, ModelLoadError
from specli.memory_plan import HOST, MIB, Buffer, ModelMemory, Plan, Room, Setup, make_plan, weights_by_type
from specli.memory_search import (
    CONTEXT_FLOOR,
    CONTEXT_MIN,
    CONTEXT_STEP,
    choose,
    draft_cost,
    longest_context,
    require_fit,
    suggest,
)

TARGET, DRAFT = Path("target.gguf"), Path("draft.gguf")
CACHE_BITS = {"f16": 16, "q8_0": 8, "q4_0": 4}


@dataclass(frozen=True)
class Sizes:
    """A model of ``n_layers`` equal layers and an output layer of the same size. MiB."""

    layer: float = 10
    kv_per_1024: float = 8  # f16, all layers
    compute: float = 20
    n_layers: int = 9
    trained: int = 8192
    rewritten: float = 0  # share of the CPU's weights that are rewritten at loading


@dataclass
class TableSizer:
    """Sizes by formula; layers on "GPU" from the last one back. Refuses ``refused`` cache types."""

    free: float
    gpu: float | None = None
    models: dict[Path, Sizes] = field(default_factory=lambda: {TARGET: Sizes(), DRAFT: Sizes(1, 1, 5, 4)})
    refused: tuple[str, ...] = ()
    gpu_says: bool = True
    shares_ram: bool = False
    reserve: float = 0
    asked: list[ModelOptions] = field(default_factory=list)

    def measure(self, options: ModelOptions, n_rows_max: int) -> ModelMemory:
        self.asked.append(options)
        if options.cache_type_k in self.refused:
            raise EngineError("head size")
        sizes = self.models[options.path]
        n_ctx = min(sizes.trained, 8192) if options.n_ctx is None else options.n_ctx or sizes.trained
        n_all = sizes.n_layers + 1
        asked = {"auto": n_all, "all": n_all}.get(options.n_gpu_layers)
        n_gpu = min(n_all, int(options.n_gpu_layers) if asked is None else asked) if self.gpu is not None else 0
        share = n_gpu / n_all
        bits = (CACHE_BITS[options.cache_type_k] + CACHE_BITS[options.cache_type_v]) / 2
        kv = sizes.kv_per_1024 * n_ctx / 1024 * bits / 16
        on_cpu = sizes.layer * (n_all - n_gpu)
        parts = [
            self.part(HOST, "weights", on_cpu * (1 - sizes.rewritten), is_mapped=True),
            self.part(HOST, "weights", on_cpu * sizes.rewritten),
            self.part("GPU", "weights", sizes.layer * n_gpu, is_mapped=self.shares_ram),
            self.part(HOST, "kv", kv * (1 - share)),
            self.part("GPU", "kv", kv * share),
            self.part(HOST, "compute", sizes.compute),
            self.part("GPU", "compute", sizes.compute if n_gpu else 0),
        ]
        return ModelMemory(n_ctx, sizes.trained, n_all, tuple(part for part in parts if part.n_bytes))

    @staticmethod
    def part(room, kind, mib, is_mapped=False):
        return Buffer(room, room, kind, round(mib * MIB), round(mib * MIB), is_mapped)

    def trained_context(self, options: ModelOptions) -> int:
        return self.models[options.path].trained

    def rooms(self) -> Sequence[Room]:
        def room(name, free, **more):
            return Room(name, name, round(free * MIB), round(free * MIB), round(self.reserve * MIB), **more)

        host = room(HOST, self.free)
        if self.gpu is None:
            return (host,)
        return (host, room("GPU", self.gpu if self.gpu_says else 0, shares_ram=self.shares_ram))


def setup(draft: bool = True, n_max: int = 3, **target: object) -> Setup:
    return Setup(ModelOptions(TARGET, **target), ModelOptions(DRAFT) if draft else None, n_max)


def pinned_mib(plan: Plan, number: int = 0) -> float:
    return plan.pinned(plan.rooms[number]) / MIB


# -- needs and verdicts


def test_needs_are_the_sum_of_both_models() -> None:
    plan = make_plan(setup(), TableSizer(free=1000))
    # target: 10 layers of 10, KV 64, compute 20; draft: 5 of 1, KV 8, compute 5
    assert pinned_mib(plan) == 64 + 20 + 8 + 5
    assert plan.hot(plan.rooms[0]) / MIB == 97 + 100 + 5
    assert plan.draft is not None
    assert plan.draft.n_ctx == 8192


def test_a_draft_that_is_the_target_loads_its_weights_once() -> None:
    shared = Setup(ModelOptions(TARGET), ModelOptions(TARGET), 3)
    plan = make_plan(shared, TableSizer(free=1000))
    assert shared.shares_weights
    assert plan.hot(plan.rooms[0]) / MIB == 100 + 2 * (64 + 20)


def test_the_draft_follows_the_targets_context_up_to_its_own() -> None:
    sizer = TableSizer(free=1000)
    sizer.models[DRAFT] = replace(sizer.models[DRAFT], trained=2048)
    assert make_plan(setup(n_ctx=1000), sizer).draft.n_ctx == 1000
    assert make_plan(setup(), sizer).draft.n_ctx == 2048


@pytest.mark.parametrize(
    ("free", "verdict"),
    [
        (202, "fits"),  # to the byte: 97 pinned, 105 of mapped weights
        (201.99, "tight"),  # weights will be read again
        (97, "tight"),
        (96.99, "too large"),
    ],
)
def test_verdict_at_its_edges(free: float, verdict: str) -> None:
    plan = make_plan(setup(), TableSizer(free=free))
    assert plan.verdict(plan.rooms[0]) == verdict
    assert plan.fits == (verdict != "too large")
    assert plan.is_comfortable == (verdict == "fits")
    assert bool(plan.warnings) == (verdict == "tight")
    assert bool(plan.shortage()) == (verdict == "too large")


def test_what_was_asked_for_may_use_the_reserve() -> None:
    plan = make_plan(setup(), TableSizer(free=210, reserve=50))
    assert plan.fits
    assert not plan.is_comfortable
    assert "leave less than 50 MiB of the 210 MiB" in plan.warnings[0]


def test_weights_beyond_ram_warn_and_rewritten_ones_refuse() -> None:
    sizer = TableSizer(free=150)
    assert "read from disk again and again" in make_plan(setup(n_ctx=4096), sizer).warnings[0]
    sizer.models[TARGET] = replace(sizer.models[TARGET], rewritten=1)
    assert not make_plan(setup(n_ctx=4096), sizer).fits


def test_a_memory_that_does_not_say_refuses_nothing() -> None:
    sizer = TableSizer(free=1000, gpu=1, gpu_says=False)
    assert make_plan(setup(n_gpu_layers="all"), sizer).is_comfortable


def test_a_device_without_memory_of_its_own_counts_in_ram_too() -> None:
    apart = make_plan(setup(n_gpu_layers="all"), TableSizer(free=1000, gpu=1000))
    shared = make_plan(setup(n_gpu_layers="all"), TableSizer(free=1000, gpu=1000, shares_ram=True))
    assert pinned_mib(apart) == 20 + 5
    assert pinned_mib(shared) == 20 + 5 + (64 + 20 + 8 + 5)  # mapped weights may leave RAM ...
    assert pinned_mib(shared, 1) == pinned_mib(apart, 1) == 100 + 64 + 20 + 5 + 8 + 5  # ... but not the device
    assert shared.hot(shared.rooms[0]) / MIB == 25 + 97 + 105


def test_the_shortage_names_sizes_kinds_and_memory() -> None:
    plan = make_plan(setup(draft=False, n_gpu_layers="all"), TableSizer(free=500, gpu=150))
    assert (
        plan.shortage()
        == "184 MiB must stay in memory (weights 100 MiB, kv 64 MiB, compute 20 MiB), but GPU has 150 MiB free"
    )


# -- what the user left open


def test_without_a_device_nothing_is_settled_that_fits() -> None:
    choice = choose(setup(), TableSizer(free=1000))
    assert choice.plan.setup == setup()
    assert choice.notices == []


def test_an_unset_context_shrinks_to_the_longest_that_fits() -> None:
    sizer = TableSizer(free=50, reserve=10)
    choice = choose(setup(), sizer)
    # 40 - 25 of compute = 15 MiB for 9 MiB per 1024 tokens
    assert choice.plan.setup.target.n_ctx == 15 * 1024 // 9 // CONTEXT_STEP * CONTEXT_STEP == 1536
    assert choice.plan.draft.n_ctx == 1536
    assert choice.notices[0] == (
        "-c was not given: a context of 1536 tokens, not 8192: "
        "202 MiB and a reserve of 10 MiB would not fit the 50 MiB that CPU has free"
    )
    require_fit(choice.plan, sizer)


def test_an_unset_context_shrinks_to_keep_the_weights_in_ram_but_not_far() -> None:
    assert choose(setup(), TableSizer(free=190)).plan.target.n_ctx == 6656  # (190 - 130) / 9 * 1024
    tight = choose(setup(), TableSizer(free=160)).plan
    assert tight.target.n_ctx == 8192  # 4096 tokens would not do it: weights are read again, context is kept
    assert tight.fits


def test_a_given_context_is_refused_not_changed() -> None:
    sizer = TableSizer(free=50)
    choice = choose(setup(n_ctx=8192), sizer)
    assert choice.plan.setup.target.n_ctx == 8192
    with pytest.raises(ModelLoadError, match=r"target\.gguf: 97 MiB .* this fits \(.*\): specli run -m target\.gguf"):
        require_fit(choice.plan, sizer)


def test_no_context_fits() -> None:
    sizer = TableSizer(free=20)
    choice = choose(setup(), sizer)
    assert not choice.plan.fits
    with pytest.raises(ModelLoadError, match="no context of 512 tokens or more fits; take a smaller"):
        require_fit(choice.plan, sizer)


def test_auto_is_all_layers_where_they_fit() -> None:
    plan = choose(setup(), TableSizer(free=1000, gpu=300)).plan
    assert (plan.setup.target.n_gpu_layers, plan.setup.draft.n_gpu_layers) == ("all", "all")
    assert plan.target.n_ctx == 8192


def test_context_shrinks_before_layers_leave_the_device() -> None:
    plan = choose(setup(), TableSizer(free=1000, gpu=180)).plan  # all layers need 202, at 4096 tokens 166
    assert plan.setup.target.n_gpu_layers == "all"
    assert CONTEXT_FLOOR <= plan.target.n_ctx < 8192
    assert plan.pinned(plan.rooms[1]) <= 180 * MIB


def test_then_target_layers_leave_and_the_draft_stays() -> None:
    sizer = TableSizer(free=1000, gpu=100)
    choice = choose(setup(), sizer)
    layers = int(choice.plan.setup.target.n_gpu_layers)
    assert choice.plan.setup.draft.n_gpu_layers == "all"
    assert choice.plan.target.n_ctx == CONTEXT_FLOOR
    assert choice.plan.is_comfortable
    assert not make_plan(choice.plan.setup.with_layers(layers + 1), sizer).is_comfortable
    assert f"-ngl auto: {layers} of 10 layers fit" in " ".join(choice.notices)


def test_last_the_drafts_layers_leave() -> None:
    plan = choose(setup(), TableSizer(free=1000, gpu=11)).plan
    assert plan.setup.target.n_gpu_layers == "0"
    assert 0 < int(plan.setup.draft.n_gpu_layers) < 5
    assert plan.target.n_ctx == 8192  # the target's cache is in RAM then, where it fits


def test_only_auto_layers_are_moved() -> None:
    given = setup(n_gpu_layers="7", n_ctx=4096)
    given = replace(given, draft=replace(given.draft, n_gpu_layers="2"))
    assert choose(given, TableSizer(free=1000, gpu=30)).plan.setup == given


def test_ram_is_judged_after_the_device_took_what_it_can() -> None:
    """At 0 layers RAM would be too small; that must not end the search."""
    sizer = TableSizer(free=60, gpu=150)
    sizer.models[TARGET] = Sizes(rewritten=1)
    plan = choose(setup(draft=False), sizer).plan
    assert plan.fits
    assert int(plan.setup.target.n_gpu_layers) > 5


def test_a_device_that_does_not_say_gets_no_layers_by_itself() -> None:
    plan = choose(setup(), TableSizer(free=1000, gpu=1000, gpu_says=False)).plan
    assert plan.setup.target.n_gpu_layers == "0"


@given(free=st.integers(1, 400), gpu=st.none() | st.integers(1, 400), n_ctx=st.none() | st.integers(1, 20000))
def test_whatever_is_chosen_or_suggested_fits_or_is_refused(free: int, gpu: int | None, n_ctx: int | None) -> None:
    sizer = TableSizer(free=free, gpu=gpu)
    choice = choose(setup(n_ctx=n_ctx), sizer)
    if n_ctx is not None:
        assert choice.plan.target.n_ctx == n_ctx
    if not choice.plan.fits:
        for suggestion in suggest(choice.plan, sizer):
            again = make_plan(suggestion.plan.setup, sizer)
            assert again.leaves_reserve
            assert again.target.n_ctx >= min(CONTEXT_MIN, n_ctx or CONTEXT_MIN)


# -- suggestions


def test_suggestions_go_from_the_least_loss_on() -> None:
    sizer = TableSizer(free=70)
    plan = make_plan(setup(n_ctx=8192), sizer)
    found = suggest(plan, sizer)
    assert [one.what for one in found] == [
        "q8_0 caches",
        "a shorter context",
        "q4_0 caches",
        "no draft model and a shorter context",
    ]
    assert found[0].plan.setup.command() == (
        "specli run -m target.gguf -md draft.gguf -c 8192 -ctk q8_0 -ctv q8_0 -ctkd q8_0 -ctvd q8_0"
    )
    assert all(one.plan.leaves_reserve for one in found)


def test_the_suggested_context_is_the_longest_that_fits() -> None:
    sizer = TableSizer(free=60)
    found = {one.what: one.plan for one in suggest(make_plan(setup(n_ctx=8192), sizer), sizer)}
    n_ctx = found["a shorter context"].target.n_ctx
    assert not make_plan(setup(n_ctx=n_ctx + CONTEXT_STEP), sizer).fits


def test_cache_types_that_llama_cpp_refuses_are_not_suggested() -> None:
    sizer = TableSizer(free=70, refused=("q8_0", "q4_0"))
    assert all("caches" not in one.what for one in suggest(make_plan(setup(n_ctx=8192), sizer), sizer))


def test_quantized_caches_are_not_suggested_without_flash_attention() -> None:
    sizer = TableSizer(free=70)
    found = suggest(make_plan(setup(n_ctx=8192, flash_attn="off"), sizer), sizer)
    assert found
    assert all("-ctv" not in one.plan.setup.flags() for one in found)


def test_layers_that_were_asked_for_and_do_not_fit() -> None:
    sizer = TableSizer(free=1000, gpu=100)
    first = suggest(make_plan(setup(n_gpu_layers="all", n_ctx=8192), sizer), sizer)[0]
    assert first.what == "fewer layers on the device"
    assert first.plan.pinned(first.plan.rooms[1]) <= 100 * MIB
    more = first.plan.setup.with_layers(int(first.plan.setup.target.n_gpu_layers) + 1)
    assert not make_plan(more, sizer).fits


def test_leaving_the_draft_out_is_suggested_where_it_decides() -> None:
    sizer = TableSizer(free=27)  # 25 of compute for both
    found = {one.what: one.plan for one in suggest(make_plan(setup(n_ctx=1024), sizer), sizer)}
    plan = found["no draft model and a shorter context"]
    assert plan.draft is None
    assert plan.setup.command() == f"specli run -m target.gguf -c {plan.target.n_ctx}"


@pytest.mark.parametrize(
    ("names", "both", "alone"),
    [
        (None, "-m target.gguf -md draft.gguf", "-m target.gguf"),
        ((), "", " --spec-type ngram"),
        (("--pair", "x"), " --pair x", " --pair x --spec-type ngram"),
        (("-hf", "a/b", "-hfd", "c/d"), " -hf a/b -hfd c/d", " -hf a/b"),
    ],
)
def test_commands_name_the_models_as_the_user_did(names: tuple[str, ...] | None, both: str, alone: str) -> None:
    named = replace(setup(), names=names)
    assert named.command() == f"specli run {both.strip()}".strip()
    assert named.without_draft().command() == f"specli run {alone.strip()}".strip()


def test_commands_quote_and_leave_defaults_out() -> None:
    odd = Setup(ModelOptions(Path("my model.gguf"), n_ctx=512, n_ubatch=64, flash_attn="on", n_gpu_layers="3"))
    assert odd.command() == "specli run -m 'my model.gguf' -c 512 -ub 64 -ngl 3 -fa on"


# -- what the draft costs


def test_what_the_draft_costs_in_context() -> None:
    sizer = TableSizer(free=170)
    cost = draft_cost(make_plan(setup(), sizer), sizer)
    assert cost is not None
    assert cost.n_bytes == (5 + 8 + 5) * MIB
    assert cost.bytes_per_token == 8 * 1024
    assert cost.tokens == 18 * 1024 // 8
    assert cost.longest_with == 4352  # 170 - 130 of weights and compute, 9 MiB per 1024
    assert cost.longest_without == 6400  # 170 - 120, 8 MiB per 1024


def test_context_is_free_for_a_recurrent_target() -> None:
    sizer = TableSizer(free=170)
    sizer.models[TARGET] = replace(sizer.models[TARGET], kv_per_1024=0)
    cost = draft_cost(make_plan(setup(), sizer), sizer)
    assert cost is not None
    assert cost.tokens is None


def test_no_draft_costs_nothing() -> None:
    sizer = TableSizer(free=170)
    assert draft_cost(make_plan(setup(draft=False), sizer), sizer) is None


@pytest.mark.parametrize("trained", [100, 256, 300, 8192, 10000])
def test_the_longest_context_is_at_most_the_trained_one(trained: int) -> None:
    sizer = TableSizer(free=10000)
    sizer.models[TARGET] = replace(sizer.models[TARGET], trained=trained)
    assert longest_context(setup(), sizer) == trained


def test_weights_by_type(tmp_path: Path) -> None:
    header = gguf_file.read_header(write_tiny(tmp_path / "tiny.gguf"))
    assert weights_by_type([header, header]) == {
        "F32": (2 * len(header.tensors), 2 * sum(tensor.n_bytes for tensor in header.tensors))
    }
