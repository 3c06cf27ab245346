"""The account of a request's prompt: what it reused, and what it lost and why."""

from typing import Any

import msgspec

from kvmesh.bus.messages import CacheAccount, CacheLoss
from kvmesh.frontend.cache_account.account import cache_account, lost_by_reason
from kvmesh.frontend.dispatch.task import DispatchState, SequenceTask
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.frontend.metrics import REUSED, FrontendModelMetrics
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest


def account_of(task: SequenceTask) -> CacheAccount | None:
    """The account of a sequence's prompt; None until the engine has counted cached tokens.

    Further choices of a prompt have none: each prompt is accounted for once.
    """
    if task.index % task.prepared.request.n:
        return None
    return prompt_account(task.prepared, task.stream, task.dispatch, task.index)


def prompt_account(
    prepared: PreparedRequest, stream: TokenStream, dispatch: DispatchState, index: int = 0
) -> CacheAccount | None:
    """The account of the prompt of the sequence `index`, as `account_of` returns it."""
    counted, cached = dispatch.counted, stream.cached
    if cached is None:
        return None
    first = index == 0
    return cache_account(
        prepared.prompts[index // prepared.request.n].count,
        prepared.model.card.block_size,
        sum(cached),
        None if counted is None else counted.possible,
        prepared.comparison if first else None,
        prepared.computed_ahead(sum(cached)) if first else None,
    )


def loss_object(loss: CacheLoss) -> dict[str, Any]:
    """A loss for the prompt's caller, without the request for whose blocks it was.

    That may be another tenant's.
    """
    return {name: v for name, v in msgspec.to_builtins(loss).items() if name != "request"}


def count_tokens(metrics: FrontendModelMetrics, account: CacheAccount) -> None:
    """Add an account to the metrics of its model; a worker may report a reason not known here."""
    for kind, count in zip(REUSED, (account.own, account.ahead, account.shared), strict=True):
        if count:
            metrics.reused_tokens[kind].inc(count)
    for reason, count in lost_by_reason(account.losses).items():
        metrics.lost_tokens.get(reason, metrics.lost_otherwise).inc(count)
    metrics.new_tokens.inc(account.new)
    metrics.possible_tokens.inc(account.possible)
