"""Registry of the served models, built from the cards of workers and of idle models."""

import asyncio
import gc
import logging
import re
import time
from array import array
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from itertools import groupby
from typing import Any

import msgspec
from msgspec.structs import replace
from tokenizers import Tokenizer

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.compatibility import Compatibility, Statements
from kvmesh.bus.discovery.settled import shown
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import (
    Instance,
    ModelAlias,
    ModelCard,
    Role,
    Settled,
    adapter_name,
    encode,
    instance_number,
)
from kvmesh.bus.storage.model_files import fetch_model
from kvmesh.frontend.aliases.choice import choose_target, main_target
from kvmesh.frontend.conversation import Generated, GenerateRequest
from kvmesh.frontend.dialects.errors import DialectError
from kvmesh.frontend.dialects.output import choose_grammar
from kvmesh.frontend.dialects.own_grammar import own_grammar
from kvmesh.frontend.dialects.templates.chat_template import ChatTemplate
from kvmesh.frontend.dialects.templates.control_tokens import LONGEST, ControlTokens
from kvmesh.frontend.dialects.templates.model_files import architectures, vocabulary
from kvmesh.frontend.errors import ModelNotFound, Unavailable, WrongTask
from kvmesh.frontend.metrics import FrontendModelMetrics, live_workers
from kvmesh.frontend.tokenizer.detokenizer import DetokenizerFactory, TokenTexts
from kvmesh.frontend.tokenizer.encoder import TextEncoder
from kvmesh.frontend.tokenizer.text_slices import alternation
from kvmesh.runtime import memory

log = logging.getLogger(__name__)
RETRY_S = 2.0
ADAPTERS = 1024
_MARKUP = re.compile(r"[<\[◁｜].*[>\]▷｜]")  # such as <think> or [ARGS]
Spawn = Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]]


class Dialect:
    """Tokenizer, chat template and output grammar of one model, made from its files.

    Slow to create: do it in a thread. Raises DialectError if the card names an unknown parser.
    """

    def __init__(self, card: ModelCard, files: dict[str, bytes]) -> None:
        self.tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        known = 1 + max(self.tokenizer.get_vocab().values(), default=-1)
        self.vocabulary = max(known, vocabulary(files))
        self.encoder = TextEncoder(self.tokenizer)
        self.template = ChatTemplate(files, self._control)
        self.end_ids = end_token_ids(files, self.tokenizer)
        self.end_tokens = frozenset(filter(None, map(self.tokenizer.id_to_token, self.end_ids)))
        self.grammar = choose_grammar(
            card.name,
            self.template,
            architectures=architectures(files),
            tool_parser=card.tool_parser,
            reasoning_parser=card.reasoning_parser,
            own=own_grammar(files),
        )
        hidden = self._hidden()
        self.token_texts = TokenTexts(self.tokenizer, hidden)
        self.detokenizers = DetokenizerFactory(self.tokenizer, files["tokenizer.json"], hidden)

    def generated(self, request: GenerateRequest, tokens: list[int]) -> Generated | None:
        """The answer to a request as it was generated; None if its beginning cannot be told."""
        ids = tokens[:-1] if tokens and tokens[-1] in self.end_ids else tokens
        opening = self.template.opening(request, date.today())
        if not ids or opening is None:
            return None
        text = self.detokenizers.decode(ids)
        return Generated(opening, text, array("I", ids).tobytes())

    def _control(self, template: str) -> ControlTokens:
        added = self.tokenizer.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]
        # other added tokens may be words, white space or HTML, which texts may contain
        written = [
            token.content
            for token in added
            if token.content in template and _MARKUP.fullmatch(token.content)
        ]
        return ControlTokens(_pattern(special), _pattern([*special, *written]), self.encoder.joins)

    def _hidden(self) -> frozenset[int]:
        """Ids without text: special tokens, except those that the output parser needs."""
        added = self.tokenizer.get_added_tokens_decoder()
        special = {i for i, t in added.items() if t.special} | self.end_ids
        shown = {i for i, t in added.items() if self.grammar.uses(t.content)}
        return frozenset(special - shown)


def _pattern(texts: list[str]) -> "re.Pattern[str] | None":
    """A pattern of all texts that a cut can break."""
    texts = [text for text in texts if 1 < len(text) <= LONGEST]
    return re.compile(alternation(texts)) if texts else None


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _TokenizerConfig(msgspec.Struct):
    eos_token: str | dict[str, Any] | None = None


