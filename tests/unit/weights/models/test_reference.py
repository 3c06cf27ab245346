"""References to models of the mesh."""

import pytest

from kvmesh.weights.errors import ModelStoreError
from kvmesh.weights.models.reference import parse_reference

DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "name", "digest"),
    [
        ("m", "m", ""),
        ("org/Model-3.1_x", "org/Model-3.1_x", ""),
        (f"m@{DIGEST}", "m", DIGEST),
        (f"m@{DIGEST[:12]}", "m", DIGEST[:12]),
    ],
)
def test_a_reference_has_a_name_and_perhaps_a_digest(text: str, name: str, digest: str) -> None:
    found = parse_reference(text)
    assert found == (name, digest)
    assert str(found) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "/m", "./m", "../m", "m/", "m//x", "a/../b", ".m", "m m", "m\n", "ä"),
        *("m@", "m@abc", f"m@{DIGEST}0", "m@ABCDEFABCDEF", "m@0123456789ag", "m@@", "x" * 201),
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ModelStoreError):
        parse_reference(text)
