"""How many tokens to propose, and who proposes them: whatever emits the most tokens per second, by measured profit.

Pure: no clock and no model inside; it is told times and outcomes. Costs are in units of a one-token target pass:
v(n) for a pass over n tokens (v(1) = 1), c for a draft step. A round that proposes k tokens with survival
probabilities s_1 >= s_2 >= ... emits 1 + s_1 + ... + s_k tokens on average and costs k*c + v(1 + k).

    rate R       tokens per unit that is reachable now: what recent rounds brought, at least plain decoding's
    value        expected extra tokens - R * extra units; the best value wins: a draft model, the text itself, nobody
    n-gram       the chances of its tokens are known beforehand, so is the length that is worth most; what it would
                 have brought shows in the text that came, proposed or not
    draft model  what its last drafts brought and cost, or what its acceptance lately lets expect, whichever is more;
                 how far it grows, its own confidence decides on the way: on while some longer draft, not just the
                 next token, has more expected extra tokens than R * extra units
    account      units that the model's drafts saved over plain decoding so far, and 1% of the time on top, up to a
                 cap: on an empty account it does not draft, and no draft may cost more than there is or than a
                 credit, so whatever the estimates say, little more than that is lost.
                 Copies have an account of their own, on which those count as well that were not proposed (in a
                 batch: of those that could pay in it)
    debt         units that feeding the draft's cache took and that savings have not paid back yet. Where drafts are
                 known a text that the cache lacks is fed when that should earn itself back, one at a time; where they
                 are not, within the account and a share of the answer so far; where they are known not to pay,
                 within the account. Once fed that is spent: what goes on is judged by its own costs
    probe        what is not in use is tried again, the sooner the less it may lose; a width that was measured but
                 a few times is then looked at whatever it seems to cost

v(n) is neither flat nor monotonic, so every length is looked at. Exactness: all of this decides before a token is
drawn, from past rounds, the drafted prefix, and the draft's own distributions (tests enumerate the law with it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from specli.estimates import MOST_DOUBTED, N_TRUSTED, Acceptance, CostModel, Profit, number, survivors
from specli.record import Kind, Outcome, Plan, Record

ALLOWANCE = 0.01  # of the time may be lost
CREDIT = 2.0  # units that a cold start may lose, and one draft of a poor account
KNOWN_CREDIT, N_SURE = 4.0, 8  # kept by one that knows, from so many drafts, that they do not pay, if earned before
COPY_CREDIT = 4.0  # units that copies may cost while nothing is known, and the most that is put by of their savings
COPY_TRUST = 0.98  # of an n-gram's chance: right on average, too high among those that are picked for being high
MAX_ACCOUNT = 8.0  # units: of what was saved, so much may be lost again
MAX_DEBT = 8.0  # units of catching up that are not paid back: no more is fed on credit
DEBT_CREDIT = 0.25  # of it, which drafts may lose before a text that was fed for them is given up
COLD_SHARE = 0.05  # units of catching up per token of the answer so far, while nothing is known of drafts
PROBE_SHARE = 0.02  # units that a probe may lose per round since the last one
OVERDUE, OVERDUE_SHARE = 128, 0.75  # an answer of so many tokens, of which the draft lacks so many, is looked at anyhow
NEGLIGIBLE = 0.03  # chance that a token is reached: what is behind does not matter
N_COLD = 4  # drafts of a cold start that need not wait for each other
CONTEXT_FIRST, MAX_BUCKET = 2048, 9  # tokens from which on costs are others, and again at every fourfold
HORIZON = 24  # rounds that one catch-up of the draft's cache is expected to serve, at least
HORIZON_PER_TOKEN = 0.5  # the same per token of the answer so far
N_PLAIN = 64  # rounds between two looks at the one-token pass while speculation pays
RATE_MEMORY = 0.8  # per round: about the last five count
PROFIT_MEMORY = 0.9  # per round with a model draft, once there were some
USUAL_MEMORY = 0.99  # the same, for what is kept between runs
PRIOR_DRAFTS = 2  # that the prior profit counts for
WARM, HEAVY = 0.4, 1 / 3  # temperature and c above which the gain is in doubt beforehand


class Controller:
    """Decides, learns, explains. One for all sequences of a batch: costs belong to the batch.

    A round: ``begin``; ``plan`` for each sequence; ``begin_pass``, ``begin_turn``, ``may_draw``, ``take``, ``may_step``
    while a model drafts; ``observe``. ``k_max``, ``n_min``: the longest and shortest draft, tokens. ``costs``: of texts
    as long as now.
    """

    def __init__(self, k_max: int, costs: CostModel | None = None, n_min: int = 0) -> None:
        self.k_max, self._n_min = k_max, max(1, n_min)
        self.costs = costs or CostModel()
        self._by_context = {0: self.costs}  # by bucket
        self.n_calibrating = 0  # passes that were made to measure, at the start
        self.acceptance = Acceptance()
        self.record = Record()
        self.rate = self._plain_rate = 1.0  # tokens per unit, of the whole batch
        self._brought, self._spent = 0.0, 0.0  # units of recent rounds: what plain decoding needs for it, what it took
        self._profits: dict[int, Profit] = {}  # of recent drafts, by the magnitude of the batch
        self._usual: Profit | None = None  # of all drafts
        self._n_drafts = 0
        self._account = CREDIT  # units
        self._copied = 0.0  # units that copies saved, or would have, proposed or not
        self._debt = 0.0  # units
        self._round = 0
        self._last: dict[Kind, int] = {"none": 0, "draft": 0, "ngram": 0}  # rounds
        self._probing: Kind | None = None
        self._n_active = self._width = 1  # sequences; tokens of the batch under construction
        self._growing = 1  # sequences that this draft pass is shared by,
        self._undrawn = self._next = 0  # those of them that have not drawn yet, and those that will step again
        self._catch_up = self._granted = 0.0  # units that this round's sequences lack; and of those that will draft
        self._wanted = 0.0  # units that a look at the draft model would cost, while the account does not have them
        self._fed, self._is_feeding = 0.0, False  # units that rounds in a row fed, the last of them; whether it did
        self._n_passes, self._planned = 0, 1  # draft passes of this round; tokens of the batch before the first
        self._funds = CREDIT  # units that the model's drafts of this round may cost, catching up apart
        self._worth: float | None = None  # tokens that a model draft is worth, once fed; None: not asked in this round
        self._least: dict[int, float] = {}  # chance of a first token that copies need, by the batch before them

    def begin(self, n_active: int, n_context: int = 0) -> None:
        """A round begins: every sequence has its own token in the batch. ``n_context``: tokens of a mean one so far."""
        self._round += 1
        bucket = _bucket(n_context)
        if bucket not in self._by_context:
            self._by_context[bucket] = self.costs.elsewhere()
        self.costs = self._by_context[bucket]
        self._n_active = self._width = n_active
        self._undrawn, self._next, self._probing, self._n_passes = 0, 0, None, 0
        self._catch_up, self._granted, self._worth = 0.0, 0.0, None
        self._least.clear()
        plain_units = self.costs.v(n_active)
        self._plain_rate, self._funds = n_active / plain_units, max(CREDIT * plain_units, self._account)
        self.rate = self._plain_rate * max(1.0, self._brought / self._spent if self._spent > 0 else 0.0)

    def plan(
        self,
        n_lacking: int | None,
        ngram: Sequence[float] | None,
        budget: int,
        *,
        n_emitted: int = 0,
        n_left: int | None = None,
    ) -> Plan:
        """Choose for one sequence before anything is drawn.

        ``n_lacking``: tokens that the draft's cache lacks, None without a draft model. ``ngram``: chances of the
        n-gram draft's tokens, each given the ones before, None without an n-gram drafter. ``budget``: the longest
        draft that fits. ``n_emitted``: tokens of this answer so far; ``n_left``: that may still come, None if unknown.
        """
        self.record.has_model |= n_lacking is not None
        self.record.has_ngram |= ngram is not None
        budget = min(budget, self.k_max)
        values: dict[Kind, tuple[float, int]] = {"none": (0.0, 0)}
        catch_up, price, may_feed = 0.0, 0.0, True  # units
        horizon = max(HORIZON, HORIZON_PER_TOKEN * n_emitted)  # rounds
        if n_left is not None:
            horizon = min(horizon, n_left)
        if ngram and budget > 0:
            values["ngram"] = self._best_copy(ngram[:budget], self._width + self._next, COPY_CREDIT + self._copied)
        if n_lacking is not None and budget >= self._n_min:
            catch_up = self.costs.catch_up(n_lacking)
            price = self._n_active * catch_up + (self._debt if self._n_drafts >= N_SURE else 0.0)
            if n_emitted >= OVERDUE and n_lacking >= OVERDUE_SHARE * n_emitted and not self._is_known_loss:
                price = self._n_active * self.costs.catch_up(n_lacking - n_emitted)
            self._catch_up += catch_up
            if self._account + (0.0 if self._is_known_loss else DEBT_CREDIT * self._debt) > 0:
                fed, may_feed = self.rate * catch_up / horizon, self._may_feed(catch_up, n_emitted)  # tokens
                worth = -math.inf if self._profit is None else self._profit.worth(self.rate)
                if worth <= fed or not may_feed or "ngram" in values:  # else it drafts anyhow
                    if self._worth is None:
                        self._worth = max(worth, self._foreseen().worth(self.rate))
                    worth = self._worth
                values["draft"] = worth - fed, budget
        kind: Kind = "none"
        for other, (value, _k) in values.items():
            if value > values[kind][0] and (may_feed or other != "draft"):
                kind = other
        kind = self._probe(values, kind, may_feed, price) or kind
        if kind == "draft":
            self._next += 1
            self._granted += catch_up
        return Plan(kind, values[kind][1])

    def _may_feed(self, catch_up: float, n_emitted: int) -> bool:
        """Whether a sequence's cache may be fed, beside what was granted in this round.

        A catch-up that has begun and takes several rounds is not left halfway for what fell due meanwhile.
        """
        if catch_up == 0:
            return True
        most = self._account + min(MAX_ACCOUNT, self._fed)
        if self._n_drafts < N_COLD:
            most += COLD_SHARE * n_emitted
        elif not self._is_known_loss:
            if self._n_drafts >= N_SURE and self._debt + self._granted < MAX_DEBT:
                return True
            most += MAX_DEBT
        return self._debt + self._granted + catch_up < most

    @property
    def _profit(self) -> Profit | None:
        """Of recent drafts in batches like this one; None before any."""
        return self._profits.get(self._n_active.bit_length())

    @property
    def _is_known_loss(self) -> bool:
        """Whether enough drafts have shown that they do not pay."""
        return self._n_drafts >= N_SURE and self._usual is not None and self._usual.worth(1.0) <= 0

    def _foreseen(self) -> Profit:
        """The profit of model drafts by their mean acceptance lately, at the best length."""
        width, step, mean = self._n_active, self.costs.c / self._n_active, self.acceptance.mean
        value, k = self._best([mean] * self.k_max, step, width, self._funds)
        if value == -math.inf:  # the shortest is beyond the funds
            return Profit(0.0, step)
        return Profit(survivors([mean] * k), k * step + self.costs.v(width + k) - self.costs.v(width))

    def _best_copy(self, chances: Sequence[float], width: int, funds: float = math.inf) -> tuple[float, int]:
        """The best of an n-gram draft: its chances as they come out where the best-looking length is the one taken."""
        return self._best([COPY_TRUST * chance for chance in chances], 0.0, width, funds)

    def least_copied(self) -> float:
        """The chance of a copy's first token at or below which no length pays in this batch, however sure the others.

        Alone, a copy that seems not to pay may be wanted for a look at its width.
        """
        if self._n_active == 1:
            return 0.0
        width = self._width + self._next
        if width not in self._least:
            v, least = self.costs.curve(width + self.k_max), math.inf
            for k in range(1, self.k_max + 1):
                least = min(least, (v[width + k] - v[width]) / k)
            self._least[width] = self.rate * least / COPY_TRUST
        return self._least[width]

    def _best(self, chances: Sequence[float], step: float, width: int, funds: float = math.inf) -> tuple[float, int]:
        """The best value over all lengths, relative to proposing nothing, and its length (>= 1).

        Lengths that cost more units than ``funds`` are left out.
        """
        best, best_k, tokens, survival = -math.inf, 1, 0.0, 1.0
        v, rate, n_min = self.costs.curve(width + len(chances)), self.rate, self._n_min
        base = v[width]
        for k, chance in enumerate(chances, start=1):
            survival *= chance
            tokens += survival
            units = k * step + v[width + k] - base
            value = tokens - rate * units
            if value > best and units <= funds and k >= n_min:
                best, best_k = value, k
            if survival < NEGLIGIBLE and k >= n_min:
                break
        return best, best_k

    def _probe(self, values: Mapping[Kind, tuple[float, int]], best: Kind, may_feed: bool, price: float) -> Kind | None:
        """What to try although it is not best. All sequences of a round try the same.

        ``price``: units that feeding the draft's cache for a look must find in the account, which saves up for it.
        """
        if self._probing is not None:
            return self._probing if self._probing in values else None
        for kind, last in self._last.items():
            if kind == best or kind not in values:
                continue
            loss = self._n_active * (values[best][0] - values[kind][0]) / self.rate
            is_due = (self._round - last) * PROBE_SHARE >= loss
            if kind == "none":
                is_due = self._round - last >= min(N_PLAIN, 8 * max(1, self.costs.n_samples(self._n_active)))
            elif kind == "ngram":
                is_due = is_due and self._is_doubtful(self._n_active + values[kind][1])
            elif self._n_drafts < N_COLD:
                is_due = may_feed and loss <= self._account
            elif is_due:
                self._wanted = loss + price
                is_due = self._wanted <= self._account
            if is_due:
                self._probing = kind
                return kind
        return None

    def _is_doubtful(self, width: int) -> bool:
        """Whether v(``width``) rests on so few times that what disturbed them may have passed for its cost.

        A batch has too many widths to look at each.
        """
        return self._n_active == 1 and self.costs.n_samples(width) < N_TRUSTED

    def foretold(self, said: Sequence[float], n_right: int) -> None:
        """An n-gram draft of ``said`` chances, proposed or not, was right in its first ``n_right`` tokens."""
        width = self._n_active
        value, k = self._best_copy(said[: self.k_max], width)
        if value > 0:
            saved = min(k, n_right) / self._plain_rate - (self.costs.v(width + k) - self.costs.v(width))
            self._copied = max(-COPY_CREDIT, min(COPY_CREDIT, self._copied + saved))

    def take(self, k: int) -> None:
        """``k`` more tokens are in the batch."""
        self._width += k

    def begin_pass(self, n_chains: int) -> None:
        """A draft pass for ``n_chains`` sequences, each of which then has its turn."""
        self._growing, self._undrawn, self._next = n_chains, n_chains, 0
        if self._n_passes == 0:
            self._planned = self._width
        self._n_passes += 1

    def begin_turn(self) -> None:
        """The next sequence of the pass."""
        self._undrawn -= 1

    def may_draw(self, confidences: Sequence[float], confidence: float) -> bool:
        """Whether to draw a token of this ``confidence`` behind those of ``confidences``; its row is paid for.

        A probe takes the draft at its word: what was learned to be wrong in one text may be right in the next.
        """
        chance = self.acceptance.at(confidence)
        if self._probing == "draft":
            chance = max(chance, confidence)
            if self._width == self._n_active and self._is_doubtful(self._width + 1):
                return True
        goes_on = self._goes_on(confidences, chance, is_paid=True)
        if not goes_on:
            self.acceptance.look(confidence)
        return goes_on

    def may_step(self, confidences: Sequence[float]) -> bool:
        """Whether another draft pass is worth it behind tokens of ``confidences``."""
        ahead = 0.5 * (self.acceptance.mean + self.acceptance.at(confidences[-1]))
        self._next += (goes_on := self._goes_on(confidences, ahead, is_paid=False))
        return goes_on

    def _goes_on(self, confidences: Sequence[float], chance: float, is_paid: bool) -> bool:
        """Some longer draft has more expected extra tokens than R times its extra units, and the funds for it."""
        survival = chance * math.prod(map(self.acceptance.at, confidences))
        tokens, ahead = 0.0, 0.5 * (self.acceptance.mean + chance)
        width, step = self._width + self._undrawn + self._next, self.costs.c / self._growing
        n_before, n_min, rate = len(confidences), self._n_min, self.rate
        v = self.costs.curve(width + self.k_max)
        base, left = v[width], self._funds - self._n_passes * self.costs.c - v[self._width] + v[self._planned]
        if 0 < n_before < n_min:  # so short it is worth nothing: what was drawn counts as well
            tokens, base = survivors(map(self.acceptance.at, confidences)), v[width - n_before]
            left += v[width] - base
        for extra in range(1, self.k_max - n_before + 1):
            tokens += survival
            units = (extra - is_paid) * step + v[width + extra] - base
            if tokens > rate * units and units <= left and n_before + extra >= n_min:
                return True
            survival *= ahead
        return False

    def observe(self, outcomes: Sequence[Outcome], pass_s: float, draft_s: float, n_steps: int, n_lacking: int) -> None:
        """The round took ``pass_s`` (target and host) and ``draft_s`` seconds.

        The draft model made ``n_steps`` passes; the first, or others before it, fed ``n_lacking`` tokens.
        """
        n_tokens, n_emitted, expected, drafts, of_drafts = len(outcomes), 0, 0.0, list[Outcome](), 0.0
        for outcome in outcomes:
            n_tokens += len(outcome.chances)
            n_emitted += outcome.n_emitted
            if outcome.kind == "none":
                continue
            tokens = self._expected(outcome)
            expected += tokens
            if outcome.kind == "ngram":
                self._last["ngram"] = self._round
            else:
                of_drafts += tokens
                drafts.append(outcome)
        self.costs.observe_pass(n_tokens, pass_s, self._n_active)
        self.costs.observe_draft(n_steps, n_lacking, draft_s)
        fed = self.costs.catch_up(n_lacking)
        self._debt += fed
        self._is_feeding = fed > 0 and n_steps == 0
        self._fed = self._fed + fed if self._is_feeding else 0.0
        self.record.note(outcomes, self._probing is not None, self._why_off)
        draft_units = self.costs.draft_cost(n_steps, n_lacking)
        self._book(n_emitted, expected, n_tokens, draft_units, pass_s + draft_s)
        if n_tokens == self._n_active:
            self._last["none"] = self._round
        if drafts and n_steps > 0:
            self._last["draft"], self._wanted = self._round, 0.0
            self._learn(drafts, of_drafts, n_tokens, n_steps)
        self._probing = None

    def _book(self, n_emitted: int, expected: float, n_tokens: int, draft_units: float, seconds: float) -> None:
        """Count the round, at estimated costs: one slow pass is no news of the text. ``expected``: tokens to stand."""
        units = self.costs.v(n_tokens) + draft_units
        self._brought = RATE_MEMORY * self._brought + n_emitted / self._plain_rate
        self._spent = RATE_MEMORY * self._spent + units
        self._earn(ALLOWANCE * units)
        self._copied = min(COPY_CREDIT, self._copied + ALLOWANCE * units)
        if (unit_s := self.costs.unit_s) is not None:
            is_plain, foreseen = n_tokens == self._n_active and draft_units == 0, self._n_active + expected
            self.record.book(n_emitted, foreseen, units, self._plain_rate, seconds, unit_s, is_plain)

    def _earn(self, units: float) -> None:
        """What was saved, or lost: up to a credit to work with, then it pays for catching up, then it is put by."""
        self._account += units
        paid = min(self._debt, max(0.0, self._account - CREDIT))
        self._debt = min(2 * MAX_DEBT, self._debt - paid)
        self._account = min(max(MAX_ACCOUNT, self._wanted), self._account - paid)

    def _learn(self, drafts: Sequence[Outcome], expected: float, n_tokens: int, n_steps: int) -> None:
        """What this round's model drafts brought and cost, and how their tokens were judged."""
        n, k, n_more, n_accepted = len(drafts), 0, 0, 0
        for draft in drafts:
            k += len(draft.chances)
            n_more += draft.n_emitted - 1
            n_accepted += draft.n_accepted
        v = self.costs.curve(n_tokens)
        units = (n_steps * self.costs.c + v[n_tokens] - v[n_tokens - k]) / n
        self._earn(n_more / self._plain_rate - n * units)
        added = 0.5 * (n_accepted + expected) / n  # half is less noisy
        news, weight = Profit(added, units), self._n_drafts + PRIOR_DRAFTS
        profit = (self._profit or self._foreseen()).moved(news, min(PROFIT_MEMORY, weight / (weight + 1)))
        self._profits[self._n_active.bit_length()] = profit
        self._usual = (self._usual or profit).moved(news, min(USUAL_MEMORY, weight / (weight + 1)))
        self._n_drafts += 1
        for draft in drafts:
            self.acceptance.observe(draft.chances[: draft.n_judged], draft.n_accepted)

    def _expected(self, outcome: Outcome) -> float:
        """Proposed tokens that should stand, as far as was known before the target looked."""
        chances = outcome.chances[: outcome.n_judged]
        return survivors(chances if outcome.kind == "ngram" else map(self.acceptance.at, chances))

    @property
    def break_even(self) -> float | None:
        """The acceptance above which a model draft of the best length pays; None if none does."""
        return self.costs.break_even(self.k_max, self._n_active)

    def _why_off(self) -> str:
        acceptance, break_even, profit = self.acceptance.mean, self.break_even, self._profit or self._foreseen()
        if not self.record.has_model:
            return "nothing in the text was worth copying"
        if self._is_feeding:
            return "the draft was catching up with the text"
        if break_even is None:
            return "even certain acceptance would not pay"
        if acceptance < break_even:
            return f"expected acceptance {acceptance:.2f} < break-even {break_even:.2f}"
        if self._catch_up > profit.worth(self._plain_rate) > 0:
            return f"the draft lags behind; to catch up costs {self._catch_up:.1f} target passes"
        return "drafts had cost more than they brought"

    def begin_answer(self) -> None:
        """Tell of decisions from here on; what was learned stays."""
        self.record = Record()

    def explain(self) -> str:
        """One line on this answer: how often it speculated, how far, by whom, why not; empty without rounds."""
        return self.record.explain()

    def report(self) -> dict[str, object]:
        """For ``--stats-json``: decisions, costs in one-token target passes, gain; None where undefined."""
        acceptance = self.acceptance.mean if self.acceptance.is_known else None
        break_even = self.break_even if self.record.has_model else None
        costs = {**self.costs.as_dict(), "calibration_passes": self.n_calibrating}
        return {**self.record.as_dict(), **costs, "acceptance": acceptance, "break_even": break_even}

    def expectation(self, temperature: float, c: float | None) -> str | None:
        """What to say beforehand where a draft model may well not pay, or None."""
        notes = []
        if temperature > WARM:
            notes.append(f"at temperature {temperature:g} fewer drafted tokens are accepted than at 0")
        if c is not None and c > HEAVY:
            break_even = self.costs.break_even(self.k_max, c=c)
            pays = "it cannot pay" if break_even is None else f"it pays above an acceptance of {break_even:.2f}"
            doubt = " (specli tune measures it anew)" if self.costs.n_steps <= MOST_DOUBTED else ""
            notes.append(f"a draft step costs {c:.2f} of a target pass, over a third: {pays}{doubt}")
        return "; ".join(notes) or None

    def profile(self) -> dict[str, object]:
        """What is worth keeping for the next run, for ``restore``; JSON types only."""
        return {
            "costs": {str(bucket): costs.as_dict() for bucket, costs in self._by_context.items()},
            "acceptance": self.acceptance.as_dict(),
            "drafts": self._n_drafts,
            "profit": self._usual,
            "account": max(0.0, self._account),
            "debt": self._debt,
            "copied": self._copied,
        }

    def restore(self, kept: Mapping[str, object]) -> bool:
        """Start from the ``profile`` of an earlier run, part by part where it makes sense; whether the costs did."""
        has_costs = self._restore_costs(kept.get("costs"))
        if self.acceptance.restore(kept.get("acceptance")):
            self._n_drafts = max(N_COLD, int(number(kept.get("drafts")) or 0))
            self._usual = Profit.restored(kept.get("profit"), self.k_max)
            self._profits = {} if self._usual is None else {1: self._usual}
        self._debt = min(2 * MAX_DEBT, number(kept.get("debt")) or 0.0)
        self._copied = number(kept.get("copied"), COPY_CREDIT, -COPY_CREDIT) or 0.0
        account = number(kept.get("account"))
        if account is not None:
            is_warm = self._n_drafts > 0 or not self.costs.knows_c
            most = KNOWN_CREDIT if self._is_known_loss else CREDIT
            self._account = min(account, most) if is_warm else max(CREDIT, min(account, MAX_ACCOUNT))
        return has_costs

    def _restore_costs(self, kept: object) -> bool:
        """Start from the costs of an earlier run, those at other lengths of text too; whether there were any."""
        by_context = dict[int, CostModel]()
        for bucket in range(MAX_BUCKET + 1):
            costs = CostModel()
            if isinstance(kept, Mapping) and costs.restore(kept.get(str(bucket))):
                by_context[bucket] = costs
        if by_context:
            self._by_context, self.costs = by_context, next(iter(by_context.values()))
        return bool(by_context)


def _bucket(n_context: int) -> int:
    """Which costs hold for texts of so many tokens."""
    return min(MAX_BUCKET, ((n_context // CONTEXT_FIRST).bit_length() + 1) // 2)