def end_token_ids(files: dict[str, bytes], tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of end-of-turn tokens, from all files that name some."""
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
    """One served model. It stays registered without workers, so that clients get 503, not 404.

    `adapters` are the identities of its adapters by name. `known_adapters` includes those of
    earlier contents, whose blocks may still be cached; the last ADAPTERS of them.
    """

    card: ModelCard
    dialect: Dialect
    created: int
    workers: set[str] = field(default_factory=set)
    adapters: dict[str, str] = field(default_factory=dict)
    known_adapters: dict[str, None] = field(default_factory=dict)
    metrics: FrontendModelMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = FrontendModelMetrics(self.card.name)

    def set_adapters(self, adapters: dict[str, str]) -> None:
        """Replace the adapters, given as identities by name."""
        self.adapters = adapters
        for identity in adapters.values():
            self.known_adapters.pop(identity, None)
            self.known_adapters[identity] = None
        while len(self.known_adapters) > max(ADAPTERS, len(adapters)):
            del self.known_adapters[next(iter(self.known_adapters))]

    def check_task(self, *tasks: str) -> None:
        """Raise WrongTask unless the model's task is one of these."""
        if self.card.task not in tasks:
            raise WrongTask(self.card.name, self.card.task, tasks[0])

    @property
    def created_at(self) -> str:
        return datetime.fromtimestamp(self.created, UTC).isoformat()


class ModelRegistry:
    """Follows the cards of workers and loads the dialect of each distinct model card once.

    An idle model, which may run without workers, is served by its own card until it has some.
    """

    def __init__(self, bus: Bus, spawn: Spawn, instance: str) -> None:
        self._bus = bus
        self._statements = Statements(own=instance)
        self._spawn = spawn
        self._compatible: dict[str, Compatibility] = {}
        self._dialects: dict[bytes, Dialect] = {}
        self._unusable: set[bytes] = set()
        self._loading: dict[bytes, asyncio.Task[Any]] = {}
        self._models: dict[str, ServedModel] = {}
        self._idle: dict[str, ModelCard] = {}
        self._adapters: dict[str, str] = {}
        self.aliases: dict[str, ModelAlias] = {}
        self._changed: set[str] = set()
        self._loop = asyncio.get_running_loop()

    @property
    def models(self) -> list[ServedModel]:
        """Models with at least one live worker, and those that may run without."""
        self._refresh()
        return [m for name, m in self._models.items() if m.workers or name in self._idle]

    @property
    def template_faults(self) -> dict[str, str]:
        """One line for each served model whose chat template has a fault."""
        faults = {name: model.dialect.template.fault for name, model in self._models.items()}
        return {
            name: f"the chat template of {name} {fault}" for name, fault in faults.items() if fault
        }

    @property
    def has_idle(self) -> bool:
        """True if a listed model has no worker, and its requests wait for one."""
        return any(model.card.name in self._idle and not model.workers for model in self.models)

    def may_idle(self, model: str) -> bool:
        """True if requests of the model wait while it has no worker."""
        return model in self._idle

    def is_idle(self, model: str) -> bool:
        """True if such a model has no worker now."""
        self._refresh()
        served = self._models.get(model)
        return model in self._idle and (served is None or not served.workers)

    async def wait_loaded(self, timeout: float) -> None:
        """Wait until the models known now are loaded or unusable, at most `timeout` seconds."""
        self._refresh()
        if self._loading:
            await asyncio.wait(self._loading.values(), timeout=timeout)

    def check(self, name: str) -> None:
        """Raise as `resolve` does if the name is unknown."""
        self.resolve(name)

    def served_among(self, names: Iterable[str]) -> list[str]:
        """Those of some names that `check` knows, sorted."""
        found = []
        for name in sorted(names):
            with suppress(ModelNotFound):
                with suppress(Unavailable):  # it is loading
                    self.check(name)
                found.append(name)
        return found

    def resolve_for(
        self, request: GenerateRequest, sticky_key: Callable[[GenerateRequest], str]
    ) -> tuple[ServedModel, str | None]:
        """As `resolve`, for a request; of an alias the model that its sticky key chooses.

        It names that model as the request's target, unless another frontend has chosen one.
        """
        if not request.target:
            alias = self.aliases.get(request.model)
            if alias is None:
                return self.resolve(request.model)
            request.target = choose_target(alias, sticky_key(request), self._serves)
        return self._resolve(request.target)

    def _serves(self, name: str) -> bool:
        try:
            model, _ = self._resolve(name)
        except (ModelNotFound, Unavailable):
            return False
        return bool(model.workers) or model.card.name in self._idle

    @property
    def served_aliases(self) -> dict[str, ServedModel]:
        """By alias the model of most weight; without aliases that have no model."""
        found: dict[str, ServedModel] = {}
        for name in self.aliases:
            with suppress(ModelNotFound, Unavailable):
                found[name] = self.resolve(name)[0]
        return found

    def resolve(self, name: str) -> tuple[ServedModel, str | None]:
        """Model and adapter's identity of this name; of an alias those of its most weight.

        Raises ModelNotFound, or Unavailable while it loads.
        """
        alias = self.aliases.get(name)
        return self._resolve(name if alias is None else main_target(alias, self._serves))

    def resolve_all(self, name: str) -> list[tuple[ServedModel, str | None]]:
        """As `resolve`; of an alias all those that its sessions may have."""
        found: list[tuple[ServedModel, str | None]] = []
        for target in self.aliases[name].targets if name in self.aliases else ():
            with suppress(ModelNotFound, Unavailable):
                found.append(self._resolve(target.model))
        return found or [self.resolve(name)]

    def _resolve(self, name: str) -> tuple[ServedModel, str | None]:
        self._refresh()
        model = self._models.get(name)
        if model is not None:
            return model, None
        base = self._adapters.get(name)
        if base is not None and base in self._models:
            return self._models[base], self._models[base].adapters[name]
        if name in self._idle or (name in self._compatible and self._compatible[name].cards):
            raise Unavailable(f"The model `{name}` is still loading.")
        raise ModelNotFound(name)

    def instance_of(self, model: str, name: str) -> str:
        """The worker of the model whose instance has this name or number; else the name."""
        group = self._compatible.get(model)
        if group is None or not name.isdecimal():
            return name
        instances = (card.instance for card in group.cards)
        return next((each for each in instances if str(instance_number(each)) == name), name)

    def adopt_settled(self) -> None:
        """Take what other processes have settled, once all present cards are known."""
        for name, group in self._compatible.items():
            group.adopt(self._statements.of(name))
            self._change(name)

    def settle(self) -> list[Settled]:
        """Settle by which workers each model is served; returns the statements for this card."""
        for group in self._compatible.values():
            group.settle()
        return shown(self._compatible.values())

    def joined(self, card: Instance) -> None:
        self._statements.joined(card)
        if card.role is Role.WORKER and card.model is not None:
            self._group(card.model.name).join(card)
            self._change(card.model.name)

    def _group(self, name: str) -> Compatibility:
        if name not in self._compatible:
            self._compatible[name] = Compatibility(self._statements.of(name))
        return self._compatible[name]

    def left(self, card: Instance) -> None:
        self._statements.left(card)
        if card.model is not None and card.model.name in self._compatible:
            self._compatible[card.model.name].leave(card.instance)
            self._change(card.model.name)

    def _change(self, name: str) -> None:
        """Update a model once for all cards that come together: thousands do at a start."""
        if not self._changed:
            self._loop.call_soon(self._refresh)
        self._changed.add(name)

    def _refresh(self) -> None:
        if self._changed:
            changed, self._changed = self._changed, set()
            for name in changed:
                self._update(name)
            self._drop_unused()

    def listed(self, card: ModelCard) -> None:
        """The model of `card` may run without workers from now on."""
        self._idle[card.name] = card
        self._group(card.name)
        self._update(card.name)

    def removed(self, name: str) -> None:
        """The model may no longer run without workers."""
        if self._idle.pop(name, None) is not None:
            self._update(name)
            self._drop_unused()

    def _drop_unused(self) -> None:
        """Drop dialects that no card of a worker or idle model and no registered model uses."""
        if len(self._dialects) <= len(self._models):
            return
        cards = (card.model for group in self._compatible.values() for card in group.fitting)
        used = {_key(model) for model, _ in groupby(cards) if model is not None}
        used.update(_key(model.card) for model in self._models.values())
        used.update(map(_key, self._idle.values()))
        for key in self._dialects.keys() - used:
            del self._dialects[key]

    def _update(self, name: str) -> None:
        """Serve the model by its compatible workers, with the card that is settled.

        That is the one that was served before, as long as a worker has it, else the oldest one's.
        Without any, an idle model's own card is used. If the workers' adapters of one name differ,
        the one that was served before stays while a worker serves it; else that of the oldest
        worker is served: of those that are loaded, else of those that are offered.
        """
        workers: set[str] = set()
        adapters: dict[str, str] = {}
        offered: dict[str, str] = {}
        served = self._models[name].adapters if name in self._models else {}
        first: ModelCard | None = None
        known: ModelCard | None = None
        fitting = list(self._compatible[name].fitting)
        live_workers.labels(name).set(len(fitting))
        for card in fitting:
            # nearly all cards are equal, and a key takes longer than a comparison
            if card.model is None or (card.model != known and not self._has_dialect(card.model)):
                continue
            known = card.model
            first = first or known
            if not card.draining and card.serves != "prefill":
                workers.add(card.instance)
                own = {adapter_name(identity): identity for identity in reversed(known.adapters)}
                for adapter, identity in own.items():
                    if served.get(adapter) == identity:
                        adapters[adapter] = identity
                    else:
                        adapters.setdefault(adapter, identity)
                for files in card.adapters.files if card.adapters is not None else ():
                    offered.setdefault(adapter_name(files.adapter), files.adapter)
        idle = self._idle.get(name)
        if first is None and idle is not None and self._has_dialect(idle):
            first = idle
            for identity in idle.adapters:
                adapters.setdefault(adapter_name(identity), identity)
        adapters = {**offered, **adapters}
        if first is not None:
            self._serve(first)
        if workers or adapters:
            self._serve_adapters(self._models[name], adapters)
        if name in self._models:
            self._models[name].workers = workers

    def _has_dialect(self, model: ModelCard) -> bool:
        """True if the dialect of a card is loaded; otherwise loading starts."""
        key = _key(model)
        if key not in self._dialects and key not in self._loading and key not in self._unusable:
            self._loading[key] = self._spawn(self._load(model), f"load model {model.name}")
        return key in self._dialects

    def _serve(self, model: ModelCard) -> None:
        known = self._models.get(model.name)
        if known is None or known.card != model:
            created = known.created if known else int(time.time())
            dialect = self._dialects[_key(model)]
            served = self._models[model.name] = ServedModel(model, dialect, created)
            if known is not None:
                served.adapters, served.known_adapters = known.adapters, known.known_adapters

    def _serve_adapters(self, model: ServedModel, adapters: dict[str, str]) -> None:
        name = model.card.name
        self._adapters = {key: base for key, base in self._adapters.items() if base != name}
        self._adapters.update(dict.fromkeys(adapters, name))
        model.set_adapters(adapters)

    async def _load(self, model: ModelCard) -> None:
        key = _key(model)
        while self._is_wanted(model.name, key):
            try:
                files = await fetch_model(self._bus, model.files)
                self._dialects[key] = await asyncio.to_thread(Dialect, model, files)
                memory.give_back()
                gc.freeze()  # vocabularies are long-lived: exclude them from collections
                break
            except BusError as error:
                log.warning("cannot fetch the files of %s, retrying: %s", model.name, error)
                await asyncio.sleep(RETRY_S)
            except DialectError as error:
                log.error("cannot serve %s: %s", model.name, error)
                self._unusable.add(key)
                break
            except Exception:
                # tokenizers raises plain Exception on a bad file; the model stays unknown
                log.exception("cannot use the files of %s", model.name)
                self._unusable.add(key)
                break
        self._loading.pop(key, None)
        self._update(model.name)

    def _is_wanted(self, name: str, key: bytes) -> bool:
        """True if a card of the model has this key."""
        cards = [card.model for card in self._compatible[name].cards]
        return any(card and _key(card) == key for card in (*cards, self._idle.get(name)))


def _key(card: ModelCard) -> bytes:
    """Key of a card's dialect, which cards share that differ in their adapters only."""
    return encode(replace(card, adapters=[]))
