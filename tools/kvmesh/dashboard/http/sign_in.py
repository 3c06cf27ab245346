"""The page that asks for a key: plain HTML, since it comes before everything else. Pure."""

from html import escape

STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:26rem;margin:15vh auto;padding:0 1rem}
label,input,button{display:block;width:100%;box-sizing:border-box;font:inherit}
input,button{padding:.5rem;margin:.3rem 0 1rem}
[role=alert]{color:#c62828}
@media(prefers-color-scheme:dark){[role=alert]{color:#ef9a9a}}
"""


def sign_in_page(fault: str = "") -> str:
    """The page; `fault` says why the last key was refused."""
    alert = f"<p role=alert>{escape(fault)}</p>" if fault else ""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'><title>kvmesh: sign in</title>"
        f"<style>{STYLE}</style><main><h1>kvmesh</h1>{alert}<form method=post>"
        "<label for=key>API key with the scope <code>admin</code></label>"
        "<input id=key name=key type=password required autofocus autocomplete=current-password>"
        "<button>Sign in</button></form></main></html>"
    )
