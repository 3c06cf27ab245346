"""Every subject, stream, bucket and key of the mesh."""

import re
from functools import lru_cache

ROOT = "kvm"  # the first token of every subject
API = "$JS.API"  # of the server's own JetStream domain
KEYS = "$KV."  # the first token of the subjects of buckets' keys
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
# kinds of subjects that end with an instance
INSTANCE_KINDS = frozenset(
    ("work", "out", "ctl", "returns", "adapters", "dump", "ping", "kvbm", "load", "starting")
)
FAILED = "=failed"  # in the place of an instance's suffix; no instance has it
MAX_SESSION_TOKEN = 512  # characters: a server bounds the length of subjects
_ESCAPED = re.compile(r"=([0-9A-F]{2})")


@lru_cache(4096)
def token(text: str) -> str:
    """`text` as one subject token: bytes outside [A-Za-z0-9_-] become `=XX`."""
    return _UNSAFE.sub(lambda m: "".join(f"={b:02X}" for b in m[0].encode()), text)


@lru_cache(4096)
def untoken(subject_token: str) -> str:
    """The text that `token` encoded."""
    return re.sub(r"(?:=[0-9A-F]{2})+", lambda m: _unescape(m[0]), subject_token)


@lru_cache(4096)
def instance_tokens(instance: str) -> tuple[str, ...]:
    """An instance id as subject tokens: the process's name, then the suffix of this instance.

    A server's permissions match whole tokens, so they can single out one process.
    """
    name, _, suffix = instance.rpartition("-")
    return (token(name), token(suffix)) if name and suffix else (token(instance),)


def name_of(instance: str) -> str:
    """The name of an instance's process; the id itself if it has no suffix."""
    name, _, suffix = instance.rpartition("-")
    return name if name and suffix else instance


def manifest_object(digest: str) -> str:
    """The name, in the model bucket, of the manifest of a copy of weights."""
    return f"weights-{digest}"


def api_of(domain: str) -> str:
    """The prefix of the JetStream API of a domain; empty: the server's own."""
    return f"$JS.{domain}.API" if domain else API


def stored_on(bucket: str, key: str) -> str:
    """The subject on which a bucket has a key, or with a pattern several."""
    return f"{KEYS}{bucket}.{key}"


def through(api: str, subject: str) -> str:
    """`subject` as a process uses it that reaches JetStream under the prefix `api`.

    Leaf nodes keep the keys of buckets to their own domain; the API's prefix leads to another.
    """
    if api != API and subject.startswith(KEYS):
        return f"{api}.{subject}"
    return f"{api}{subject.removeprefix(API)}" if subject.startswith(f"{API}.") else subject


def _unescape(run: str) -> str:
    return bytes(int(h, 16) for h in _ESCAPED.findall(run)).decode(errors="replace")


@lru_cache(4096)
def _of_instance(namespace: str, kind: str, instance: str) -> str:
    return ".".join((ROOT, namespace, kind, *instance_tokens(instance)))


