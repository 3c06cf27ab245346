"""Settings that change in running processes."""

import pytest

from kvmesh.settings import Settings, SettingsError, options
from kvmesh.settings.live import LiveSection, live_option, with_own_sections
from kvmesh.settings.schema import RouterSettings, Section


def test_values_reach_all_who_hold_the_section_and_nobody_else() -> None:
    defaults = Settings()
    settings = with_own_sections(defaults)
    live = LiveSection("router", settings.router)
    changed = live.apply({"router.temperature": "0.5", "router.queue_order": "lcfs"})
    assert changed == {"router.temperature": (0.0, 0.5), "router.queue_order": ("fcfs", "lcfs")}
    assert (settings.router.temperature, settings.router.queue_order) == (0.5, "lcfs")
    assert defaults.router == RouterSettings()
    assert live.apply({"router.queue_order": "lcfs"}) == {"router.temperature": (0.5, 0.0)}
    assert live.apply({}) == {"router.queue_order": ("lcfs", "fcfs")}


def refuse_heat(section: Section) -> None:
    if isinstance(section, RouterSettings) and section.temperature > 1:
        raise SettingsError("router.temperature", "too hot")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("router.temperature", "-1", "expected `float` >= 0"),
        ("router.temperature", "2", "too hot"),
        ("router.queue_order", "lifo", "must be one of fcfs, wspt, lcfs"),
        ("router.policy", "kv", "no live setting"),
        ("frontend.max_in_flight", "1", "no live setting"),
    ],
)
def test_a_refused_value_changes_nothing(name: str, text: str, reason: str) -> None:
    settings = with_own_sections(Settings())
    live = LiveSection("router", settings.router, refuse_heat)
    with pytest.raises(SettingsError, match=reason):
        live.apply({"router.queue_limit": "7", name: text})
    assert settings.router == RouterSettings()


def test_settings_that_need_a_restart_are_refused_with_what_to_do() -> None:
    assert live_option("frontend.max_in_flight").env == "KVMESH_FRONTEND_MAX_IN_FLIGHT"
    for name, words in (
        ("frontend.port", "kvmesh fleet roll frontend"),
        ("nats.url", "then a restart"),
        ("router.temprature", "did you mean router.temperature"),
        ("nothing", "no setting has this name"),
    ):
        with pytest.raises(SettingsError, match=words):
            live_option(name)


def test_live_options_are_of_frontends_and_routers() -> None:
    assert {option.section for option in options() if option.live} == {"frontend", "router"}
