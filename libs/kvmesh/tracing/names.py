"""Names and meanings of all spans and attributes, and the names in OpenTelemetry's conventions.

Spans carry the keys of this table. The GenAI conventions are unstable, so their names replace these
keys at export only where the operator opts in (`OTEL_SEMCONV_STABILITY_OPT_IN`).
"""

from typing import NamedTuple

from kvmesh.bus.messages import StartPhase

OPT_IN = "gen_ai_latest_experimental"
PROVIDER = "gen_ai.provider.name"


class SpanName(NamedTuple):
    """A span, the process that records it, and its extent."""

    name: str
    process: str
    meaning: str


class Attribute(NamedTuple):
    """An attribute; `convention` is its name in the GenAI conventions, empty if they have none."""

    key: str
    meaning: str
    convention: str = ""


SPANS: list[SpanName] = []


def _span(name: str, process: str, meaning: str) -> str:
    """Add a span to `SPANS`; returns its name."""
    SPANS.append(SpanName(name, process, meaning))
    return name


REQUEST = _span("request", "frontend", "one call of an API, from its arrival to the last byte")
RECEIVE = _span("receive", "frontend", "read and parse the body")
RENDER = _span("render", "frontend", "render the chat template")
TOKENIZE = _span("tokenize", "frontend", "tokenize the prompt and hash its blocks")
ROUTE = _span("route", "frontend", "query a router until it places or refuses the sequence")
REMOTE_PREFILL = _span("remote_prefill", "frontend", "have a prefill worker compute the prompt")
ATTEMPT = _span(
    "attempt", "frontend", "one sequence on one worker, from the offer to the end of the attempt"
)
OFFER = _span("offer", "frontend", "offer the sequence to a worker, until it replies")
MIGRATION = _span(
    "migration", "frontend", "from the loss of a worker until another one has accepted"
)
STORE_RESPONSE = _span("store_response", "frontend", "store the response for later requests")
SPECULATIVE_PREFILL = _span(
    "speculative_prefill",
    "frontend",
    "predict the next prompt and have it computed; the root of a trace linked to the request's",
)
PLACE = _span("place", "router", "one routing request, until the reply")
INDEX = _span("index", "router", "query an indexer for the overlaps of the prompt")
QUEUE = _span("queue", "router", "wait in the queue for a rank with free capacity")
OVERLAPS = _span("overlaps", "indexer", "find the overlaps of the prompt")
ENGINE_QUEUE = _span(
    "engine_queue", "worker", "wait in the engine until its scheduler starts the sequence"
)
ENGINE_PREFILL = _span("engine_prefill", "worker", "compute the prompt, until the first token")
ENGINE_DECODE = _span("engine_decode", "worker", "generate the tokens after the first")
HANDOFF = _span("handoff", "worker", "read the prompt's KV from a prefill worker")
ONBOARD = _span("onboard", "worker", "load blocks from lower tiers into the engine")
OFFLOAD = _span("offload", "worker", "write blocks to a lower tier")
PREFETCH = _span("prefetch", "worker", "load or compute blocks before their request")
KVBM_FETCH = _span("kvbm_fetch", "kvbm", "find blocks in the tiers of the node and load them")
KVBM_OFFER = _span("kvbm_offer", "kvbm", "choose the offered blocks to store")
KVBM_PREPARE = _span("kvbm_prepare", "kvbm", "load blocks for the kvbm of another node")
KVBM_LEND = _span("kvbm_lend", "kvbm", "lend blocks to the kvbm of another node")
START = _span(
    "start", "worker", "a start, from the creation of the process until routers see the worker"
)
_PHASES = {
    StartPhase.PROCESS: "from the creation of the process to the first line of its program",
    StartPhase.IMPORTS: "import packages, in the processes of the engine as well",
    StartPhase.CONFIGURATION: "read the model folder, and prepare the arguments of the engine",
    StartPhase.PARKED: "wait to be promoted, with nothing left to do that needs no device",
    StartPhase.WEIGHTS: "load the weights",
    StartPhase.POST_PROCESSING: "bring the weights into the form that kernels read",
    StartPhase.KV_ALLOCATION: "allocate the KV blocks",
    StartPhase.COMPILE: "compile, or load what was compiled before",
    StartPhase.WARM_UP: "run the model to measure memory, to capture graphs or to warm up",
    StartPhase.ENGINE: "what else the start of the engine takes",
    StartPhase.REGISTRATION: "connect to NATS, publish the model's files, join the mesh",
    StartPhase.ROUTABLE: "from the lease until other processes can read it",
}