class Subjects:
    """Names within one mesh, whose namespace is one subject token."""

    def __init__(self, namespace: str = "kvmesh") -> None:
        self.namespace = namespace
        of, stored = self._of, f"kvm-{namespace}-"
        # JetStream streams, and what they capture
        self.kv_stream = f"{stored}kv"
        self.route_stream = f"{stored}route"
        self.seq_stream = f"{stored}seq"
        self.scaling_stream = f"{stored}scaling"
        self.kv_all = of("kv", ">")
        self.route_all = of("route", ">")
        self.seq_all = of("seq", ">")
        self.scaling_all = of("scaling", ">")
        # buckets
        self.answers_bucket = f"{stored}answers"
        self.batches_bucket = f"{stored}batches"  # of batches, and of the descriptions of files
        self.catalog_bucket = f"{stored}catalog"  # of the models that the model store holds
        self.files_bucket = f"{stored}files"  # objects: the requests of batches, and their results
        self.index_bucket = f"{stored}index"
        self.instances_bucket = f"{stored}instances"
        self.keys_bucket = f"{stored}keys"
        self.kvbm_bucket = f"{stored}kvbm"
        self.model_bucket = f"{stored}models"
        self.model_store_bucket = f"{stored}modelstore"  # objects: manifests, chunks by digest
        self.pins_bucket = f"{stored}pins"
        self.plan_bucket = f"{stored}plan"  # the wanted fleet, and the answers of operators
        self.responses_bucket = f"{stored}responses"
        self.router_bucket = f"{stored}router"
        self.secrets_bucket = f"{stored}secrets"  # which only frontends may read
        self.weights_bucket = f"{stored}weights"  # the key that authenticates manifests of weights
        # keys in the bucket of the planner
        self.desired_key = "desired"  # the wanted fleet
        self.plan_settings_key = "settings"  # the planner's settings that were set at run time
        self.replaced_key = "replaced"  # the report about the latest order
        self.replacement_key = "replacement"  # the latest order to replace a process
        self.report_key = "report"  # the latest report of the operator
        # keys of secrets
        self.identity_key = "identity"  # in the kvbm bucket: keys block digests in shared tiers
        self.manifests_key = "manifests"  # in the weights bucket: authenticates manifests
        self.tenants_key = "tenants"  # in the secrets bucket: salts tenants' names
        # subjects without a name of their own
        self.index_all = of("index", "*")
        self.sessions = of("sessions")  # session queries between frontends
        self.limits = of("limits")  # use of API keys' limits, published between frontends
        self.traces = of("traces")  # unsampled traces that are kept, published by frontends
        self.wake_all = of("wake", "*")
        self.tool_all = of("tool", "*")
        self.load_all = of("load", ">")
        self.starting_all = of("starting", ">")
        self.everything = of(">")

    def _of(self, *tokens: str) -> str:
        return ".".join((ROOT, self.namespace, *tokens))

    def owns(self, stream: str | None) -> bool:
        """True if a stream belongs to this mesh, directly or as one of its buckets."""
        name = (stream or "").removeprefix("KV_").removeprefix("OBJ_")
        kind = name.removeprefix(f"kvm-{self.namespace}-")
        return kind != name and "-" not in kind  # another namespace may have this one as its prefix

    def kv(self, model: str, worker: str) -> str:
        return self._of("kv", token(model), token(worker))

    def route(self, model: str) -> str:
        return self._of("route", token(model))

    def seq(self, model: str) -> str:
        return self._of("seq", token(model))

    def scaling(self, model: str) -> str:
        """Decisions of the planner about one model."""
        return self._of("scaling", token(model))

    # keys of buckets

    def catalog_key(self, model: str, digest: str) -> str:
        """Key, in the catalog bucket, of one revision of a model."""
        return f"{token(model)}.{token(digest)}"

    def roll_key(self, service: str) -> str:
        """Key, in the plan bucket, of the latest roll of a service."""
        return f"roll.{token(service)}"

    def alias_key(self, name: str) -> str:
        """Key, in the plan bucket, of an alias of models."""
        return f"alias.{token(name)}"

    def idle_key(self, model: str) -> str:
        """Key, in the plan bucket, of a model that may run without workers."""
        return f"idle.{token(model)}"

    def lease_key(self, role: str, instance: str) -> str:
        """Key of a process's lease in the instances bucket."""
        return ".".join((role, *instance_tokens(instance)))

    def failed_start_key(self, name: str) -> str:
        """Key, in the instances bucket, of the latest failed start of the worker of that name."""
        return ".".join(("worker", token(name), FAILED))

    def busy_key(self, model: str) -> str:
        """Key of a model's busy thresholds in the router bucket."""
        return f"busy.{token(model)}"

    def config_key(self, section: str) -> str:
        """Key of the changed settings of a section, in the bucket of `config_bucket`."""
        return f"config.{section}"

    def config_bucket(self, section: str) -> str:
        """The bucket of changed settings: one that the section's service reads anyway."""
        return self.router_bucket if section == "router" else self.plan_bucket

    # request/reply in queue groups

    def index(self, model: str) -> str:
        return self._of("index", token(model))

    def index_at(self, instance: str) -> str:
        """Queries to one indexer, for every model."""
        return _of_instance(self.namespace, "indexer", instance)

    def index_part_at(self, instance: str) -> str:
        """Queries to one indexer about its own shard only."""
        return self._of("indexer", *instance_tokens(instance), "part")

    def index_shard(self, model: str, shard: str) -> str:
        """One shard of a sharded index; `shard` names the shard count as well as the shard."""
        return self._of("index", token(model), token(shard))

    def index_shard_all(self, shard: str) -> str:
        return self._of("index", "*", token(shard))

    def router(self, model: str) -> str:
        return self._of("router", token(model))

    def router_at(self, model: str, instance: str) -> str:
        """Requests to one router, which acknowledges at once."""
        return self._of("router", token(model), *instance_tokens(instance))

    def weights(self, digest: str) -> str:
        """Queries for sources of a copy of weights, heard by all workers that have chunks of it."""
        return self._of("weights", token(digest))

    def wake(self, model: str) -> str:
        """Requests of an idle model that wait for a worker, published by frontends."""
        return self._of("wake", token(model))

    def tool(self, session: str) -> str:
        """Reports of harnesses on the tools of a session; a long name is cut."""
        return self._of("tool", token(session)[:MAX_SESSION_TOKEN])

    # one process each

    def work(self, instance: str) -> str:
        return _of_instance(self.namespace, "work", instance)

    def out(self, frontend: str) -> str:
        return _of_instance(self.namespace, "out", frontend)

    def ctl(self, instance: str) -> str:
        return _of_instance(self.namespace, "ctl", instance)

    def returns(self, instance: str) -> str:
        """Forecasts of returns. Not control commands: routers may send no commands."""
        return _of_instance(self.namespace, "returns", instance)

    def adapters(self, instance: str) -> str:
        """Adapters that routers want loaded. Not control commands, as those of `returns`."""
        return _of_instance(self.namespace, "adapters", instance)

    def ask(self, instance: str) -> str:
        """Questions of operators. Not control commands: those hold prompts, which few may hear."""
        return _of_instance(self.namespace, "ask", instance)

    def dump(self, instance: str) -> str:
        """Requests for a dump. Not a control command: indexers may send no commands."""
        return _of_instance(self.namespace, "dump", instance)

    def kvbm(self, instance: str) -> str:
        """Requests of a node's workers to its kvbm."""
        return _of_instance(self.namespace, "kvbm", instance)

    def computing(self, model: str) -> str:
        """Compute claims, published between the kvbms of all nodes."""
        return self._of("computing", token(model))

    def computing_before(self, instance: str) -> str:
        """Compute claims older than one kvbm's subscription, sent to that kvbm."""
        return self._of("computing", "before", *instance_tokens(instance))

    def ping(self, instance: str) -> str:
        """Pings. Not a control command: roles without commands may send it."""
        return _of_instance(self.namespace, "ping", instance)

    def load(self, instance: str) -> str:
        return _of_instance(self.namespace, "load", instance)

    def starting(self, instance: str) -> str:
        """Phases of a worker that starts."""
        return _of_instance(self.namespace, "starting", instance)

    def expand(self, pattern: str) -> str:
        """A short pattern (`kv.>`, `route.*`) within this namespace; full patterns unchanged."""
        return pattern if pattern.startswith("kvm.") else self._of(pattern)

    def parse(self, subject: str) -> tuple[str, tuple[str, ...]]:
        """The kind of a subject of this mesh (`kv`, `route`, …) and the names after it."""
        kind, *names = subject.split(".")[2:]
        found = tuple(untoken(name) for name in names)
        return kind, ("-".join(found),) if kind in INSTANCE_KINDS else found
