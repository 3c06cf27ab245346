"""Diagnosis of a prompt's cache against an earlier request, in the form of Anthropic's API.

Beside Anthropic's types, a reason has the position of the first difference, or the losses of a
prompt that has not changed.
"""

from typing import Any

import msgspec

from kvmesh.bus.messages import CacheAccount, PromptChange
from kvmesh.frontend.dispatch.task import DispatchState
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.frontend.generation.accounts import loss_object, prompt_account
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest

TYPES = {
    "system": "system_changed",
    "tool": "tools_changed",
    **dict.fromkeys(("message", "thinking", "call"), "messages_changed"),
}


def diagnostics(
    prepared: PreparedRequest, stream: TokenStream, dispatch: DispatchState
) -> dict[str, Any] | None:
    """The `diagnostics` of a response; None if they are not asked for, or nothing was lost.

    A reason of None means that the earlier request is still being looked up.
    """
    previous, tokens = prepared.request.previous_message, prepared.prompts[0].count
    if not previous:
        return None
    compared = prepared.comparison
    if compared is None and prepared.comparing:
        return {"cache_miss_reason": None}
    if compared is None or compared.request != previous:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    missed = min(compared.length, tokens) - compared.common
    if prepared.earlier_model not in (None, prepared.model.card.name):
        return _reason("model_changed", missed + compared.common)
    if compared.change is not None:
        size = prepared.model.card.block_size
        return _reason(_type(compared.change), missed, **_position(compared.change, size))
    account = prompt_account(prepared, stream, dispatch)
    return None if account is None else _losses(account)


def _losses(account: CacheAccount) -> dict[str, Any] | None:
    if not account.losses:
        return None
    losses = [loss_object(loss) for loss in account.losses]
    return _reason("unavailable", account.lost, losses=losses)


def _reason(kind: str, missed: int, **facts: Any) -> dict[str, Any]:
    return {"cache_miss_reason": {"type": kind, "cache_missed_input_tokens": missed, **facts}}


def _type(change: PromptChange) -> str:
    return TYPES.get(change.part, "unavailable")


def _position(change: PromptChange, block_size: int) -> dict[str, Any]:
    position: dict[str, Any] = msgspec.to_builtins(change)
    return {**position, "block": change.token // block_size}
