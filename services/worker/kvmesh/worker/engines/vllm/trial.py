"""Process that tries constraints for vLLM: checks them as vLLM's API side does, then compiles them
as its engine core does.

    python -m kvmesh.worker.engines.vllm.trial CONFIG SECONDS
"""

import logging
import pickle
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend
from vllm.v1.structured_output.backend_outlines import OutlinesBackend
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key

from kvmesh.bus.messages import Guided
from kvmesh.worker.adapters.vllm_fields import structured_outputs
from kvmesh.worker.constraints.structural_tags import constraints_within
from kvmesh.worker.constraints.trial_server import TrialServer

log = logging.getLogger(__name__)
MAX_CHECK_CPU_S = 1.0  # vLLM checks in the thread that prepares prompts
# `auto` picks a backend per request, but the engine core keeps the first one picked.
AUTO = ("xgrammar", "guidance")
BACKENDS = {
    "xgrammar": XgrammarBackend,
    "guidance": GuidanceBackend,
    "outlines": OutlinesBackend,
    "lm-format-enforcer": LMFormatEnforcerBackend,
}


class StructuredOutputs:
    """vLLM's structured outputs under its configuration, a `VllmConfig`."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._tokenizer = cached_tokenizer_from_config(config.model_config)
        configured = config.structured_outputs_config.backend
        self._backends: dict[str, Any] = {}
        for name in AUTO if configured == "auto" else (configured,):
            try:
                self._backends[name] = self._backend(name)
            except Exception as error:  # unsupported tokenizer: vLLM refuses this backend, too
                log.warning("backend %s compiles no constraints: %s", name, error)

    def make(self, guided: Guided) -> object:
        """Check and compile a constraint with vLLM; raises vLLM's exceptions."""
        start = time.process_time()
        try:
            params = self._checked(guided)
        except Exception:
            for part in constraints_within(guided):
                self._checked(part)  # it names the cause, which vLLM does not for a tag
            raise
        if time.process_time() - start > MAX_CHECK_CPU_S:
            raise ValueError(
                f"this {guided.kind} takes vLLM more than {MAX_CHECK_CPU_S:g} s to check"
            )
        backend_name = params.structured_outputs._backend
        compiled = [self._compiled(backend_name, params)]
        for name in self._backends:
            if name != backend_name:
                with suppress(Exception):  # fails only requests that pick this backend
                    compiled.append(self._compiled(name, params))
        return compiled

    def _checked(self, guided: Guided) -> Any:
        """The sampling parameters with a constraint that vLLM accepts; raises its exceptions."""
        config, outputs = self._config, StructuredOutputsParams(**structured_outputs(guided))
        params = SamplingParams(structured_outputs=outputs)
        params.verify(
            config.model_config,
            config.speculative_config,
            config.structured_outputs_config,
            self._tokenizer,
        )
        return params

    def _compiled(self, name: str, params: SamplingParams) -> object:
        backend = self._backends.get(name) or self._backend(name)
        key = get_structured_output_key(params.structured_outputs)
        grammar = backend.compile_grammar(*key, stop_token_ids=params.all_stop_token_ids)
        grammar.fill_bitmask(backend.allocate_token_bitmask(1), 0)
        return grammar

    def _backend(self, name: str) -> Any:
        vocabulary = self._config.model_config.get_vocab_size()
        return BACKENDS[name](self._config, tokenizer=self._tokenizer, vocab_size=vocabulary)


def main(config: str, seconds: str) -> None:
    """Serve trials to the worker over stdin and stdout."""
    outputs = StructuredOutputs(pickle.loads(Path(config).read_bytes()))
    TrialServer(outputs.make, float(seconds)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
