"""The rest of llama.cpp's sampler chain as options: penalties, DRY, XTC, mirostat, order, bias, grammar, logprobs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from specli.cli import values
from specli.cli.option_groups import make_option
from specli.cli.prompt import read_text_file
from specli.config import SAMPLERS, GenerationOptions, SamplingOptions
from specli.errors import ConfigError

SAMPLERS_PANEL, CONSTRAINTS = "More samplers", "Constraints and logprobs"


def _more(*names: str, help: str, metavar: str | None = None, env: str | None = None) -> Any:  # noqa: ANN401
    return make_option(*names, panel=SAMPLERS_PANEL, help=help, metavar=metavar, env=env)


def _constraint(*names: str, help: str, metavar: str | None = None) -> Any:  # noqa: ANN401
    return make_option(*names, panel=CONSTRAINTS, help=help, metavar=metavar)


@dataclass(frozen=True)
class SamplerFlags:
    """What a command takes beside temperature, top-k, top-p, min-p and seed."""

    samplers: Annotated[
        str | None, _more("--samplers", metavar="NAME;...", help=f"Their order (unset: {';'.join(SAMPLERS)}).")
    ] = None
    sampler_seq: Annotated[
        str | None,
        _more("--sampler-seq", "--sampling-seq", metavar="LETTERS", help="The same by letters (unset: edskypmxt)."),
    ] = None
    typical: Annotated[float, _more("--typical", "--typical-p", help="Locally typical sampling; 1 = off.")] = (
        SamplingOptions.typical_p
    )
    top_n_sigma: Annotated[
        float, _more("--top-nsigma", "--top-n-sigma", help="Standard deviations below the best logit; -1 = off.")
    ] = SamplingOptions.top_n_sigma
    xtc_probability: Annotated[float, _more("--xtc-probability", help="Chance to exclude top choices; 0 = off.")] = (
        SamplingOptions.xtc_probability
    )
    xtc_threshold: Annotated[float, _more("--xtc-threshold", help="Probability of a top choice; above 0.5 = off.")] = (
        SamplingOptions.xtc_threshold
    )
    dynatemp_range: Annotated[float, _more("--dynatemp-range", help="Temperature ± this, by entropy; 0 = off.")] = (
        SamplingOptions.dynatemp_range
    )
    dynatemp_exp: Annotated[float, _more("--dynatemp-exp", help="Exponent of the entropy.")] = (
        SamplingOptions.dynatemp_exponent
    )
    repeat_last_n: Annotated[
        int, _more("--repeat-last-n", help="Tokens that penalties look at; 0 = off, -1 = all.")
    ] = SamplingOptions.repeat_last_n
    repeat_penalty: Annotated[
        float,
        _more("--repeat-penalty", env="LLAMA_ARG_REPEAT_PENALTY", help="Divides logits of recent tokens; 1 = off."),
    ] = SamplingOptions.repeat_penalty
    presence_penalty: Annotated[
        float,
        _more("--presence-penalty", env="LLAMA_ARG_PRESENCE_PENALTY", help="Off logits of recent tokens; 0 = off."),
    ] = SamplingOptions.presence_penalty
    frequency_penalty: Annotated[
        float,
        _more(
            "--frequency-penalty",
            env="LLAMA_ARG_FREQUENCY_PENALTY",
            help="The same for each time they stand there; 0 = off.",
        ),
    ] = SamplingOptions.frequency_penalty
    dry_multiplier: Annotated[float, _more("--dry-multiplier", help="Don't repeat yourself; 0 = off.")] = (
        SamplingOptions.dry_multiplier
    )
    dry_base: Annotated[float, _more("--dry-base", help="DRY: the penalty grows by this with each token.")] = (
        SamplingOptions.dry_base
    )
    dry_allowed_length: Annotated[int, _more("--dry-allowed-length", help="DRY: shorter repetitions are free.")] = (
        SamplingOptions.dry_allowed_length
    )
    dry_penalty_last_n: Annotated[
        int, _more("--dry-penalty-last-n", help="DRY: tokens it looks at; 0 = off, -1 = all.")
    ] = SamplingOptions.dry_penalty_last_n
    dry_sequence_breaker: Annotated[
        list[str] | None,
        _more(
            "--dry-sequence-breaker",
            metavar="TEXT",
            help=r"DRY: a text that ends a repetition; repeatable; none (unset: \n : \" *).",
        ),
    ] = None
    mirostat: Annotated[int, _more("--mirostat", help="Mirostat 1 or 2 in place of the others; 0 = off.")] = (
        SamplingOptions.mirostat
    )
    mirostat_lr: Annotated[float, _more("--mirostat-lr", help="Mirostat's learning rate (eta).")] = (
        SamplingOptions.mirostat_eta
    )
    mirostat_ent: Annotated[float, _more("--mirostat-ent", help="Mirostat's target entropy (tau), bits.")] = (
        SamplingOptions.mirostat_tau
    )
    logit_bias: Annotated[
        list[str] | None,
        _constraint(
            "-l",
            "--logit-bias",
            metavar="TOKEN_ID±BIAS",
            help="Added to a token's logit (15043+1, 15043-inf bans it); repeatable.",
        ),
    ] = None
    grammar: Annotated[
        str | None, _constraint("--grammar", metavar="GBNF", help="What may come next, as llama.cpp's grammar.")
    ] = None
    grammar_file: Annotated[str | None, _constraint("--grammar-file", metavar="FILE", help="The same from a file.")] = (
        None
    )
    json_schema: Annotated[
        str | None, _constraint("-j", "--json-schema", metavar="SCHEMA", help="JSON of this schema ({}: any).")
    ] = None
    json_schema_file: Annotated[
        str | None, _constraint("-jf", "--json-schema-file", metavar="FILE", help="The same from a file.")
    ] = None
    logprobs: Annotated[
        int | None,
        _constraint(
            "--logprobs",
            metavar="N",
            help="In --stats-json: each token's log probability and the N best, before the samplers.",
        ),
    ] = None

    def options(self, base: SamplingOptions, escape: bool) -> SamplingOptions:
        """``base`` with these flags; ``escape``: backslashes in texts have a meaning. Raises ``ConfigError``."""
        return replace(
            base,
            typical_p=self.typical,
            top_n_sigma=self.top_n_sigma,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            dynatemp_range=self.dynatemp_range,
            dynatemp_exponent=self.dynatemp_exp,
            repeat_last_n=self.repeat_last_n,
            repeat_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            dry_multiplier=self.dry_multiplier,
            dry_base=self.dry_base,
            dry_allowed_length=self.dry_allowed_length,
            dry_penalty_last_n=self.dry_penalty_last_n,
            dry_breakers=self._breakers(escape),
            mirostat=self.mirostat,
            mirostat_tau=self.mirostat_ent,
            mirostat_eta=self.mirostat_lr,
            samplers=self._order(),
            logit_bias=values.logit_biases(self.logit_bias),
            grammar=self._one("--grammar", self.grammar, self.grammar_file, "grammar"),
            json_schema=self._one("--json-schema", self.json_schema, self.json_schema_file, "JSON schema"),
        )

    def generation(self, base: GenerationOptions, has_json: bool) -> GenerationOptions:
        """``base`` with these flags; ``has_json``: there is a place for them. Raises ``ConfigError``."""
        if self.logprobs is not None and not has_json:
            raise ConfigError("--logprobs was given without --stats-json, where they would go; add --stats-json FILE")
        return replace(base, n_logprobs=self.logprobs)

    def _order(self) -> tuple[str, ...]:
        if self.samplers is not None and self.sampler_seq is not None:
            raise ConfigError("--samplers and --sampler-seq were both given, each is an order; leave one out")
        if self.samplers is not None:
            return values.sampler_names(self.samplers)
        return SAMPLERS if self.sampler_seq is None else values.sampler_letters(self.sampler_seq)

    def _breakers(self, escape: bool) -> tuple[str, ...]:
        given = self.dry_sequence_breaker
        if given is None:
            return SamplingOptions.dry_breakers
        texts = [text for text in given if text != "none"]
        return tuple(values.unescape(text, "--dry-sequence-breaker") if escape else text for text in texts)

    def _one(self, flag: str, text: str | None, file: str | None, what: str) -> str:
        if file is None:
            return "" if text is None else self._not_empty(flag, text)
        if text is not None:
            raise ConfigError(f"both {flag} and {flag}-file were given, one {what} was expected; leave one out")
        return self._not_empty(f"{flag}-file {file}", read_text_file(Path(file), what))

    def _not_empty(self, flag: str, text: str) -> str:
        if not text.strip():
            raise ConfigError(f"{flag} got an empty text, which says nothing about the answer; leave it out")
        return text
