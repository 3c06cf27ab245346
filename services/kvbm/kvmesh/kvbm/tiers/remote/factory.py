"""Creates the remote store for a URL."""

from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from kvmesh.kvbm.tiers.remote.folder import FolderStore
from kvmesh.kvbm.tiers.remote.interface import RemoteError, RemoteStore
from kvmesh.settings import redacted

REDIS_SCHEMES = ("redis", "rediss", "unix")


def open_store(
    url: str,
    namespace: str,
    lease_s: float,
    timeout_s: float,
    folder_bytes: int,
    folder_group: bool = False,
) -> RemoteStore:
    """The store at a redis://, rediss://, unix:// or file:// `url`; connects on first use.

    Raises RemoteError if the URL is invalid or the store's package is not installed.
    """
    scheme = urlsplit(url).scheme
    if scheme == "file":
        path = Path(url2pathname(urlsplit(url).path)) / namespace
        return FolderStore(path, lease_s, timeout_s, folder_bytes, folder_group)
    if scheme not in REDIS_SCHEMES:
        raise RemoteError(
            "open", f"{redacted(url)!r} is not a redis://, rediss://, unix:// or file:// URL"
        )
    try:
        from kvmesh.kvbm.tiers.remote.redis import RedisStore
    except ModuleNotFoundError as error:
        raise RemoteError("open", "Redis needs: pip install 'kvmesh[redis]'") from error
    try:
        return RedisStore(url, namespace, lease_s, timeout_s)
    except ValueError as error:
        raise RemoteError("open", redacted(f"{url}: {error}")) from error
