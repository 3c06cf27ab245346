"""Detection of a broken index."""

from support.routing import sequence

from kvmesh.router.scoring.overlaps import OverlapWatch


def test_an_index_without_overlaps_is_broken_until_one_is_found() -> None:
    watch = OverlapWatch(settle_s=10.0, threshold=3)
    prompt = sequence(1, 2)
    broken = []
    for now in (0, 5, 11, 12, 13, 14):
        watch.observe(prompt, False, float(now))
        broken.append(watch.broken)
    assert broken == [False, False, False, False, True, True]
    watch.observe(prompt, True, 15.0)
    for now in (16, 17, 18):
        assert not watch.broken
        watch.observe(prompt, False, float(now))
    assert watch.broken


def test_new_prompts_without_overlaps_do_not_count() -> None:
    watch = OverlapWatch(settle_s=10.0, threshold=3)
    for n in range(100):
        watch.observe(sequence(n), False, float(n))
    assert not watch.broken
