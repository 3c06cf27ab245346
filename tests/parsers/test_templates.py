"""Prompts of every template at hand: those that Transformers writes, but for the adaptations."""

import pytest
from support.real_templates import real_templates
from support.template_matrix import differences

pytestmark = [pytest.mark.parsers, pytest.mark.timeout(1800)]
TEMPLATES = {name: data.decode() for name, data in real_templates().items()}
# Templates of embeddings, rerankers and speech, and one that needs variables which no API has.
OTHERS = {
    name
    for name in TEMPLATES
    if any(word in name for word in ("rank", "firefunction", "kimi_audio", "embed", "vlm2vec"))
}


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - OTHERS))
def test_nothing_but_thinking_is_lost_and_every_difference_is_explained(name: str) -> None:
    assert differences(TEMPLATES[name]) == {}
