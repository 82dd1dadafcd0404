"""The sampler that settings ask for, on a loaded model: ids of control tokens, DRY's breakers, the grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specli.config import SamplingOptions
from specli.errors import ConfigError
from specli.samplers import Breakers
from specli.sampling import Constraint, Sampler

if TYPE_CHECKING:
    from specli.engine.grammar import Pieces
    from specli.engine.llama import LlamaModel

_MOST_CHARACTERS, _MOST_TOKENS = 40, 20  # of a breaker, as llama.cpp


def check_constraint(options: SamplingOptions) -> str | None:
    """Raise ``ConfigError`` for a grammar or schema that llama.cpp does not take; nothing is loaded.

    What a schema says beyond its grammar, as one line, or None.
    """
    if not options.is_constrained:
        return None
    from specli.engine.grammar import check_grammar

    check_grammar(_gbnf(options))
    names = unenforced_keywords(options)
    return f"not enforced by the grammar of the JSON schema: {', '.join(names)}" if names else None


def unenforced_keywords(options: SamplingOptions) -> list[str]:
    """Keywords of the JSON schema, which must be one, that its grammar leaves unchecked; sorted."""
    from specli.engine.schema import unenforced

    return unenforced(options.json_schema) if options.json_schema else []


def make_sampler(
    options: SamplingOptions,
    model: LlamaModel,
    pieces: Callable[[], Pieces] | None = None,
    breakers: Callable[[tuple[str, ...]], Breakers] | None = None,
) -> Sampler:
    """The chain over ``model``'s vocabulary. Raises ``ConfigError`` for tokens that it does not have.

    ``pieces`` gives the vocabulary as grammars want it and ``breakers`` is ``find_breakers``, where either may have
    been made before: both walk the whole vocabulary.
    """
    for token, _bias in options.logit_bias:
        if token >= model.n_vocab:
            raise ConfigError(f"-l/--logit-bias names token {token}, the model has 0 to {model.n_vocab - 1}")
    bias: dict[int, float] = {}
    for token, value in options.logit_bias:
        bias[token] = bias.get(token, 0.0) + value
    return Sampler(
        options.temperature,
        options.top_k,
        options.top_p,
        options.min_p,
        tuple(sorted({*model.suppressed, *(model.end_ids if options.ignore_eos else ())})),
        bias,
        typical_p=options.typical_p,
        top_n_sigma=options.top_n_sigma,
        xtc_probability=options.xtc_probability,
        xtc_threshold=options.xtc_threshold,
        dynatemp_range=options.dynatemp_range,
        dynatemp_exponent=options.dynatemp_exponent,
        repeat_last_n=options.repeat_last_n,
        repeat_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        dry_multiplier=options.dry_multiplier,
        dry_base=options.dry_base,
        dry_allowed_length=options.dry_allowed_length,
        dry_penalty_last_n=options.dry_penalty_last_n,
        dry_breakers=_breakers(options, model, breakers),
        mirostat=options.mirostat,
        mirostat_tau=options.mirostat_tau,
        mirostat_eta=options.mirostat_eta,
        order=options.samplers,
        constraint=_constraint(options, model, pieces),
    )


def _constraint(options: SamplingOptions, model: LlamaModel, pieces: Callable[[], Pieces] | None) -> Constraint | None:
    if not options.is_constrained:
        return None
    from specli.engine.grammar import Pieces, compile_grammar

    return compile_grammar(model, _gbnf(options), Pieces(model) if pieces is None else pieces())


def _gbnf(options: SamplingOptions) -> str:
    if not options.json_schema:
        return options.grammar
    from specli.engine.schema import schema_grammar

    return schema_grammar(options.json_schema)


def _breakers(
    options: SamplingOptions, model: LlamaModel, known: Callable[[tuple[str, ...]], Breakers] | None
) -> Breakers:
    if options.dry_multiplier == 0:
        return {}
    return find_breakers(options.dry_breakers, model) if known is None else known(options.dry_breakers)


def find_breakers(texts: Sequence[str], model: LlamaModel) -> Breakers:
    """First token -> the other tokens, of each way that a breaker can come (``get_overlapping_token_sequences``)."""
    words = [model.special_piece(token).decode("utf-8", "replace") for token in range(model.n_vocab)]
    found: dict[int, list[tuple[int, ...]]] = {}
    for text in texts:
        text = text[:_MOST_CHARACTERS]
        for token, word in enumerate(words):
            for tail in _tails(word, text, lambda rest: model.tokenize(rest, False, False)):
                tails = found.setdefault(token, [])
                if tail not in tails:
                    tails.append(tail)
    return found


def _tails(word: str, text: str, tokenize: Callable[[str], Sequence[int]]) -> list[tuple[int, ...]]:
    """What must follow ``word`` for ``text`` to stand there: nothing, or the rest where ``word`` ends in its start."""
    if text in word:
        return [()]
    starts = (i for i in range(len(word)) if word[i] == text[0] and text.startswith(word[i:]))
    return [tuple(tokenize(text[len(word) - i :])[:_MOST_TOKENS]) for i in starts]
