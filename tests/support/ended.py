"""A copy of vLLM's blocks that has ended."""


class Ended:
    """Stands in for a copy between vLLM and the staging memory."""

    ended = True
    seconds = 0.0

    def wait(self) -> None:
        pass
