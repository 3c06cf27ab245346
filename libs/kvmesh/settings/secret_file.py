"""Secrets that come from files, which may change while a process runs."""

from pathlib import Path


class SecretUnreadable(ValueError):
    """The file of a secret cannot be read, or holds none; the message names the file."""


class FileSecret(str):
    """The text of a secret file as it was when the settings were read; `path` is absolute."""

    path: Path


def read_secret(path: Path) -> FileSecret:
    """Return the secret in a file, stripped; raises SecretUnreadable."""
    try:
        text = path.read_text().strip()
    except OSError as error:
        raise SecretUnreadable(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise SecretUnreadable(f"{path} is not text") from None
    if not text:
        raise SecretUnreadable(f"{path} is empty")
    secret = FileSecret(text)
    secret.path = path.absolute()
    return secret


def present(secret: str) -> str:
    """The secret as its file holds it now, or as given; raises SecretUnreadable."""
    return read_secret(secret.path) if isinstance(secret, FileSecret) else secret
