"""Inputs of requests for vectors and scores: their tokens and groups, and cosines."""

import asyncio
from array import array

import msgspec
import pytest
from support.stamp import STAMP
from unit.frontend.apis.prompts import model

from kvmesh.bus.messages import EMBED, SCORE
from kvmesh.frontend.apis.pooling.call import PoolingCall
from kvmesh.frontend.apis.pooling.rerank import Rerank
from kvmesh.frontend.errors import ContextExceeded, InvalidRequest
from kvmesh.frontend.models import ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.frontend.pooling.inputs import EncodedInput, grouped, prepare, similarities
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest, Preprocessor

CONTEXT = 20


def served(task: str) -> ServedModel:
    card = msgspec.structs.replace(model().card, task=task, context=CONTEXT)
    return ServedModel(card, model().dialect, 0)


def rerank(*documents: str, **fields: object) -> PoolingCall:
    body = {"model": "m", "query": "a query", "documents": documents, **fields}
    return Rerank().parse(msgspec.json.encode(body), {}, STAMP)


def prepared(call: PoolingCall, task: str) -> PreparedRequest:
    preprocessor = Preprocessor(1 << 20, TenantNamespaces())
    return asyncio.run(prepare(call, served(task), None, preprocessor))


def test_a_pair_has_the_place_of_its_document() -> None:
    (prompt,) = prepared(rerank("one", "two words", ""), SCORE).prompts
    assert prompt.pooling is not None
    assert prompt.pooling.pairs == [("a query", text) for text in ("one", "two words", "")]
    encode = model().dialect.tokenizer.encode
    query, one = encode("a query").ids, encode("one").ids
    assert prompt.pooling.seconds == [len(query), len(query), 0]
    first = array("I", prompt.tokens)[: prompt.pooling.lengths[0]].tolist()
    assert first == [*query, *one]
    assert sum(prompt.pooling.lengths) == prompt.count
    assert not prompt.sequence_hashes


def test_a_model_that_embeds_gets_each_text_once() -> None:
    (prompt,) = prepared(rerank("one", "two", "one"), EMBED).prompts
    assert prompt.pooling is not None
    assert (prompt.pooling.task, len(prompt.pooling.lengths)) == (EMBED, 3)
    assert prompt.pooling.pairs == []


@pytest.mark.parametrize("task", [SCORE, EMBED])
def test_long_documents_are_errors_unless_they_are_cut(task: str) -> None:
    with pytest.raises(ContextExceeded):
        prepared(rerank("word " * 40), task)
    assert prepared(rerank("word " * 40, max_tokens_per_doc=5), task).prompt_tokens < CONTEXT


def test_a_long_query_counts_for_each_document() -> None:
    with pytest.raises(InvalidRequest) as error:
        rerank(*["a"] * 2000, query="word " * 2000)
    assert error.value.param == "query"
    assert rerank(*["a"] * 100, query="word " * 2000).pairs


def test_groups_fit_the_context() -> None:
    inputs = [EncodedInput(bytes(4 * count)) for count in (12, 8, 1, 20, *[1] * 17)]
    groups = list(grouped(inputs, None, EMBED, CONTEXT, 0))
    assert [group.pooling.lengths for group in groups if group.pooling] == [
        [12, 8],
        [1],
        [20],
        [1] * 16,
        [1],
    ]


def test_cosines() -> None:
    vectors = [array("f", row).tobytes() for row in ([2, 0], [1, 1], [0, 0])]
    found = similarities([("a", "b"), ("a", "a"), ("a", "c")], vectors)
    values = [array("f", each)[0] for each in found]
    assert values == pytest.approx([0.5**0.5, 1.0, 0.0])
