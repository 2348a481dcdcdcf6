"""Protocols by name: mixes that exist, labels that recipes know, published figures of known methods."""

import pytest

from ropaws import recipes
from ropaws.bench.bench import POOL as DEMO_POOL
from ropaws.methods import METHODS
from ropaws.pool.datasets.catalog import MIXES
from ropaws.pool.sources import DataConfig, load_corpus
from ropaws.recipes.protocols import FROM_SCRATCH, PROTOCOLS, get_protocol


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_every_protocol_is_whole(protocol):
    assert len(protocol.pools) == len(protocol.sources)
    assert set(protocol.published) <= set(protocol.labels)
    for figures in protocol.published.values():
        assert set(figures) <= set(METHODS)
    embedded = protocol.name == FROM_SCRATCH
    for source in protocol.sources:
        assert source in ((DEMO_POOL,) if embedded else MIXES)
        for labels in protocol.labels:
            config = protocol.base(labels, source)
            assert config.data.source == source
            assert config.data.labels_per_class == labels
            assert config.model.backbone == ("small" if embedded else "wrn-28-2")


def test_pools_are_those_of_the_mixes():
    """An epoch is as long as the pool, so its size decides the length of training."""
    for protocol in PROTOCOLS.values():
        for source, pool in zip(protocol.sources, protocol.pools, strict=True):
            mix = MIXES.get(source)
            if mix is None:
                assert pool == len(load_corpus(DataConfig(source=source)).train_images)
            elif mix.in_class is not None:
                assert pool == mix.in_class + mix.out_of_class


def test_protocols_are_recipes_with_the_published_figures():
    text = recipes.RECIPES["iomatch-cifar100-50-50-25"].__doc__
    assert "iomatch 69.8 ± 0.6" in text
    assert "best checkpoint on the test set" in text
    assert recipes.get("opencos-cifar10+svhn-25").data.source == "opencos:cifar10+svhn"
    assert {f"control-{times}x-4" for times in (0, 1, 2, 4)} <= set(recipes.RECIPES)
    with pytest.raises(ValueError, match="did you mean 'iomatch-cifar100-20-80'"):
        get_protocol("iomatch-cifar100-20-8")
