"""The n-gram drafter: right values for the rule, and the incremental index against a brute-force reading of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specli.drafters.base import EMPTY, Draft, SequenceState
from specli.drafters.ngram import NgramDrafter, _History
from specli.errors import ConfigError


class Text:
    """One sequence with its drafter: what the decode loop does, without an engine."""

    def __init__(self, prompt: list[int], **options: Any) -> None:
        self.drafter = NgramDrafter(**options)
        self.state = SequenceState(7, [])
        self.say(*prompt)

    def say(self, *tokens: int) -> Text:
        self.state.tokens.extend(tokens)
        self.drafter.commit(self.state, tokens)
        return self

    def draft(self, budget: int = 8) -> Draft:
        [draft] = self.drafter.propose([self.state], [budget])
        return draft

    def next(self, budget: int = 8) -> list[int]:
        return list(self.draft(budget).ids)


def test_copies_what_followed_the_longest_match() -> None:
    # (3, 4) went on with 9 last, (2, 3, 4) with 5
    assert Text([1, 2, 3, 4, 5, 6, 0, 8, 3, 4, 9, 0, 2, 3, 4]).next(2) == [5, 6]


def test_the_most_frequent_continuation_wins() -> None:
    assert Text([1, 2, 5, 0, 1, 2, 5, 0, 1, 2, 6, 3, 1, 2]).next(1) == [5]


def test_ties_go_to_the_most_recent_continuation() -> None:
    history = _History([2])
    for token in [1, 2, 5, 0, 1, 2, 6, 3, 1, 2]:
        history.append(token)
    match = history.longest(history.suffix)
    assert match is not None
    assert (history.tokens[match.position], match.seen, match.total) == (6, 1, 2)


def test_nothing_when_contradicted() -> None:
    assert Text([1, 2, 5, 0, 1, 2, 6, 3, 1, 2]).draft() is EMPTY  # one against one
    assert Text([1, 2, 5, 0, 1, 2, 5, 9, 1, 2, 6, 3, 1, 2]).next(1) == [5]  # two of three


def test_a_long_match_outweighs_a_contradicted_short_one() -> None:
    assert Text([9, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2]).next(1) == [5]


def test_the_draft_follows_the_text_through_the_end_of_the_match() -> None:
    assert Text([*range(20, 60), 30, 31]).next(16) == list(range(32, 48))


def test_the_draft_loops_with_a_loop() -> None:
    assert Text([1, 2, 3] * 4).next(7) == [1, 2, 3, 1, 2, 3, 1]


def test_stops_behind_an_end_of_generation_id() -> None:
    text = Text([1, 2, 3, 99, 4, 5, 1, 2], end_ids=frozenset({99}))
    assert text.next() == [3, 99]


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_keeps_to_the_budget(budget: int) -> None:
    assert len(Text([5] * 20).draft(budget)) == budget


def test_nothing_new_matches_nothing() -> None:
    assert Text([]).draft() is EMPTY
    assert Text([1]).draft() is EMPTY
    assert Text(list(range(50))).draft() is EMPTY


def test_draft_is_a_chain_of_point_masses_with_confidence() -> None:
    draft = Text([*range(20, 60), 30, 31]).draft(12)
    assert list(draft.distributions) == [None] * 12
    assert draft.parents is None
    assert draft.confidence is not None
    assert draft.confidence.dtype == np.float64
    assert draft.confidence.shape == (12,)
    assert draft.confidence[0] == pytest.approx(0.6)  # two tokens, seen once: the prior alone
    assert list(draft.confidence) == sorted(draft.confidence)  # the match gets longer,
    assert draft.confidence[11] > draft.confidence[4]  # also past the largest size


def test_n_min_drops_short_drafts_and_p_min_cuts() -> None:
    prompt = [1, 2, 3, 99, 4, 5, 1, 2]
    assert Text(prompt, end_ids=frozenset({99}), n_min=2).next() == [3, 99]
    assert Text(prompt, end_ids=frozenset({99}), n_min=3).draft() is EMPTY
    assert Text(prompt, p_min=0.7).draft() is EMPTY


def test_what_is_hardly_ever_reached_is_not_proposed() -> None:
    """A draft ends behind the first token that stands with less than ``min_reach``, but not below ``n_min``."""
    prompt = [*range(1, 30), 1, 2]
    whole = Text(prompt).draft(20)
    assert whole.confidence is not None
    reach = np.cumprod(whole.confidence)
    for least in (0.0, 0.1, 0.2, 0.4):
        n_reached = int((reach >= least).sum()) + 1
        assert list(Text(prompt, min_reach=least).next(20)) == list(whole.ids[:n_reached])
    assert len(Text(prompt, min_reach=0.7, n_min=5).draft(20)) == 5


def test_sequences_are_apart_and_forgotten() -> None:
    drafter = NgramDrafter()
    one, two, unknown = (SequenceState(i, []) for i in range(3))
    drafter.commit(one, [1, 2, 3, 1, 2])
    drafter.commit(two, [1, 2, 4, 1, 2])
    assert [list(d.ids) for d in drafter.propose([two, unknown, one], [1, 1, 1])] == [[4], [], [3]]
    assert [drafter.chance(state) for state in (two, unknown, one)] == pytest.approx([0.6, 0.0, 0.6])
    drafter.forget(one)
    drafter.forget(unknown)
    assert [list(d.ids) for d in drafter.propose([one, two], [1, 0])] == [[], []]
    drafter.commit(one, [8, 9, 1, 2])
    assert drafter.propose([one], [4]) == [EMPTY]
    assert drafter.busy_s == 0.0


@pytest.mark.parametrize(("size_max", "size_min"), [(4, 0), (4, 5), (0, 0)])
def test_impossible_sizes_are_refused(size_max: int, size_min: int) -> None:
    with pytest.raises(ConfigError, match="expected 1 <= size_min <= size_max"):
        NgramDrafter(size_max=size_max, size_min=size_min)


def trigrams(n: int) -> list[int]:
    """n times (a, b, c) of fresh ids, a fresh id before each: every pair is seen once."""
    return [token for i in range(n) for token in (5000 + i, 3 * i, 3 * i + 1, 3 * i + 2)]


def test_a_size_that_proves_wrong_falls_silent_and_recovers() -> None:
    text = Text(trigrams(150))
    spoke = []
    for i in range(150):
        text.say(6000 + i, 3 * i, 3 * i + 1)
        spoke.append(len(text.draft(1)) == 1)
        text.say(7000 + i if i < 80 else 3 * i + 2)  # wrong eighty times, right from then on
    assert spoke[0]
    assert not any(spoke[5:80])
    assert spoke[80:].index(True) <= 15  # eighty misses are not held against it
    assert all(spoke[100:])


def test_a_copy_goes_on_behind_an_edit() -> None:
    text = Text(list(range(20, 60)), min_hit_rate=0.2).say(900, 22, 23, 24, 25, 999)  # 999 stands for 26
    assert text.next(4) == [27, 28, 29, 30]
    text.say(998)  # a second edit, on the heels of the first: no longer a copy
    assert text.draft() is EMPTY


def test_edits_teach_that_copies_go_on() -> None:
    text = Text(list(range(100, 200)))
    resumed = []
    for start in range(100, 190, 10):
        text.say(*range(start, start + 9), 1000 + start)  # each tenth token is edited, always to something new
        resumed.append(text.next(2) == [start + 10, start + 11])
    assert resumed == [False] * 2 + [True] * 7  # two resumed copies beat the prior


def test_a_copy_under_way_keeps_its_place_where_rows_end_alike() -> None:
    """Rows that begin differently and end alike: four tokens do not tell which row comes next, the copy does."""
    ending = [1, 2, 3, 4, 5]
    text = Text([token for i in range(6) for token in (100 + i, 200 + i, 300 + i, *ending)])
    text.say(900, 101, 201, 301, *ending[:4])
    assert text.next(1) == [5]
    text.say(5)
    assert text.next(9) == [102, 202, 302, *ending, 103]
    text.say(777, 2, 3)  # left its rows for one that nobody has seen
    assert text.next(2) == [4, 5]
    text.say(4, 5)
    assert text.draft() is EMPTY  # five rows end like that, and nothing is being copied


def test_a_counted_list_is_left_alone() -> None:
    newline, dot = 1, 2
    text = Text([500, 501, 502])
    proposed = 0
    for i in range(10, 70):
        item = [newline, 10 + i // 10, 10 + i % 10, dot, 600 + 2 * i, 601 + 2 * i]  # digits are tokens of their own
        for token in item:
            proposed += len(text.draft(7))
            text.say(token)
    assert proposed <= 40  # sizes 4 to 2, first hit, unjudged: 722, all wrong


@given(
    st.lists(st.integers(0, 3), max_size=80),
    st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
)
def test_index_equals_brute_force(tokens: list[int], sizes: list[int]) -> None:
    """Size, count and position of the most frequent, most recent continuation of the longest suffix."""
    history = _History(range(sizes[1], sizes[0] - 1, -1))
    for done, token in enumerate(tokens):
        found = history.longest(history.suffix)
        assert (found and tuple(found)) == brute_force(tokens[:done], sizes)
        history.append(token)


def brute_force(tokens: list[int], sizes: list[int]) -> tuple[int, int, int, int] | None:
    for size in range(sizes[1], sizes[0] - 1, -1):
        suffix = tokens[len(tokens) - size :]
        ends = [i for i in range(size, len(tokens)) if tokens[i - size : i] == suffix]
        if ends:
            counts = Counter(tokens[i] for i in ends)
            latest = {tokens[i]: i for i in ends}
            best = max(counts, key=lambda token: (counts[token], latest[token]))
            return latest[best], size, counts[best], len(ends)
    return None


@settings(max_examples=50)
@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(1, 4), max_size=30), st.integers(0, 9))
def test_drafts_keep_their_promises_however_tokens_arrive(tokens: list[int], chunks: list[int], budget: int) -> None:
    whole, parts = Text(tokens[:5]), Text(tokens[:5])
    whole.say(*tokens[5:])
    rest = tokens[5:]
    for size in chunks:
        parts.say(*rest[:size])
        rest = rest[size:]
    parts.say(*rest)
    draft, same = whole.draft(budget), parts.draft(budget)
    assert list(draft.ids) == list(same.ids)
    if draft.confidence is not None:
        assert draft.confidence[0] == whole.drafter.chance(whole.state)
    parts.state.tokens[3:] = []  # another answer to the same beginning: what was looked up counts no more
    parts.drafter.rewind(parts.state, 3)
    assert list(parts.draft(budget).ids) == list(Text(tokens[:3]).draft(budget).ids)
    assert len(draft) <= budget
    assert set(draft.ids) <= set(tokens)
    if draft.confidence is not None:
        assert len(draft.confidence) == len(draft)
        assert np.all((draft.confidence >= 0.4) & (draft.confidence < 1))


class CountingDict(dict[int, Any]):
    """A table that counts its lookups."""

    lookups = 0

    def get(self, *args: Any) -> Any:
        self.lookups += 1
        return super().get(*args)


@pytest.mark.parametrize("alphabet", [1, 3, 1000])
def test_work_does_not_grow_with_the_history(alphabet: int) -> None:
    """Lookups per proposal and entries per token are bounded by the sizes (vllm-project/vllm#22408)."""
    rng = np.random.default_rng(0)
    text = Text(rng.integers(0, alphabet, 20_000).tolist(), min_hit_rate=0.0)
    history = text.drafter._histories[text.state.id]
    counting = [CountingDict(table) for _, _, table in history.tables]
    history.tables = [(size, mask, new) for (size, mask, _), new in zip(history.tables, counting, strict=True)]
    text.draft(16)
    assert 0 < sum(table.lookups for table in counting) <= 3 * 16
    assert all(len(table) <= min(20_000, alphabet**size) for size, _, table in history.tables)
