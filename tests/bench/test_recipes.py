"""Recipes: what the paper says of each setting."""

import re

import pytest

from ropaws import recipes
from ropaws.bench.entries import phases_of
from ropaws.pool.datasets.catalog import DATASETS, MIXES
from ropaws.run.config import from_json, to_json


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_says_what_to_expect_and_what_it_costs(name):
    text = " ".join(recipes.RECIPES[name].__doc__.split())
    assert re.search(r"Paper[^:]*: RoPAWS \d+\.\d|The paper has no figure|README has figures", text)
    assert re.search(r"GPU|minutes|times the cost", text)
    config = recipes.get(name)
    if match := re.search(r"([\d,]+) steps of ([\d,]+)", text):
        steps, batch = (int(value.replace(",", "")) for value in match.groups())
        assert (config.train.steps, config.train.batch) == (steps, batch)
    assert config.data.source in {**DATASETS, **MIXES}
    assert from_json(to_json(config)) == config


def test_the_benchmark_keeps_its_short_runs_whatever_the_demo_does():
    """The figures of docs/benchmark.md are of these settings; the demo adds a contrastive loss."""
    base, demo = recipes.scratch(), recipes.demo()
    assert base.method.contrast_weight == 0
    assert phases_of("ropaws", frozen=False)[0].method == base.method
    assert (base.augment.scale, base.augment.small_crops, base.train.steps) == ((0.75, 1.0), 2, 250)
    assert demo.method.contrast_weight > 0
    assert (demo.model, demo.data, demo.support) == (base.model, base.data, base.support)


def test_small_scale_settings():
    """Appendix B: 1280 supports for CIFAR-10, 100 classes and batches of 1024 for CIFAR-100."""
    for name in recipes.RECIPES:
        if name.startswith("cifar10-"):
            config = recipes.get(name)
            assert 10 * config.support.images_per_class * config.support.views == 1280
            assert config.optim.warmup * 60 == config.train.steps  # 10 of 600 epochs
            assert config.method.prior_temperature == 0.1
    hundred = recipes.get("cifar100-tiny-25")
    assert (hundred.train.batch, hundred.support.images_per_class, hundred.support.classes) == (
        1024,
        16,
        None,
    )


def test_large_scale_settings():
    inat, pretrained = recipes.get("semi-inat"), recipes.get("semi-inat-pretrained")
    assert (inat.support.classes, inat.support.images_per_class, inat.support.views) == (768, 5, 1)
    assert (inat.method.reweight_power, pretrained.method.reweight_power) == (1.0, 3.0)
    assert inat.model.init is None
    assert pretrained.model.init is not None
    for name, fraction in (("imagenet-1", 0.01), ("imagenet-10", 0.1)):
        config = recipes.get(name)
        assert (config.support.classes, config.support.images_per_class) == (960, 7)
        assert config.data.label_fraction == fraction
        assert config.method.prior_temperature == 3.0
        assert config.augment.small_scale == (0.05, 0.14)
