"""The models that the mesh serves, as this frontend knows them from the workers' cards."""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from tokenizers import Tokenizer

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import Instance, ModelCard, Role, encode
from kvmesh.bus.models import fetch_model
from kvmesh.frontend.detokenize import DetokenizerFactory, TokenTexts
from kvmesh.frontend.dialects.errors import DialectError
from kvmesh.frontend.dialects.output import choose
from kvmesh.frontend.dialects.template import ChatTemplate
from kvmesh.frontend.encode import TextEncoder
from kvmesh.frontend.errors import ModelNotFound, Unavailable
from kvmesh.frontend.metrics import ModelMetrics

log = logging.getLogger(__name__)
RETRY_S = 2.0
Spawn = Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]]


class Dialect:
    """How one model reads and writes, made from its files (slow: call off the loop).

    Raises DialectError if the card names a parser that there is not.
    """

    def __init__(self, card: ModelCard, files: dict[str, bytes]) -> None:
        self.tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.encoder = TextEncoder(self.tokenizer)
        self.template = ChatTemplate(files)
        self.end_ids = end_token_ids(files, self.tokenizer)
        self.grammar = choose(
            card.name,
            self.template,
            tool_parser=card.tool_parser,
            reasoning_parser=card.reasoning_parser,
        )
        self.token_texts = TokenTexts(self.tokenizer)
        self.detokenizers = DetokenizerFactory(
            self.tokenizer, files["tokenizer.json"], self._hidden()
        )

    def _hidden(self) -> frozenset[int]:
        """Ids that never show: special tokens, unless the output parser reads them."""
        added = self.tokenizer.get_added_tokens_decoder()
        special = {i for i, t in added.items() if t.special} | self.end_ids
        shown = {i for i, t in added.items() if self.grammar.shows(t.content)}
        return frozenset(special - shown)


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _TokenizerConfig(msgspec.Struct):
    eos_token: str | dict[str, Any] | None = None


def end_token_ids(files: dict[str, bytes], tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end a turn, from every file that names some."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if name in files:
            found = msgspec.json.decode(files[name], type=_GenerationConfig).eos_token_id
            ids.update([found] if isinstance(found, int) else found or [])
    if "tokenizer_config.json" in files:
        config = msgspec.json.decode(files["tokenizer_config.json"], type=_TokenizerConfig)
        text = config.eos_token
        text = text.get("content") if isinstance(text, dict) else text
        token_id = tokenizer.token_to_id(text) if text else None
        ids.update([] if token_id is None else [token_id])
    return frozenset(ids)


@dataclass
class ServedModel:
    """One model name. It stays known while no worker lives, so that clients see 503, not 404."""

    card: ModelCard
    dialect: Dialect
    created: int
    workers: set[str] = field(default_factory=set)
    metrics: ModelMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = ModelMetrics(self.card.name)

    @property
    def created_at(self) -> str:
        return datetime.fromtimestamp(self.created, UTC).isoformat()


class ModelRegistry:
    """Follows the cards of workers, and loads each model once per card."""

    def __init__(self, bus: Bus, spawn: Spawn) -> None:
        self._bus = bus
        self._spawn = spawn
        self._cards: dict[str, Instance] = {}
        self._dialects: dict[bytes, Dialect] = {}
        self._loading: dict[bytes, asyncio.Task[Any]] = {}
        self._models: dict[str, ServedModel] = {}
        self._adapters: dict[str, str] = {}

    @property
    def models(self) -> list[ServedModel]:
        """Those that a live worker serves."""
        return [model for model in self._models.values() if model.workers]

    async def settle(self, timeout: float) -> None:
        """Return once the models known by now are loaded or given up, or after `timeout` s."""
        if self._loading:
            await asyncio.wait(self._loading.values(), timeout=timeout)

    def resolve(self, name: str) -> tuple[ServedModel, str | None]:
        """The model and adapter called `name`; ModelNotFound, or Unavailable while it loads."""
        model = self._models.get(name)
        if model is not None:
            return model, None
        base = self._adapters.get(name)
        if base is not None and base in self._models:
            return self._models[base], name
        if any(card.model and card.model.name == name for card in self._cards.values()):
            raise Unavailable(f"The model `{name}` is still being loaded.")
        raise ModelNotFound(name)

    def joined(self, card: Instance) -> None:
        if card.role is not Role.WORKER or card.model is None:
            return
        self._cards[card.instance] = card
        key = _key(card.model)
        if key in self._dialects:
            self._admit(card, card.model)
        elif key not in self._loading:
            self._loading[key] = self._spawn(
                self._load(card.model), f"load model {card.model.name}"
            )

    def left(self, card: Instance) -> None:
        self._cards.pop(card.instance, None)
        for model in self._models.values():
            model.workers.discard(card.instance)
        self._forget()

    def _forget(self) -> None:
        """Drop dialects of cards that nobody has any more; a model's last one stays with it."""
        used = {_key(c.model) for c in self._cards.values() if c.model is not None}
        used.update(_key(model.card) for model in self._models.values())
        for key in self._dialects.keys() - used:
            del self._dialects[key]

    def _admit(self, card: Instance, model: ModelCard) -> None:
        known = self._models.get(model.name)
        if known is None or known.card != model:
            workers = known.workers if known else set()
            created = known.created if known else int(time.time())
            dialect = self._dialects[_key(model)]
            self._models[model.name] = ServedModel(model, dialect, created, workers)
        self._models[model.name].workers.add(card.instance)
        self._adapters.update(dict.fromkeys(model.adapters, model.name))

    async def _load(self, model: ModelCard) -> None:
        key = _key(model)
        while any(card.model and _key(card.model) == key for card in self._cards.values()):
            try:
                files = await fetch_model(self._bus, model.files)
                self._dialects[key] = await asyncio.to_thread(Dialect, model, files)
                # a vocabulary lives as long as the process: the collector need not walk it
                gc.freeze()
                break
            except (BusError, TimeoutError) as error:
                log.warning("cannot fetch the files of %s, retrying: %s", model.name, error)
                await asyncio.sleep(RETRY_S)
            except DialectError as error:
                log.error("cannot serve %s: %s", model.name, error)
                break
            except Exception:
                # tokenizers raises plain Exception on a bad file; the model stays unknown
                log.exception("the files of %s are unusable", model.name)
                break
        self._loading.pop(key, None)
        for card in list(self._cards.values()):
            if card.model is not None and _key(card.model) in self._dialects:
                self._admit(card, card.model)


def _key(card: ModelCard) -> bytes:
    """Equal cards share one dialect."""
    return encode(card)
