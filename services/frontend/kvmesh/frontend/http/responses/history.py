"""The stored conversation, and the stored items, that a request continues or refers to."""

from kvmesh.frontend.apis.base import ConversationThread
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.fair_threads import FairThreads
from kvmesh.frontend.http.bodies import LARGE
from kvmesh.frontend.http.responses.store import ResponseStore


class StoredHistory:
    """Completes requests from the store of responses."""

    def __init__(self, store: ResponseStore, threads: FairThreads) -> None:
        self._store = store
        self._threads = threads

    async def prepend(self, request: GenerateRequest, thread: ConversationThread | None) -> None:
        """Prepend the conversation that `request` continues, and resolve its references.

        Raises ResponseNotFound, InvalidRequest or Unavailable.
        """
        if thread is None:
            return
        tenant, turns = request.cache_salt, []
        if thread.previous is not None:
            turns = await self._store.history(thread.previous, tenant)
        referenced = thread.referenced(turns)
        if not turns and not referenced:
            return
        outputs = await self._store.items(referenced, tenant) if referenced else {}
        items = [item for turn in turns for item in (*turn.input, *turn.output)]
        items += [item for output in outputs.values() for item in output]
        request.body_bytes += sum(map(len, items))
        request.light = False
        if request.body_bytes < LARGE:
            thread.extend(turns, outputs)
        else:
            await self._threads.call(request.owner, lambda: thread.extend(turns, outputs))
