"""A small random network of timm's that stands for a pretrained one."""

import pytest
import torch

from ropaws.embedding import pretrained
from ropaws.embedding.pretrained import NETWORKS
from ropaws.embedding.timm_backbone import import_timm

try:
    timm = import_timm()
except ValueError:
    timm = None
needs_timm = pytest.mark.skipif(timm is None, reason="timm is not installed")
TINY = "vit_tiny_patch14_dinov2.ours"


@pytest.fixture
def tiny_vit(monkeypatch):
    """A random transformer of DINOv2's kind with a written configuration, under a name in the table."""
    from timm.models import _registry as registry
    from timm.models.vision_transformer import VisionTransformer

    def vit_tiny_patch14_dinov2(pretrained=False, **options):
        if pretrained:
            raise OSError("the hub cannot be reached\nmore lines")
        taken = ("num_classes", "in_chans", "dynamic_img_size")
        options = {name: value for name, value in options.items() if name in taken}
        shape = {"patch_size": 14, "embed_dim": 24, "depth": 2, "num_heads": 2, "init_values": 1e-5}
        return VisionTransformer(img_size=56, **shape, **options)

    config = timm.models.PretrainedCfg(
        input_size=(3, 56, 56), interpolation="bicubic", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6),
        hf_hub_id="timm/none",
    )  # fmt: skip
    name = TINY.partition(".")[0]
    monkeypatch.setitem(registry._model_entrypoints, name, vit_tiny_patch14_dinov2)
    monkeypatch.setitem(registry._model_pretrained_cfgs, name, config)
    monkeypatch.setitem(registry._model_pretrained_cfgs, TINY, config)
    monkeypatch.setitem(NETWORKS, "tiny-dino", pretrained.Network(TINY, "MIT", 1, 48, 28, 56))
    monkeypatch.setattr("ropaws.embedding.backbones.check_timm_name", lambda _name: None)
    monkeypatch.setattr("ropaws.embedding.timm_backbone.check_hub", lambda _name: None)
    torch.manual_seed(0)
    return vit_tiny_patch14_dinov2(num_classes=0, dynamic_img_size=True).eval()
