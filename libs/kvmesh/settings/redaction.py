"""Redaction of secrets in printed settings."""

import re

HIDDEN = "***"
_USER_INFO = re.compile(r"://(?:(?!://).)*@")
_BARE_USER_INFO = re.compile(r"[^,]*@")
_PARAMETER = re.compile(r"([?&](?:user(?:name)?|password|token)=)[^&]*", re.IGNORECASE)


def redacted(url: str) -> str:
    """Return a URL, or several separated by commas, without users, passwords and tokens."""
    if "://" in url:
        url = _USER_INFO.sub(f"://{HIDDEN}@", url)
    else:
        url = _BARE_USER_INFO.sub(f"{HIDDEN}@", url)
    return _PARAMETER.sub(rf"\g<1>{HIDDEN}", url)
