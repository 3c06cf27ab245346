"""`kvmesh secure`: writes credentials for every role, and the NATS server's configuration."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvmesh.bus.permissions import ANY, User
from kvmesh.cli.arguments import positive
from kvmesh.settings import Settings

if TYPE_CHECKING:
    from kvmesh.cli.credentials.server import Server

EVERY = "*"  # one user for all processes of a role, whatever their names


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh secure DIR [options]"
    parser.epilog = (
        "Existing keys in DIR are kept, all other files rewritten. To add users, run it again with"
        " the same options and more names; to replace a user's key, delete the user's folder first."
        " Then reload the server's configuration."
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="folder to write")
    for flag, plural in (("--workers", "workers"), ("--kvbms", "block managers")):
        default = ["worker-0"] if flag == "--workers" else ["kvbm-0"]
        text = f"names of the {plural}, one user each; {EVERY}: one user for all [{default[0]}]"
        add(flag, type=_names, default=default, metavar="NAME,…", help=text)
    add(
        "--hosts",
        type=_list,
        metavar="HOST,…",
        help="host names of the NATS server; processes use the first [localhost,127.0.0.1]",
    )
    add(
        "--cluster",
        type=_list,
        metavar="HOST[:PORT],…",
        help="servers of a cluster, in place of one; they reach each other at their port + 2000",
    )
    add("--port", type=positive, default=4222, metavar="N", help="port of the NATS server [4222]")
    add(
        "--jwt",
        action="store_true",
        help="operator mode: JWTs and .creds in place of nkeys in the server's configuration",
    )
    add(
        "--expire-days",
        type=positive,
        default=0,
        metavar="N",
        help="validity of the .creds, which each run renews [without end]",
    )
    add(
        "--monitor-port",
        type=positive,
        default=0,
        metavar="N",
        help="port of its monitoring, on loopback",
    )
    add("--store", type=Path, metavar="PATH", help="folder of its streams [DIR/nats/jetstream]")
    add(
        "--installed",
        type=Path,
        metavar="PATH",
        help="folder in which each user and the server find their files when deployed [in DIR]",
    )
    add(
        "--days", type=positive, default=365, metavar="N", help="validity of the certificates [365]"
    )
    add("--force", action="store_true", help="replace the authority and all keys")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.cli.credentials.authority import AuthorityError
    from kvmesh.cli.credentials.folder import Credentials, CredentialsError, CredentialsPlan
    from kvmesh.cli.credentials.server import Principal

    try:
        servers, hosts = _servers(arguments)
    except ValueError as error:
        return _failed(str(error), 2)
    plan = CredentialsPlan(
        servers=servers,
        hosts=hosts,
        days=arguments.days,
        tokens=arguments.jwt,
        token_days=arguments.expire_days,
        store=arguments.store and arguments.store.absolute(),
        installed=arguments.installed,
        monitor_port=arguments.monitor_port,
        principals=[Principal(role, name) for role, name in _users(arguments)],
    )
    credentials = Credentials(arguments.folder, settings, plan)
    try:
        principals = credentials.write(arguments.force)
    except (CredentialsError, AuthorityError) as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}")
    width = max(len(principal.user) for principal in principals)
    for principal in principals:
        print(f"{principal.user:<{width}}  {arguments.folder / principal.user / 'env'}")
    print()
    for server in servers:
        on = f"  # on {server.host}" if server.name else ""
        print(f"nats-server -c {arguments.folder / 'nats' / server.name / 'nats.conf'}{on}")
    print(f"Make {arguments.folder / 'authority'} inaccessible to all processes of the mesh.")
    return 0


def _failed(reason: str, status: int = 1) -> int:
    print(f"kvmesh secure: {reason}", file=sys.stderr)
    return status


def _servers(arguments: argparse.Namespace) -> tuple[list["Server"], list[str]]:
    """The servers, and their further host names; raises ValueError for a wrong address."""
    from kvmesh.cli.credentials.server import Server

    if arguments.expire_days and not arguments.jwt:
        raise ValueError("--expire-days needs --jwt")
    if not arguments.cluster:
        host, *others = arguments.hosts or ("localhost", "127.0.0.1")
        return [Server(host, arguments.port)], others
    servers = []
    addresses = [_address(text) for text in arguments.cluster]
    hosts = [host for host, _ in addresses]
    for host, port in addresses:
        name = host.replace(":", "-")
        port = port or arguments.port
        servers.append(Server(host, port, f"{name}-{port}" if hosts.count(host) > 1 else name))
    if len({server.name for server in servers}) < max(2, len(servers)):
        raise ValueError("--cluster names two servers or more, each once")
    return servers, arguments.hosts or []


def _address(text: str) -> tuple[str, int | None]:
    address = urlsplit(f"tls://{text}")
    with suppress(ValueError):  # the port is no number
        if address.hostname and address.netloc == text and not address.username:
            return address.hostname, address.port
    raise ValueError(f"not an address of a server: {text!r}")


def _users(arguments: argparse.Namespace) -> Iterator[tuple[User, str]]:
    named = {User.WORKER: arguments.workers, User.KVBM: arguments.kvbms}
    for role in User:
        for name in named.get(role, [EVERY]):
            yield role, ANY if name == EVERY else name


def _list(text: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise argparse.ArgumentTypeError("must not be empty")
    return found


def _names(text: str) -> list[str]:
    from kvmesh.cli.credentials.folder import NAME

    found = _list(text)
    for name in found:
        if name != EVERY and not NAME.fullmatch(name):
            raise argparse.ArgumentTypeError(f"allowed are letters, digits, . _ and -: {name!r}")
    return found
