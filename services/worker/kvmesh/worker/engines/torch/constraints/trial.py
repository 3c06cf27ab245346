"""Process that tries constraints for the torch engine.

python -m kvmesh.worker.engines.torch.constraints.trial FOLDER VOCABULARY SECONDS [EOS_TOKEN…]
"""

import sys
from pathlib import Path

from kvmesh.worker.constraints.trial_server import TrialServer
from kvmesh.worker.engines.torch.constraints.grammar import MatcherFactory


def main(folder: str, vocabulary: str, seconds: str, *eos_tokens: str) -> None:
    """Serve trials to the worker over stdin and stdout."""
    factory = MatcherFactory(Path(folder), int(vocabulary), map(int, eos_tokens))
    TrialServer(factory.make, float(seconds)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
