"""Decisions of a roll."""

from kvmesh.bus.messages import RollRecord
from kvmesh.cli.rolling.core import Act, Replica, Roll, Step
from kvmesh.cli.rolling.figures import RequestFigures

GOOD = (RequestFigures(100, 0, 0.1, 0.2), RequestFigures(20, 0, 0.1, 0.2))
SLOW = (RequestFigures(100, 0, 0.1, 0.2), RequestFigures(20, 0, 0.4, 0.9))


class Service:
    """A service whose replicas the test replaces; time passes by hand."""

    def __init__(self, *names: str, last_first: bool = False) -> None:
        self.replicas = {name: Replica(name, f"{name}-old") for name in names}
        self.record = RollRecord(
            service="worker",
            started=0.0,
            before={name: replica.instance for name, replica in self.replicas.items()},
        )
        self.roll = Roll(self.record, 5.0, 100.0, 0.5, last_first)
        self.now = 0.0

    def step(
        self,
        failure: str = "",
        figures: tuple[RequestFigures, RequestFigures] = GOOD,
        after: float = 0.0,
    ) -> Step:
        self.now += after
        return self.roll.step(self.now, list(self.replicas.values()), failure, lambda: figures)

    def replaced(self, name: str) -> None:
        self.replicas[name] = Replica(name, f"{name}-new")


def test_one_after_the_other_in_the_order_of_their_numbers() -> None:
    service = Service("worker-10", "worker-9")
    assert service.step() == Step(Act.REPLACE, "worker-9")
    assert service.step().act is Act.WAIT
    del service.replicas["worker-9"]  # it has left
    assert service.step().act is Act.WAIT
    service.replaced("worker-9")
    assert service.step() == Step(Act.REPLACED, "worker-9")
    assert service.step(after=4.9).act is Act.WAIT
    assert service.step(after=0.1) == Step(Act.REPLACE, "worker-10")
    service.replaced("worker-10")
    assert service.step().act is Act.REPLACED
    assert service.step(after=5.0) == Step(Act.END)


def test_the_last_may_come_first() -> None:
    assert Service("w-0", "w-1", last_first=True).step() == Step(Act.REPLACE, "w-1")


def test_a_successor_with_another_name_counts_once_all_serve() -> None:
    service = Service("a", "b")
    service.step()
    service.replicas["c"] = Replica("c", "c-new")
    assert service.step().act is Act.WAIT  # the old one is still there
    del service.replicas["a"]
    assert service.step() == Step(Act.REPLACED, "a")


def test_one_that_still_has_requests_beside_its_successor_is_waited_for_once() -> None:
    service = Service("f-0", "f-1")
    assert service.step() == Step(Act.REPLACE, "f-0")
    service.replaced("f-0")
    service.replicas["leaving"] = Replica("f-0", "f-0-old", serves=False, draining=True)
    assert service.step() == Step(Act.REPLACED, "f-0")
    for _ in range(3):
        assert service.step(after=5.0) == Step(Act.WAIT, "f-0")
    stays = service.roll.step(101.0, list(service.replicas.values()), "", lambda: GOOD)
    assert stays == Step(Act.STOP, "f-0", "f-0 has not left after 100 s")
    del service.replicas["leaving"]
    assert service.step() == Step(Act.REPLACE, "f-1")


def test_a_successor_that_does_not_serve_is_waited_for_and_then_stops_the_roll() -> None:
    service = Service("a")
    service.step()
    service.replicas["a"] = Replica("a", "a-new", serves=False)
    assert service.step(after=100.0).act is Act.WAIT
    step = service.step(after=1.0)
    assert step.act is Act.STOP
    assert step.reason == "a does not serve after 100 s"


def test_a_failed_replacement_stops_the_roll() -> None:
    service = Service("a", "b")
    service.step()
    assert service.step("a exited") == Step(Act.STOP, "a", "a exited")


def test_requests_that_fare_worse_stop_the_roll() -> None:
    service = Service("a", "b")
    service.step()
    service.replaced("a")
    service.step()
    step = service.step(figures=SLOW, after=5.0)
    assert step.act is Act.STOP
    assert step.reason == (
        "since a is replaced, the p90 of first tokens is 0.900 s, before 0.200 s"
    )


def test_a_successor_that_leaves_again_stops_the_roll() -> None:
    service = Service("a")
    service.step()
    service.replaced("a")
    service.step()
    del service.replicas["a"]
    assert service.step(after=1.0) == Step(Act.STOP, "a", "a has left again")


def test_a_resumed_roll_waits_for_the_one_that_leaves_and_skips_those_replaced() -> None:
    service = Service("a", "b", "c")
    service.replaced("a")
    service.replicas["c"] = Replica("c", "c-old", serves=False, draining=True)
    assert service.step() == Step(Act.WAIT, "c")
    service.replaced("c")
    assert service.step() == Step(Act.REPLACED, "c")
    assert service.step(after=5.0) == Step(Act.REPLACE, "b")


def test_a_roll_of_processes_that_have_all_gone_has_ended() -> None:
    service = Service("a")
    service.replicas.clear()
    assert service.step() == Step(Act.END)
