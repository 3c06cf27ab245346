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


REQUEST = "request"
RECEIVE = "receive"
RENDER = "render"
TOKENIZE = "tokenize"
ROUTE = "route"
ATTEMPT = "attempt"
OFFER = "offer"
REMOTE_PREFILL = "remote_prefill"
MIGRATION = "migration"
STORE_RESPONSE = "store_response"
SPECULATIVE_PREFILL = "speculative_prefill"
PLACE = "place"
INDEX = "index"
QUEUE = "queue"
OVERLAPS = "overlaps"
ENGINE_QUEUE = "engine_queue"
ENGINE_PREFILL = "engine_prefill"
ENGINE_DECODE = "engine_decode"
HANDOFF = "handoff"
ONBOARD = "onboard"
OFFLOAD = "offload"
PREFETCH = "prefetch"
KVBM_FETCH = "kvbm_fetch"
KVBM_OFFER = "kvbm_offer"
KVBM_LEND = "kvbm_lend"
KVBM_PREPARE = "kvbm_prepare"
START = "start"

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

SPANS = (
    SpanName(REQUEST, "frontend", "one call of an API, from its arrival to the last byte"),
    SpanName(RECEIVE, "frontend", "read and parse the body"),
    SpanName(RENDER, "frontend", "render the chat template"),
    SpanName(TOKENIZE, "frontend", "tokenize the prompt and hash its blocks"),
    SpanName(ROUTE, "frontend", "query a router until it places or refuses the sequence"),
    SpanName(REMOTE_PREFILL, "frontend", "have a prefill worker compute the prompt"),
    SpanName(
        ATTEMPT, "frontend", "one sequence on one worker, from the offer to the end of the attempt"
    ),
    SpanName(OFFER, "frontend", "offer the sequence to a worker, until it replies"),
    SpanName(MIGRATION, "frontend", "from the loss of a worker until another one has accepted"),
    SpanName(STORE_RESPONSE, "frontend", "store the response for later requests"),
    SpanName(
        SPECULATIVE_PREFILL,
        "frontend",
        "predict the next prompt and have it computed; the root of a trace linked to the request's",
    ),
    SpanName(PLACE, "router", "one routing request, until the reply"),
    SpanName(INDEX, "router", "query an indexer for the overlaps of the prompt"),
    SpanName(QUEUE, "router", "wait in the queue for a rank with free capacity"),
    SpanName(OVERLAPS, "indexer", "find the overlaps of the prompt"),
    SpanName(ENGINE_QUEUE, "worker", "wait in the engine until its scheduler starts the sequence"),
    SpanName(ENGINE_PREFILL, "worker", "compute the prompt, until the first token"),
    SpanName(ENGINE_DECODE, "worker", "generate the tokens after the first"),
    SpanName(HANDOFF, "worker", "read the prompt's KV from a prefill worker"),
    SpanName(ONBOARD, "worker", "load blocks from lower tiers into the engine"),
    SpanName(OFFLOAD, "worker", "write blocks to a lower tier"),
    SpanName(PREFETCH, "worker", "load or compute blocks before their request"),
    SpanName(KVBM_FETCH, "kvbm", "find blocks in the tiers of the node and load them"),
    SpanName(KVBM_OFFER, "kvbm", "choose the offered blocks to store"),
    SpanName(KVBM_PREPARE, "kvbm", "load blocks for the kvbm of another node"),
    SpanName(KVBM_LEND, "kvbm", "lend blocks to the kvbm of another node"),
    SpanName(
        START, "worker", "a start, from the creation of the process until routers see the worker"
    ),
    *(SpanName(start_span(phase), "worker", meaning) for phase, meaning in _PHASES.items()),
)

