"""`kvmesh model`: the models that the mesh holds, those of this machine, and a tiny one."""

import argparse
from pathlib import Path

from kvmesh.cli.arguments import failed
from kvmesh.settings import Settings

# the least and the most operands of each action
ACTIONS = {
    "push": (1, 2),
    "pull": (1, 2),
    "list": (0, 0),
    "evict": (1, 1),
    "alias": (0, 1),
    "busy": (1, 1),
    "tiny": (1, 1),
}
USAGE = """kvmesh model push FOLDER [NAME] [options]
       kvmesh model pull NAME[@DIGEST] [FOLDER] [options]
       kvmesh model list [--local] [--json] [options]
       kvmesh model evict NAME[@DIGEST] [--local] [options]
       kvmesh model alias [NAME=MODEL[:WEIGHT],… [--shadow MODEL:PERCENT]] [--json] [options]
       kvmesh model alias NAME --back|--remove [options]
       kvmesh model busy NAME [--blocks N] [--blocks-share X] [--prefill-tokens N] [options]
       kvmesh model busy NAME --reset [options]
       kvmesh model tiny FOLDER [--seed N]"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = USAGE
    parser.epilog = (
        "A model in the mesh is served with `kvmesh worker --model NAME[@DIGEST]`. A push or pull"
        " that was broken off goes on where it was. `busy` shows or sets the load at which a rank"
        " gets no requests; thresholds survive restarts of routers, and new ones are stored only"
        " for a model that a worker serves or that is idle. `tiny` writes a small random model."
    )
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument(
        "operands", nargs="*", metavar="NAME", help="a model's name, or its folder, or both"
    )
    parser.add_argument("--local", action="store_true", help="of this machine's models [the mesh]")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.add_argument(
        "--back", action="store_true", help="give an alias the models that it had before"
    )
    parser.add_argument(
        "--shadow",
        action="append",
        default=[],
        metavar="MODEL:PERCENT",
        help="alias: copy the requests of so many sessions to this model, too, for comparison only",
    )
    parser.add_argument("--remove", action="store_true", help="remove an alias")
    parser.add_argument(
        "--with-code", action="store_true", help="push files with code as well (*.py, *.so)"
    )
    parser.add_argument("--blocks", type=int, metavar="N", help="busy: active blocks of a rank")
    parser.add_argument(
        "--blocks-share", type=float, metavar="X", help="busy: active over all blocks of a rank"
    )
    parser.add_argument("--prefill-tokens", type=int, metavar="N", help="busy: tokens in prefill")
    parser.add_argument(
        "--reset", action="store_true", help="busy: the settings of the routers apply again"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the tiny model's weights [0]")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    action, operands = arguments.action, arguments.operands
    least, most = ACTIONS[action]
    if not least <= len(operands) <= most:
        return failed("model", f"wrong operands of {action}; usage:\n{USAGE}", 2)
    if action == "alias":
        return _alias(arguments, settings)
    if action == "busy":
        from kvmesh.cli.models.busy import busy

        return busy(arguments, operands[0], settings)
    if action == "tiny":
        return _tiny(Path(operands[0]), arguments.seed)
    return _on_models(arguments, settings)


def _tiny(folder: Path, seed: int) -> int:
    from kvmesh.worker.models.tiny_model import make_tiny_model

    try:
        make_tiny_model(folder, seed)
    except OSError as error:
        return failed("model", f"cannot write {folder}: {error.strerror}")
    print(f"wrote {folder}; try: kvmesh up --engine torch --model {folder}, or --engine vllm")
    return 0


def _alias(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.bus.client import Bus
    from kvmesh.bus.discovery.cards import read_cards
    from kvmesh.bus.messages import Role, adapter_name
    from kvmesh.cli.bus_session import run_on_bus
    from kvmesh.cli.models import aliases
    from kvmesh.cli.status.view import show_json
    from kvmesh.terminal.console import stdout_console

    text = arguments.operands[0] if arguments.operands else ""
    changes = arguments.back or arguments.remove
    wrong = arguments.shadow and (changes or not text)
    if wrong or (changes and (not text or "=" in text)) or (arguments.back and arguments.remove):
        return failed("model", f"wrong operands of alias; usage:\n{USAGE}", 2)
    try:
        alias = aliases.parse_alias(text, arguments.shadow) if text and not changes else None
    except aliases.AliasError as error:
        return failed("model", error, 2)

    async def main(bus: Bus) -> int:
        if alias is not None:
            cards = await read_cards(bus, Role.WORKER)
            served = {card.model.name for card in cards if card.model is not None}
            adapters = {adapter_name(a) for c in cards if c.model for a in c.model.adapters}
            return await aliases.set_alias(bus, alias, served | adapters)
        if changes:
            change = aliases.go_back if arguments.back else aliases.remove_alias
            return await change(bus, text)
        uses = await aliases.used_aliases(bus)
        if arguments.json:
            show_json(uses)
        elif not uses:
            print("no aliases")
        else:
            aliases.alias_table(uses).show(stdout_console())
        return 0

    return run_on_bus("model", settings, main)


def _on_models(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.bus.client import Bus
    from kvmesh.cli.bus_session import run_on_bus
    from kvmesh.cli.models import local, mesh
    from kvmesh.weights.errors import WeightsError
    from kvmesh.weights.models.reference import name_of_folder

    action, operands = arguments.action, arguments.operands
    source = Path(operands[0]) if action == "push" else Path()
    if not source.is_dir():
        return failed("model", f"{source} is no folder")
    name = operands[1] if len(operands) > 1 else name_of_folder(source)

    async def main(bus: Bus) -> int:
        match action:
            case "push":
                return await mesh.push(bus, settings, source, name, arguments.with_code)
            case "pull":
                folder = Path(operands[1]) if len(operands) > 1 else None
                return await mesh.pull(bus, settings, operands[0], folder)
            case "list":
                return await mesh.show(bus, arguments.json)
            case _:
                return await mesh.remove(bus, operands[0])

    try:
        if arguments.local and action == "list":
            return local.show(settings, arguments.json)
        if arguments.local and action == "evict":
            return local.remove(settings, operands[0])
        return run_on_bus("model", settings, main)
    except WeightsError as error:
        return failed("model", error)
