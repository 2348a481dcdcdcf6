import json
from dataclasses import replace

import pytest

from ropaws import recipes
from ropaws.methods import METHODS, PAWS
from ropaws.run.config import RunConfig, TrainConfig, from_json, read_config, to_json


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_recipes_survive_json(name):
    config = recipes.get(name)
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize("method", METHODS)
def test_every_method_survives_json(method):
    config = RunConfig(method=METHODS[method]())
    assert to_json(config)["method"]["name"] == method
    assert from_json(to_json(config)) == config


def test_left_out_fields_take_their_defaults():
    config = from_json({"method": {"name": "paws", "temperature": 1}, "train": {"steps": 5}})
    assert config == RunConfig(method=PAWS(temperature=1.0), train=TrainConfig(steps=5))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "a config is a JSON object"),
        ({"trian": {}}, "unknown field 'trian', did you mean 'train'"),
        ({"train": {"step": 5}}, r"unknown field 'train\.step', did you mean 'steps'"),
        ({"train": {"steps": 1.5}}, r"train\.steps must be int, got 1\.5"),
        ({"train": {"steps": True}}, r"train\.steps must be int, got True"),
        ({"train": {"steps": 0}}, r"train\.steps must be at least 1, got 0"),
        ({"train": 3}, "train must be an object, got 3"),
        ({"train": {"precision": "fp8"}}, r"train\.precision must be .*got 'fp8'"),
        ({"augment": {"scale": [0.5]}}, r"augment\.scale must be .*got \[0\.5\]"),
        ({"method": {"name": "ropaw"}}, "unknown method 'ropaw', did you mean 'ropaws'"),
        ({"method": "paws"}, "method must be an object with a 'name'"),
        ({"method": {"name": "paws", "label_ratio": 5}}, r"unknown field 'method\.label_ratio'"),
        (
            {"method": {"name": "ropaws", "prior_temperature": "automatic"}},
            r"method\.prior_temperature must be",
        ),
    ],
)
def test_a_wrong_config_says_which_field_and_why(values, words):
    with pytest.raises(ValueError, match=words):
        from_json(values)


def test_a_long_value_is_cut_off_in_an_error():
    with pytest.raises(ValueError, match=r"train\.steps must be int, got 'x{79}$"):
        from_json({"train": {"steps": "x" * 10_000}})


def test_files_are_named_in_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file at"):
        read_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"train": {"steps": 0}}')
    with pytest.raises(ValueError, match=r"config\.json: train\.steps must be"):
        read_config(tmp_path / "config.json")


def test_cifar_recipes_are_the_papers():
    for name, labels, images, views in (
        ("cifar10-4", 4, 4, 32),
        ("cifar10-25", 25, 16, 8),
        ("cifar10-400", 400, 64, 2),
    ):
        config = recipes.get(name)
        assert config.data.labels_per_class == labels
        assert (config.support.images_per_class, config.support.views) == (images, views)
        assert 10 * images * views == 1280
        assert config.train.steps == 117_000
        assert config.model.backbone == "wrn-28-2"
        assert config.augment.small_crops == 6
        assert (config.optim.start, config.optim.peak, config.optim.end) == (0.8, 3.2, 0.032)
        assert "Paper: RoPAWS" in recipes.RECIPES[name].__doc__


def test_an_unknown_recipe_gets_the_nearest_name():
    with pytest.raises(ValueError, match="unknown recipe 'cifar10-40', did you mean 'cifar10-4"):
        recipes.get("cifar10-40")


def test_a_seed_is_set():
    assert recipes.with_seed(recipes.demo(), 5) == replace(
        recipes.demo(), train=replace(recipes.demo().train, seed=5)
    )
