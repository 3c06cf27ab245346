"""The conversation, and the stored items, that a request continues or refers to."""

from kvmesh.frontend.apis.base import ConversationThread
from kvmesh.frontend.apis.turns.bodies import LIGHT_BYTES
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.fair_threads import FairThreads
from kvmesh.frontend.http.bodies import LARGE
from kvmesh.frontend.http.responses.conversations import ConversationStore
from kvmesh.frontend.http.responses.store import MAX_HISTORY, ResponseNotFound, ResponseStore

PREVIOUS = "previous_response_id"


class StoredHistory:
    """Completes requests from the store of responses."""

    def __init__(self, store: ResponseStore, threads: FairThreads) -> None:
        self._store = store
        self._threads = threads
        self.conversations = ConversationStore(store)

    async def prepend(self, request: GenerateRequest, thread: ConversationThread | None) -> None:
        """Prepend the conversation that `request` continues, and resolve its references.

        Raises ResponseNotFound, ConversationNotFound, InvalidRequest or Unavailable.
        """
        if thread is None:
            return
        tenant, turns, kept = request.cache_salt, [], thread.kept
        if kept is not None and kept.tenant != tenant:
            raise ResponseNotFound(thread.previous or "", PREVIOUS)
        if thread.conversation is not None:
            found = await self.conversations.get(thread.conversation, tenant, "conversation")
            turns = [found.turn]
        elif kept is None and thread.previous is not None:
            turns = await self._store.history(thread.previous, tenant)
        referenced = thread.referenced(turns)
        if not turns and not referenced and kept is None:
            return
        outputs = await self._store.items(referenced, tenant) if referenced else {}
        items = [item for turn in turns for item in (*turn.input, *turn.output)]
        items += [item for output in outputs.values() for item in output]
        earlier = sum(map(len, items)) + (kept.size if kept is not None else 0)
        if earlier > MAX_HISTORY:
            raise InvalidRequest(f"The conversation is larger than {MAX_HISTORY} bytes.", PREVIOUS)
        request.body_bytes += earlier
        request.light = not items and request.light and request.body_bytes < LIGHT_BYTES
        if request.light or request.body_bytes < LARGE:
            thread.extend(turns, outputs)
        else:
            await self._threads.call(request.owner, lambda: thread.extend(turns, outputs))
