"""Runs several predictors and follows the one with the least loss."""

from collections import deque
from collections.abc import Mapping

from kvmesh.planner.prediction.interface import Predictor

# The decayed loss counts about the last hundred intervals.
DECAY = 0.99
# Questions (steps, quantile) that are scored: those asked last.
QUESTIONS = 4
# Scored until the caller asks one.
FIRST_QUESTION = (1, 0.9)
# Another candidate predicts once its loss is below this share of the present one's.
CLEARLY = 0.95
# Losses count once a question has so many of them.
FEWEST = 8


def pinball(value: float, predicted: float, quantile: float) -> float:
    """The loss of a predicted quantile; least in the mean for the true one (Koenker 1978)."""
    error = value - predicted
    return quantile * error if error >= 0 else (quantile - 1) * error


class BestPredictor:
    """A `Predictor` that predicts with the candidate of the least decayed pinball loss so far.

    The loss counts at the last step and the quantile of the predictions that the caller asks for.
    Another candidate must be clearly better to take over.
    """

    def __init__(self, candidates: Mapping[str, Predictor]) -> None:
        self._candidates = dict(candidates)
        self._questions: dict[tuple[int, float], _Question] = {}
        self._chosen = next(iter(self._candidates))
        self._ask(*FIRST_QUESTION)
        self._asked = False

    @property
    def chosen(self) -> str:
        """The name of the candidate that predicts; the first one until another is better."""
        return self._chosen

    @property
    def losses(self) -> dict[str, float]:
        """Decayed pinball loss of each candidate over the least one, at least 1.

        The mean over the questions asked; 1 for each before enough predictions came due.
        """
        scored = [question for question in self._questions.values() if question.scored >= FEWEST]
        totals = dict.fromkeys(self._candidates, 0.0)
        for question in scored:
            least = max(min(question.losses.values()), 1e-9)
            for name, loss in question.losses.items():
                totals[name] += max(loss, least) / least / len(scored)
        return totals if scored else dict.fromkeys(self._candidates, 1.0)

    def observe(self, value: float) -> None:
        """Add the value of the next interval; raises ValueError unless it is finite and >= 0."""
        for candidate in self._candidates.values():
            candidate.observe(value)
        for question in self._questions.values():
            question.score(value)
            question.record(self._candidates)
        losses = self.losses
        least = min(losses, key=losses.__getitem__)
        if losses[least] < CLEARLY * losses[self._chosen]:
            self._chosen = least

    def predict(self, steps: int, quantile: float = 0.5) -> list[float]:
        """The chosen candidate's quantiles; raises ValueError unless 0 < quantile < 1."""
        predicted = self._candidates[self._chosen].predict(steps, quantile)
        if steps > 0:
            if not self._asked:
                self._questions.clear()
            self._asked = True
            self._ask(steps, quantile)
        return predicted

    def _ask(self, steps: int, quantile: float) -> None:
        question = self._questions.pop((steps, quantile), None)
        if question is None:
            question = _Question(steps, quantile, self._candidates)
        self._questions[steps, quantile] = question
        while len(self._questions) > QUESTIONS:
            del self._questions[next(iter(self._questions))]


class _Question:
    """The predictions of one quantile some steps ahead, and their losses."""

    def __init__(self, steps: int, quantile: float, candidates: Mapping[str, Predictor]) -> None:
        self.losses = dict.fromkeys(candidates, 0.0)
        self.scored = 0
        self._steps = steps
        self._quantile = quantile
        self._pending: deque[dict[str, float]] = deque(maxlen=steps)

    def record(self, candidates: Mapping[str, Predictor]) -> None:
        """Keep the predictions made now, until they come due."""
        self._pending.append(
            {
                name: candidate.predict(self._steps, self._quantile)[-1]
                for name, candidate in candidates.items()
            }
        )

    def score(self, value: float) -> None:
        """Add the losses of the predictions that are due."""
        if len(self._pending) < self._steps:
            return
        self.scored += 1
        for name, predicted in self._pending[0].items():
            loss = pinball(value, predicted, self._quantile)
            self.losses[name] = DECAY * self.losses[name] + loss
