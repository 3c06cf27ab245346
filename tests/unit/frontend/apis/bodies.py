"""Headers and requests of the chat API, as tests write them."""

import json
from typing import Any

from multidict import CIMultiDict
from support.stamp import STAMP

from kvmesh.frontend.apis.chat.api import Chat


def headers(**named: str) -> CIMultiDict[str]:
    return CIMultiDict({name.replace("_", "-"): value for name, value in named.items()})


def request(head: CIMultiDict[str] | None = None, **fields: Any) -> Any:
    sent = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return Chat().parse(json.dumps(sent).encode(), head or headers(), STAMP).request