def start_span(phase: str) -> str:
    """The name of the span of a `StartPhase`."""
    return f"start_{phase}".lower().replace("-", "_").replace(" ", "_")


FIRST_TOKEN = "first_token"  # an event of an attempt

SPANS += [SpanName(start_span(phase), "worker", text) for phase, text in _PHASES.items()]

ATTRIBUTES: list[Attribute] = []


def _attribute(key: str, meaning: str, convention: str = "") -> str:
    """Add an attribute to `ATTRIBUTES`; returns its key."""
    ATTRIBUTES.append(Attribute(key, meaning, convention))
    return key


OPERATION = _attribute(
    "kvmesh.operation",
    "the API: chat, text_completion, messages, responses",
    "gen_ai.operation.name",
)
MODEL = _attribute("kvmesh.model", "the model, or the adapter", "gen_ai.request.model")
STREAM = _attribute("kvmesh.stream", "true if the response streams", "gen_ai.request.stream")
MAX_TOKENS = _attribute(
    "kvmesh.max_tokens", "bound of the output, in tokens", "gen_ai.request.max_tokens"
)
CHOICES = _attribute("kvmesh.choices", "sequences of the request", "gen_ai.request.choice.count")
SESSION = _attribute("kvmesh.session", "the session", "gen_ai.conversation.id")
PROMPT_TOKENS = _attribute(
    "kvmesh.prompt_tokens", "tokens of all prompts", "gen_ai.usage.input_tokens"
)
CACHED_TOKENS = _attribute(
    "kvmesh.cached_tokens",
    "prompt tokens that were not computed",
    "gen_ai.usage.cache_read.input_tokens",
)
OUTPUT_TOKENS = _attribute("kvmesh.output_tokens", "tokens generated", "gen_ai.usage.output_tokens")
NEW_TOKENS = _attribute("kvmesh.new_tokens", "prompt tokens that were never computed before")
POSSIBLE_TOKENS = _attribute(
    "kvmesh.possible_tokens", "prompt tokens that an endless cache would have held"
)
LOST_TOKENS = _attribute("kvmesh.lost_tokens", "prompt tokens that were computed again")
LOSSES = _attribute("kvmesh.losses", "their reasons, each with its tokens: `evicted=512`")
PROMPT_CHANGE = _attribute(
    "kvmesh.prompt_change", "the part of the prompt that differs from the session's last one"
)
FINISH_REASONS = _attribute(
    "kvmesh.finish_reasons", "the end of each sequence", "gen_ai.response.finish_reasons"
)
TTFT_S = _attribute(
    "kvmesh.ttft_s",
    "seconds from arrival to the first token",
    "gen_ai.response.time_to_first_chunk",
)
REQUEST_ID = _attribute(
    "kvmesh.request", "the request's id, as in errors, logs and `kvmesh explain`"
)
CHOICE = _attribute("kvmesh.choice", "the number of the sequence in its request, from 0")
ATTEMPT_ID = _attribute("kvmesh.attempt", "the id of the attempt, as on the bus")
INSTANCE = _attribute(
    "kvmesh.instance", "the instance that was chosen, queried or offered work, or that starts"
)
RANK = _attribute("kvmesh.rank", "its data-parallel rank")
STATUS = _attribute("kvmesh.status", "the result: a reply's status, or the end of an attempt")
POLICY = _attribute("kvmesh.policy", "the routing policy")
OVERLAP = _attribute("kvmesh.overlap", "overlap of the chosen rank, in blocks by tier")
ELIGIBLE = _attribute("kvmesh.eligible", "ranks among which the policy chose")
BLOCKS = _attribute("kvmesh.blocks", "blocks found, moved or wanted")
TIERS = _attribute("kvmesh.tiers", "blocks or tokens by the tier that they came from")
TENANT = _attribute("kvmesh.tenant", "the tenant's tag")
ENGINE = _attribute("kvmesh.engine", "the engine of a worker that starts")
METHOD = _attribute("http.request.method", "HTTP method (a stable convention)")
HTTP_ROUTE = _attribute("http.route", "path of the endpoint (a stable convention)")
HTTP_STATUS = _attribute(
    "http.response.status_code", "status of the response (a stable convention)"
)
ERROR = _attribute(
    "error.type", "code of the error, set with the status *error* (a stable convention)"
)
CONVENTIONS = {a.key: a.convention for a in ATTRIBUTES if a.convention}


def opted_in(variable: str) -> bool:
    """True if the value of `OTEL_SEMCONV_STABILITY_OPT_IN` selects the GenAI conventions."""
    return OPT_IN in (part.strip() for part in variable.split(","))