OPERATION = "kvmesh.operation"
MODEL = "kvmesh.model"
STREAM = "kvmesh.stream"
MAX_TOKENS = "kvmesh.max_tokens"
CHOICES = "kvmesh.choices"
SESSION = "kvmesh.session"
PROMPT_TOKENS = "kvmesh.prompt_tokens"
CACHED_TOKENS = "kvmesh.cached_tokens"
OUTPUT_TOKENS = "kvmesh.output_tokens"
NEW_TOKENS = "kvmesh.new_tokens"
POSSIBLE_TOKENS = "kvmesh.possible_tokens"
LOST_TOKENS = "kvmesh.lost_tokens"
LOSSES = "kvmesh.losses"
PROMPT_CHANGE = "kvmesh.prompt_change"
FINISH_REASONS = "kvmesh.finish_reasons"
TTFT_S = "kvmesh.ttft_s"
REQUEST_ID = "kvmesh.request"
CHOICE = "kvmesh.choice"
ATTEMPT_ID = "kvmesh.attempt"
INSTANCE = "kvmesh.instance"
RANK = "kvmesh.rank"
STATUS = "kvmesh.status"
POLICY = "kvmesh.policy"
OVERLAP = "kvmesh.overlap"
ELIGIBLE = "kvmesh.eligible"
BLOCKS = "kvmesh.blocks"
TIERS = "kvmesh.tiers"
TENANT = "kvmesh.tenant"
ENGINE = "kvmesh.engine"
METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
ERROR = "error.type"

ATTRIBUTES = (
    Attribute(
        OPERATION, "the API: chat, text_completion, messages, responses", "gen_ai.operation.name"
    ),
    Attribute(MODEL, "the model, or the adapter", "gen_ai.request.model"),
    Attribute(STREAM, "true if the response streams", "gen_ai.request.stream"),
    Attribute(MAX_TOKENS, "bound of the output, in tokens", "gen_ai.request.max_tokens"),
    Attribute(CHOICES, "sequences of the request", "gen_ai.request.choice.count"),
    Attribute(SESSION, "the session", "gen_ai.conversation.id"),
    Attribute(PROMPT_TOKENS, "tokens of all prompts", "gen_ai.usage.input_tokens"),
    Attribute(
        CACHED_TOKENS,
        "prompt tokens that were not computed",
        "gen_ai.usage.cache_read.input_tokens",
    ),
    Attribute(OUTPUT_TOKENS, "tokens generated", "gen_ai.usage.output_tokens"),
    Attribute(NEW_TOKENS, "prompt tokens that were never computed before"),
    Attribute(POSSIBLE_TOKENS, "prompt tokens that an endless cache would have held"),
    Attribute(LOST_TOKENS, "prompt tokens that were computed again"),
    Attribute(LOSSES, "their reasons, each with its tokens: `evicted=512`"),
    Attribute(PROMPT_CHANGE, "the part of the prompt that differs from the session's last one"),
    Attribute(FINISH_REASONS, "the end of each sequence", "gen_ai.response.finish_reasons"),
    Attribute(
        TTFT_S, "seconds from arrival to the first token", "gen_ai.response.time_to_first_chunk"
    ),
    Attribute(REQUEST_ID, "the request's id, as in errors, logs and `kvmesh explain`"),
    Attribute(CHOICE, "the number of the sequence in its request, from 0"),
    Attribute(ATTEMPT_ID, "the id of the attempt, as on the bus"),
    Attribute(INSTANCE, "the instance that was chosen, queried or offered work, or that starts"),
    Attribute(RANK, "its data-parallel rank"),
    Attribute(STATUS, "the result: a reply's status, or the end of an attempt"),
    Attribute(POLICY, "the routing policy"),
    Attribute(OVERLAP, "overlap of the chosen rank, in blocks by tier"),
    Attribute(ELIGIBLE, "ranks among which the policy chose"),
    Attribute(BLOCKS, "blocks found, moved or wanted"),
    Attribute(TIERS, "blocks or tokens by the tier that they came from"),
    Attribute(TENANT, "the tenant's tag"),
    Attribute(ENGINE, "the engine of a worker that starts"),
    Attribute(METHOD, "HTTP method (a stable convention)"),
    Attribute(HTTP_ROUTE, "path of the endpoint (a stable convention)"),
    Attribute(HTTP_STATUS, "status of the response (a stable convention)"),
    Attribute(ERROR, "code of the error, set with the status *error* (a stable convention)"),
)

CONVENTIONS = {a.key: a.convention for a in ATTRIBUTES if a.convention}


def opted_in(variable: str) -> bool:
    """True if the value of `OTEL_SEMCONV_STABILITY_OPT_IN` selects the GenAI conventions."""
    return OPT_IN in (part.strip() for part in variable.split(","))
