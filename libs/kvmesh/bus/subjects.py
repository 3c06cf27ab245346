"""Every subject, stream, bucket and consumer name of the mesh, built in this one place."""

import re
from dataclasses import dataclass
from functools import lru_cache

ROOT = "kvm"  # the first token of every subject
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
PLACED = frozenset(
    ("work", "out", "ctl", "dump", "ping", "kvbm", "load")
)  # they end with an instance
_ESCAPED = re.compile(r"=([0-9A-F]{2})")


@lru_cache(4096)
def token(text: str) -> str:
    """`text` as one subject token: bytes outside [A-Za-z0-9_-] become `=XX`."""
    return _UNSAFE.sub(lambda m: "".join(f"={b:02X}" for b in m[0].encode()), text)


def untoken(subject_token: str) -> str:
    """The text that `token` encoded."""
    return re.sub(r"(?:=[0-9A-F]{2})+", lambda m: _unescape(m[0]), subject_token)


@lru_cache(4096)
def place(instance: str) -> tuple[str, ...]:
    """An instance id as subject tokens: the name of its process, then this life of it.

    A server's permissions go by whole tokens: so may one process be told from others.
    """
    name, _, life = instance.rpartition("-")
    return (token(name), token(life)) if name and life else (token(instance),)


def name_of(instance: str) -> str:
    """The name of the process that an instance id is a life of; itself if it names no life."""
    name, _, life = instance.rpartition("-")
    return name if name and life else instance


def _unescape(run: str) -> str:
    return bytes(int(h, 16) for h in _ESCAPED.findall(run)).decode(errors="replace")


@dataclass(frozen=True)
class Subjects:
    """Names within one mesh, whose namespace is one subject token."""

    namespace: str = "kvmesh"

    def _of(self, *tokens: str) -> str:
        return ".".join((ROOT, self.namespace, *tokens))

    # JetStream streams and what they capture

    @property
    def kv_stream(self) -> str:
        return f"kvm-{self.namespace}-kv"

    @property
    def route_stream(self) -> str:
        return f"kvm-{self.namespace}-route"

    @property
    def seq_stream(self) -> str:
        return f"kvm-{self.namespace}-seq"

    def owns(self, stream: str | None) -> bool:
        """Whether a stream is this mesh's, or holds one of its buckets."""
        name = (stream or "").removeprefix("KV_").removeprefix("OBJ_")
        kind = name.removeprefix(f"kvm-{self.namespace}-")
        return kind != name and "-" not in kind  # another mesh's name may begin with this one's

    def kv(self, model: str, worker: str) -> str:
        return self._of("kv", token(model), token(worker))

    @property
    def kv_all(self) -> str:
        return self._of("kv", ">")

    def route(self, model: str) -> str:
        return self._of("route", token(model))

    @property
    def route_all(self) -> str:
        return self._of("route", ">")

    def seq(self, model: str) -> str:
        return self._of("seq", token(model))

    @property
    def seq_all(self) -> str:
        return self._of("seq", ">")

    # buckets

    @property
    def index_bucket(self) -> str:
        return f"kvm-{self.namespace}-index"

    @property
    def model_bucket(self) -> str:
        return f"kvm-{self.namespace}-models"

    @property
    def responses_bucket(self) -> str:
        return f"kvm-{self.namespace}-responses"

    @property
    def pins_bucket(self) -> str:
        return f"kvm-{self.namespace}-pins"

    @property
    def keys_bucket(self) -> str:
        return f"kvm-{self.namespace}-keys"

    @property
    def secrets_bucket(self) -> str:
        """The bucket of secrets that frontends alone may read."""
        return f"kvm-{self.namespace}-secrets"

    @property
    def tenants_key(self) -> str:
        """Key, in the secrets bucket, of the secret under which tenants are told apart."""
        return "tenants"

    @property
    def instances_bucket(self) -> str:
        return f"kvm-{self.namespace}-instances"

    @property
    def router_bucket(self) -> str:
        return f"kvm-{self.namespace}-router"

    @property
    def kvbm_bucket(self) -> str:
        return f"kvm-{self.namespace}-kvbm"

    @property
    def identity_key(self) -> str:
        """Key, in the kvbm bucket, of the secret under which blocks are named in shared tiers."""
        return "identity"

    def lease_key(self, role: str, instance: str) -> str:
        """Key of a process's lease in the instances bucket."""
        return ".".join((role, *place(instance)))

    def busy_key(self, model: str) -> str:
        """Key of a model's busy thresholds in the router bucket."""
        return f"busy.{token(model)}"

    def bandit_key(self, model: str, router: str) -> str:
        """Key of what one router has learned about a model, in the router bucket."""
        return f"bandit.{token(model)}.{token(router)}"

    # request/reply in queue groups

    def index(self, model: str) -> str:
        return self._of("index", token(model))

    @property
    def index_all(self) -> str:
        return self._of("index", "*")

    def index_at(self, instance: str) -> str:
        """One indexer, whatever the model."""
        return self._of("indexer", *place(instance))

    def index_part_at(self, instance: str) -> str:
        """One indexer, about its own shard alone."""
        return self._of("indexer", *place(instance), "part")

    def index_shard(self, model: str, shard: str) -> str:
        """One shard of a divided index; `shard` names the division as well as the part."""
        return self._of("index", token(model), token(shard))

    def index_shard_all(self, shard: str) -> str:
        return self._of("index", "*", token(shard))

    def router(self, model: str) -> str:
        return self._of("router", token(model))

    def router_at(self, model: str, instance: str) -> str:
        """One router, which says at once that it has the question."""
        return self._of("router", token(model), *place(instance))

    @property
    def sessions(self) -> str:
        """What frontends ask one another about sessions."""
        return self._of("sessions")

    @property
    def limits(self) -> str:
        """Frontends tell one another here how much of their limits API keys have used."""
        return self._of("limits")

    # one process each

    def work(self, instance: str) -> str:
        return self._of("work", *place(instance))

    def out(self, frontend: str) -> str:
        return self._of("out", *place(frontend))

    def ctl(self, instance: str) -> str:
        return self._of("ctl", *place(instance))

    def dump(self, instance: str) -> str:
        """What do you hold? No command, since indexers ask it and command nothing."""
        return self._of("dump", *place(instance))

    def kvbm(self, instance: str) -> str:
        """What the workers of a node ask of its kvbm."""
        return self._of("kvbm", *place(instance))

    def computing(self, model: str) -> str:
        """What the kvbms of all nodes tell each other that their workers compute."""
        return self._of("computing", token(model))

    def computing_before(self, instance: str) -> str:
        """What the others tell one kvbm of what began before it could hear of it."""
        return self._of("computing", "before", *place(instance))

    def ping(self, instance: str) -> str:
        """Are you there? No command, so that others than those who command may ask."""
        return self._of("ping", *place(instance))

    def load(self, instance: str) -> str:
        return self._of("load", *place(instance))

    @property
    def load_all(self) -> str:
        return self._of("load", ">")

    @property
    def everything(self) -> str:
        return self._of(">")

    def expand(self, pattern: str) -> str:
        """A user's short pattern (`kv.>`, `route.*`) within this namespace; full ones unchanged."""
        return pattern if pattern.startswith("kvm.") else self._of(pattern)

    def parse(self, subject: str) -> tuple[str, tuple[str, ...]]:
        """The kind of a subject of this mesh (`kv`, `route`, …) and the names after it."""
        kind, *names = subject.split(".")[2:]
        found = tuple(untoken(name) for name in names)
        return kind, ("-".join(found),) if kind in PLACED else found
