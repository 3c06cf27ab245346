"""The process that tries constraints for the torch engine.

python -m kvmesh.worker.engines.torch.constraints.trial FOLDER VOCABULARY SECONDS [END…]
"""

import sys
from pathlib import Path

from kvmesh.worker.constraints.trial_server import TrialServer
from kvmesh.worker.engines.torch.constraints.grammar import GrammarMaker


def main(folder: str, vocabulary: str, seconds: str, *ends: str) -> None:
    """Serve the worker at the other end of stdin and stdout."""
    maker = GrammarMaker(Path(folder), int(vocabulary), map(int, ends))
    TrialServer(maker.make, float(seconds)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
