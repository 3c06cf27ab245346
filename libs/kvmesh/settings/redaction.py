"""Settings that others must not read, in a form that may be shown."""

import re

HIDDEN = "***"
_USER_INFO = re.compile(r"://(?:(?!://).)*@")
_BARE_USER_INFO = re.compile(r"[^,]*@")
_PARAMETER = re.compile(r"([?&](?:user(?:name)?|password|token)=)[^&]*", re.IGNORECASE)


def redacted(url: str) -> str:
    """`url`, or several separated by commas, without the users, passwords and tokens in them."""
    if "://" in url:
        url = _USER_INFO.sub(f"://{HIDDEN}@", url)
    else:
        url = _BARE_USER_INFO.sub(f"{HIDDEN}@", url)
    return _PARAMETER.sub(rf"\g<1>{HIDDEN}", url)
