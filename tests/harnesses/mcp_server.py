"""A server of the Model Context Protocol on stdin and stdout, with sixty tools."""

import json
import sys
from typing import Any

TOOLS = 60
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "The name of the city"},
        "days": {"type": "integer", "description": "For how many days", "default": 1},
        "detail": {"type": "boolean", "description": "Each hour", "default": False},
    },
    "required": ["city"],
}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "big", "version": "1"},
            }
        case "tools/list":
            return {"tools": [_tool(number) for number in range(TOOLS)]}
        case "tools/call":
            text = f"{params['name']} says: {json.dumps(params.get('arguments'), sort_keys=True)}"
            return {"content": [{"type": "text", "text": text}]}
    return {}


def _tool(number: int) -> dict[str, Any]:
    text = f"Tool {number} of many: it reports the weather that station {number} has measured."
    return {"name": f"tool_{number:02}", "description": text, "inputSchema": SCHEMA}


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            result = answer(request["method"], request.get("params") or {})
            reply = {"jsonrpc": "2.0", "id": request["id"], "result": result}
            print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
