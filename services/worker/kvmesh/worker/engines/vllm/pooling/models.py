"""Models that vLLM runs for vectors or scores: which they are, and for which task."""

from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs

from kvmesh.bus.messages import EMBED, GENERATE, SCORE
from kvmesh.worker.adapters.engine_args import refusal
from kvmesh.worker.engine import EngineConfigError
from kvmesh.worker.model_folder import read_json

GENERATING = ("ForCausalLM", "ForConditionalGeneration")
ASKED = ("runner", "convert", "hf_overrides")  # arguments that decide, too
SENTENCES = "modules.json"  # of a model for sentence-transformers
POOLING = "pooling"  # vLLM's runner
TASKS = {"embed": EMBED, "classify": SCORE}  # by vLLM's name


def is_pooling(arguments: dict[str, Any]) -> bool:
    """True if vLLM runs the model for vectors or scores with these arguments.

    vLLM is asked where the folder's architecture leaves a doubt, which takes seconds.
    """
    folder = Path(arguments["model"])
    names = read_json(folder / "config.json").get("architectures") or []
    plain = bool(names) and all(str(name).endswith(GENERATING) for name in names)
    asked = (folder / SENTENCES).exists() or any(name in arguments for name in ASKED)
    if plain and not asked:
        return False
    try:
        config = AsyncEngineArgs(**arguments).create_model_config()
    except (TypeError, ValueError) as error:
        raise EngineConfigError(f"vLLM rejects its arguments: {refusal(error)}") from error
    return bool(config.runner_type == POOLING)


def least_blocks(config: Any) -> int:
    """The blocks of the longest sequences of one step of such a model.

    Models that keep no KV have no blocks, and still as much room.
    """
    if config.model_config.runner_type != POOLING:
        return 0
    blocks = -(-config.model_config.max_model_len // config.cache_config.block_size)
    most: int = config.scheduler_config.max_num_seqs * blocks
    return most


async def task_of(llm: Any) -> str:
    """The task of an engine's model; raises EngineConfigError for others of vLLM's."""
    config = llm.vllm_config.model_config
    if config.runner_type != POOLING:
        return GENERATE
    named = config.get_pooling_task(await llm.get_supported_tasks())
    if named not in TASKS:
        known = ", ".join(TASKS)
        raise EngineConfigError(f"the model's task is {named} in vLLM; known ones are {known}")
    labels = getattr(config.hf_config, "num_labels", 1)
    if TASKS[named] == SCORE and labels != 1:
        raise EngineConfigError(f"the model sorts into {labels} classes, and gives no score")
    return TASKS[named]
