"""Fine-tuning and the linear probe as a method."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from ropaws.core.distributed import Rank
from ropaws.core.optimizers import OptimConfig, build_optimizer
from ropaws.core.records import Batch, Support
from ropaws.embedding.backbones import ModelConfig, build_encoder
from ropaws.methods import FineTune, LabeledEmbeddings
from ropaws.methods import classifier as row_losses
from ropaws.pool.augment import AugmentConfig
from ropaws.training.loop import fit

CLASSES = 4
CONFIG = ModelConfig(backbone="small-8", projection_hidden=6, projection_dims=5)


def make_model(method, *, zeros=False):
    torch.manual_seed(0)
    model = method.build(build_encoder(CONFIG, channels=3), classes=CLASSES, pool=10)
    if not zeros:
        torch.nn.init.normal_(model.linear.weight)
        torch.nn.init.normal_(model.linear.bias)
    return model


def make_batch(rows=slice(None), step=0):
    random = torch.Generator().manual_seed(1)
    images = torch.randn(8, 3, 12, 12, generator=random)
    classes = torch.tensor([0, 1, 2, 3, 3, 2, 2, 0])
    labeled = Support(images, F.one_hot(classes, CLASSES).float(), torch.arange(8), classes)
    return Batch(step, 10, {}, torch.empty(0, dtype=torch.long), Support(*(part[rows] for part in labeled)))


def by_hand(model, images):
    """Logits on the first projection layer, with the statistics of the batch."""
    backbone, layers = model.encoder.backbone, model.encoder.projection
    hidden = F.linear(backbone(images), layers[0].weight, layers[0].bias)
    spread = hidden.var(dim=0, correction=0) + layers[1].eps
    hidden = (hidden - hidden.mean(dim=0)) / spread.sqrt() * layers[1].weight + layers[1].bias
    return hidden.clamp_min(0) @ model.linear.weight.T + model.linear.bias


def test_the_loss_is_the_cross_entropy_of_a_linear_layer_on_the_first_projection_layer():
    batch = make_batch()
    model = make_model(FineTune()).train()
    with torch.no_grad():
        logits = by_hand(copy.deepcopy(model), batch.labeled.images)
        probs = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
    expected = sum(-math.log(probs[row, batch.labeled.classes[row]]) for row in range(8)) / 8
    losses = FineTune().step(model, batch)
    assert float(losses.total.detach()) == pytest.approx(expected, rel=1e-4)
    assert losses.parts["cross_entropy"] == losses.total
    losses.total.backward()
    assert all(weight.grad.abs().sum() > 0 for weight in model.encoder.backbone.parameters())


def test_the_linear_layer_starts_at_zero_so_that_all_classes_are_alike():
    losses = FineTune().step(make_model(FineTune(), zeros=True).train(), make_batch())
    assert float(losses.total.detach()) == pytest.approx(math.log(CLASSES), rel=1e-6)


@pytest.mark.parametrize("linear", [True, False])
def test_the_linear_probe_leaves_the_encoder_untouched(linear):
    method = FineTune(linear=linear)
    model = make_model(method)
    before = copy.deepcopy(model.state_dict())
    optimizer = build_optimizer(model, OptimConfig(**FineTune.optim))
    for _ in fit(model, method, [make_batch(step=step) for step in range(3)], optimizer, lambda step: 0.1):
        pass
    same = {name: torch.equal(value, before[name]) for name, value in model.state_dict().items()}
    assert not same["linear.weight"]
    assert not same["linear.bias"]
    encoder = {name: kept for name, kept in same.items() if name.startswith("encoder.")}
    assert all(encoder.values()) == linear  # weights and batch statistics
    trained = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    assert (trained == {id(weight) for weight in model.linear.parameters()}) == linear


def test_the_second_half_of_the_projection_is_not_trained():
    model = make_model(FineTune()).train()
    FineTune().step(model, make_batch()).total.backward()
    assert model.encoder.projection[0].weight.grad is not None
    assert model.encoder.projection[3].weight.grad is None


def test_two_processes_with_unequal_rows_have_the_loss_and_gradient_of_one(monkeypatch):
    """Loss and gradients are averaged over processes; a mean over each one's rows would weigh rows unlike."""
    method = FineTune(linear=True)  # in evaluation mode: batch statistics are the matter of synced norms
    model = make_model(method).train()

    def run(rows):
        loss = method.step(model, make_batch(rows)).total
        return loss.detach(), torch.autograd.grad(loss, model.linear.weight)[0]

    one, slope = run(slice(None))
    monkeypatch.setattr(row_losses, "place", lambda: Rank(0, 2))
    monkeypatch.setattr(row_losses, "sum_constants", lambda _: torch.tensor(8.0))
    parts = [run(slice(0, 5)), run(slice(5, 8))]
    torch.testing.assert_close(sum(loss for loss, _ in parts) / 2, one)
    torch.testing.assert_close(sum(gradient for _, gradient in parts) / 2, slope)
    unscaled = sum(loss * 4 / rows for (loss, _), rows in zip(parts, (5, 3), strict=True)) / 2
    assert abs(float(unscaled - one)) > 1e-3


def test_it_predicts_by_its_linear_layer():
    model = make_model(FineTune()).eval()
    images = make_batch().labeled.images
    with torch.no_grad():
        features, logits = model(images)
        embedding = FineTune().embed(model, images)
        support = LabeledEmbeddings(embedding[:4], torch.arange(4), CLASSES)
        outputs = FineTune().predict(model, images, support)
        near = FineTune().classify(embedding, support)
    torch.testing.assert_close(embedding, F.normalize(features, dim=1))
    torch.testing.assert_close(outputs.probs, logits.softmax(dim=1))
    torch.testing.assert_close(outputs.embedding, embedding)
    torch.testing.assert_close(outputs.in_domain, near.in_domain)
    assert not torch.allclose(outputs.probs, near.probs)


def test_labeled_images_are_cropped_and_flipped_and_nothing_else():
    asked = AugmentConfig(size=20, scale=(0.5, 1.0), jitter=0.9, grayscale=0.3, blur=0.5, solarize=0.4)
    view = FineTune().labeled_view(asked)
    assert (view.size, view.scale, view.flip) == (20, (0.5, 1.0), 0.5)
    assert {view.jitter, view.grayscale, view.blur, view.solarize, view.equalize} == {0.0}
    assert FineTune().views(asked) == {}
