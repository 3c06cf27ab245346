"""Settings that change in running processes: those that the schema marks as live."""

from collections.abc import Callable, Mapping

from msgspec.structs import force_setattr, replace

from kvmesh.settings.load import Option, SettingsError, hint, options, parse
from kvmesh.settings.schema import Section, Settings


def live_option(name: str) -> Option:
    """The live option that `name` (`SECTION.KEY`) names; raises SettingsError for any other."""
    known = {f"{option.section}.{option.key}": option for option in options()}
    option = known.get(name)
    if option is None:
        raise SettingsError(name, f"no setting has this name{hint(name, known)}")
    if not option.live:
        section = option.section
        services = ("frontend", "router", "indexer", "worker", "kvbm", "planner")
        restart = f"`kvmesh fleet roll {section}`" if section in services else "a restart"
        reason = f"processes read it at their start only: change it there, then {restart}"
        raise SettingsError(name, reason)
    return option


def with_own_sections(settings: Settings) -> Settings:
    """The settings with sections that nobody else holds, so that changes of live options stay."""
    live = {option.section for option in options() if option.live}
    return replace(settings, **{name: replace(getattr(settings, name)) for name in live})


class LiveSection:
    """The live options of one section, which the process holds and reads whenever it needs them.

    `check` raises SettingsError for values that do not suit each other.
    """

    def __init__(
        self, name: str, section: Section, check: Callable[[Section], None] = lambda _: None
    ) -> None:
        self._section = section
        self._check = check
        self._options = {
            f"{name}.{option.key}": option
            for option in options()
            if option.section == name and option.live
        }
        self._before = {key: getattr(section, o.key) for key, o in self._options.items()}

    def apply(self, texts: Mapping[str, str]) -> dict[str, tuple[object, object]]:
        """Give the options the values of `texts`, and all others those of the start.

        Returns the former and the new value of each that changes. Raises SettingsError, and then
        changes none.
        """
        values = dict(self._before)
        for name, text in texts.items():
            if name not in self._options:
                raise SettingsError(name, "it is no live setting of this process")
            values[name] = parse(self._options[name], text, name)
        keys = {self._options[name].key: value for name, value in values.items()}
        self._check(replace(self._section, **keys))
        changed = {}
        for name, value in values.items():
            key = self._options[name].key
            before = getattr(self._section, key)
            if before != value:
                changed[name] = (before, value)
                force_setattr(self._section, key, value)  # all parts of the process share it
        return changed
