"""A process is gone once nobody has listened for long enough, on both sides' connections."""

from kvmesh.bus.absence import ALONE_GONE_S, GONE_S, REJOIN_S, Absence


def test_a_process_that_changes_servers_is_not_gone() -> None:
    absence = Absence(clustered=True)
    assert not absence.refused(100.0, connected_at=0.0)
    assert not absence.refused(100.0 + 0.9 * GONE_S, connected_at=0.0)
    absence.replied()
    assert not absence.refused(100.0 + 2 * GONE_S, connected_at=0.0)


def test_a_process_is_gone_if_it_stays_away() -> None:
    absence = Absence(clustered=True)
    assert not absence.refused(100.0, connected_at=0.0)
    assert absence.refused(100.0 + GONE_S, connected_at=0.0)


def test_with_one_server_a_process_is_gone_sooner() -> None:
    absence = Absence(clustered=False)
    assert not absence.refused(100.0, connected_at=0.0)
    assert absence.refused(100.0 + ALONE_GONE_S, connected_at=0.0)


def test_nobody_is_gone_while_all_reconnect() -> None:
    absence = Absence(clustered=True)
    absence.refused(100.0, connected_at=0.0)
    reconnected = 100.0 + GONE_S
    assert not absence.refused(reconnected + 0.9 * REJOIN_S, reconnected)
    assert absence.refused(reconnected + REJOIN_S, reconnected)
