"""The options that say which models are loaded and how, as one group, for commands that measure them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from specli.cli import options as o
from specli.cli.models import ModelChoice
from specli.config import ModelOptions, Settings


@dataclass(frozen=True)
class ModelFlags:
    """Models, context and hardware; names and defaults are those of ``specli run``."""

    model: o.Model = None
    draft_model: o.DraftModel = None
    pair: o.Pair = None
    hf_repo: o.HfRepo = None
    hf_file: o.HfFile = None
    hf_repo_draft: o.HfRepoDraft = None
    hf_token: o.HfToken = None
    ctx_size: o.CtxSize = ModelOptions.n_ctx
    batch_size: o.BatchSize = ModelOptions.n_batch
    ubatch_size: o.UbatchSize = ModelOptions.n_ubatch
    threads: o.Threads = ModelOptions.n_threads
    threads_batch: o.ThreadsBatch = ModelOptions.n_threads_batch
    threads_draft: o.ThreadsDraft = None
    threads_batch_draft: o.ThreadsBatchDraft = None
    gpu_layers: o.GpuLayers = ModelOptions.n_gpu_layers
    gpu_layers_draft: o.GpuLayersDraft = ModelOptions.n_gpu_layers
    fit: o.Fit = Settings.fit
    flash_attn: o.FlashAttn = ModelOptions.flash_attn
    cache_type_k: o.CacheTypeK = ModelOptions.cache_type_k
    cache_type_v: o.CacheTypeV = ModelOptions.cache_type_v
    cache_type_k_draft: o.CacheTypeKDraft = ModelOptions.cache_type_k
    cache_type_v_draft: o.CacheTypeVDraft = ModelOptions.cache_type_v

    def target(self, choice: ModelChoice) -> ModelOptions:
        """The target's options, its file not looked for yet. Raises ``ConfigError``."""
        return ModelOptions(
            path=choice.model or Path(),
            n_ctx=self.ctx_size,
            n_batch=self.batch_size,
            n_ubatch=self.ubatch_size,
            n_threads=self.threads,
            n_threads_batch=self.threads_batch,
            n_gpu_layers=self.gpu_layers,
            flash_attn=self.flash_attn,
            cache_type_k=self.cache_type_k,
            cache_type_v=self.cache_type_v,
        )

    def draft(self, target: ModelOptions, choice: ModelChoice) -> ModelOptions:
        """The draft's options, which are the target's where it has none of its own."""
        return replace(
            target,
            path=choice.draft_model or Path(),
            n_ctx=None,
            n_threads=_first(self.threads_draft, self.threads),
            n_threads_batch=_first(self.threads_batch_draft, self.threads_draft, self.threads_batch),
            n_gpu_layers=self.gpu_layers_draft,
            cache_type_k=self.cache_type_k_draft,
            cache_type_v=self.cache_type_v_draft,
        )

    def thread_flags(self) -> list[str]:
        """Those on threads, to be repeated in a command that is suggested."""
        given = {
            "-t": self.threads,
            "-tb": self.threads_batch,
            "-td": self.threads_draft,
            "-tbd": self.threads_batch_draft,
        }
        return [part for flag, value in given.items() if value is not None for part in (flag, str(value))]


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
