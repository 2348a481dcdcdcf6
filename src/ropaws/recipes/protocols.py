"""Protocols of the literature by name: data, labels, settings at full scale, and the published figures.

Published figures are accuracies in percent, as the papers print them. They are not all comparable: IOMatch's
are those of the checkpoint that is best on the test set, OpenCoS's the median of the last five evaluations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ropaws.core.labels import nearest
from ropaws.methods import PAWS, IOMatch, Method, OpenMatch, ProSub, RoPAWS, Supervised
from ropaws.recipes.paper import cifar, demo
from ropaws.run.config import RunConfig

FROM_SCRATCH = "garments-scratch"  # of the demo
Figures = Mapping[int, Mapping[str, str]]  # labels per class -> method -> accuracy as published


@dataclass(frozen=True)
class Protocol:
    """Data, labels and settings on which methods are compared."""

    name: str
    about: str
    sources: tuple[str, ...]  # mixes; several for the control
    labels: tuple[int, ...]  # per class
    pools: tuple[int, ...]  # training images of each mix, which make an epoch
    published: Figures
    selection: str = ""  # how the published figures were chosen
    batch: int = 256
    methods: Mapping[str, Method] = field(default_factory=dict)  # settings of the papers there, by method
    weight_decay: float | None = None  # of the FixMatch family there, where it is not that of CIFAR-10

    def base(self, labels: int, source: str) -> RunConfig:
        """The settings at full scale: those of the paper's CIFAR runs."""
        pool = self.pools[self.sources.index(source)]
        return cifar(source, pool, labels_per_class=labels, batch=self.batch)


class _FromScratch(Protocol):
    """The embedded garments with the recipe of the demo: minutes on two CPU cores."""

    def base(self, labels: int, source: str) -> RunConfig:
        config = demo()
        return replace(config, data=replace(config.data, source=source, labels_per_class=labels))


def _from_scratch() -> Protocol:
    """The other methods have what is not RoPAWS's own: the contrastive loss, and the pool calibration."""
    ours = demo().method
    assert isinstance(ours, RoPAWS)
    paws = PAWS(
        judge=ours.judge,
        contrast_weight=ours.contrast_weight,
        contrast_temperature=ours.contrast_temperature,
    )
    methods: dict[str, Method] = {"supervised": Supervised(judge=ours.judge), "paws": paws, "ropaws": ours}
    about = "the embedded garments, half of the pool out-of-class, a small network from scratch"
    return _FromScratch(FROM_SCRATCH, about, ("fashion-demo",), (4, 25), (5_000,), {}, methods=methods)


def _iomatch(name: str, source: str, published: Figures, *, batch: int = 256) -> Protocol:
    about = f"IOMatch (Li et al., ICCV 2023): {source}, all training images in the pool"
    chosen = "best checkpoint on the test set, three seeds (IOMatch, Table 1)"
    hundred = "cifar100" in source
    methods: dict[str, Method] = {
        "iomatch": IOMatch(alignment=128),
        "openmatch": OpenMatch(consistency_weight=1.0),
        "prosub": ProSub(self_weight=15.0),
    }
    return Protocol(
        name,
        about,
        (source,),
        (4, 25),
        (50_000,),
        published,
        chosen,
        batch,
        methods if hundred else {},
        1e-3 if hundred else None,
    )


def _opencos(source: str, extra: str, published: Mapping[str, str]) -> Protocol:
    mix = f"opencos:{source}+{extra}"
    about = f"OpenCoS (Park et al., 2021): 10,000 images of {source} and 40,000 of {extra}"
    batch = 256 if source == "cifar10" else 1024
    chosen = "rivals start from SimCLR weights (RoPAWS, Tables 3 and 8)"
    return Protocol(mix.replace(":", "-"), about, (mix,), (4, 25), (50_000,), {25: published}, chosen, batch)


def _paper(source: str, extra: str, pool: int, published: Figures) -> Protocol:
    mix = f"{source}+{extra}"
    labels = (4, 25, 400) if source == "cifar10" else (25,)
    batch = 256 if source == "cifar10" else 1024
    about = f"RoPAWS (Mo et al., ICLR 2023): all of {source} and all of {extra}"
    return Protocol(f"paper-{mix}", about, (mix,), labels, (pool,), published, "RoPAWS, Table 3", batch)


PROTOCOLS: dict[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        _from_scratch(),
        _iomatch(
            "iomatch-cifar10-6-4",
            "cifar10-animals",
            {
                4: {
                    "fixmatch": "81.6 ± 6.6", "uasd": "35.3 ± 1.1", "ds3l": "39.1 ± 1.2",
                    "openmatch": "43.6 ± 3.3", "iomatch": "89.7 ± 2.0",
                },
                25: {
                    "fixmatch": "92.9 ± 0.8", "uasd": "56.4 ± 1.3", "ds3l": "51.8 ± 1.1",
                    "openmatch": "66.3 ± 1.9", "iomatch": "93.9 ± 0.2",
                },
            },
        ),
        _iomatch(
            "iomatch-cifar100-20-80",
            "iomatch:cifar100-20-80",
            {
                4: {
                    "fixmatch": "46.3 ± 0.6", "uasd": "29.8 ± 4.3", "ds3l": "19.7 ± 2.0",
                    "openmatch": "37.5 ± 2.7", "iomatch": "53.7 ± 2.1",
                },
                25: {
                    "fixmatch": "66.5 ± 0.7", "uasd": "53.8 ± 0.7", "ds3l": "41.8 ± 1.5",
                    "openmatch": "62.7 ± 1.8", "iomatch": "67.3 ± 1.1",
                },
            },
        ),
        _iomatch(
            "iomatch-cifar100-50-50",
            "iomatch:cifar100-50-50",
            {
                4: {
                    "fixmatch": "48.9 ± 5.1", "uasd": "29.1 ± 1.4", "ds3l": "21.6 ± 0.5",
                    "openmatch": "33.7 ± 0.4", "iomatch": "56.3 ± 2.3",
                },
                25: {
                    "fixmatch": "68.8 ± 0.9", "uasd": "54.2 ± 1.1", "ds3l": "47.4 ± 0.6",
                    "openmatch": "66.5 ± 0.5", "iomatch": "69.8 ± 0.6",
                },
            },
        ),
        _iomatch(
            "iomatch-cifar100-80-20",
            "iomatch:cifar100-80-20",
            {
                4: {
                    "fixmatch": "43.1 ± 1.2", "uasd": "26.4 ± 2.2", "ds3l": "20.1 ± 0.5",
                    "openmatch": "28.5 ± 1.2", "iomatch": "50.8 ± 1.0",
                },
                25: {
                    "fixmatch": "64.4 ± 0.5", "uasd": "50.3 ± 0.6", "ds3l": "40.5 ± 1.0",
                    "openmatch": "61.2 ± 0.8", "iomatch": "64.8 ± 0.5",
                },
            },
            batch=512,
        ),
        _paper(
            "cifar10", "cifar100", 100_000,
            {
                25: {
                    "fixmatch": "78.1", "openmatch": "41.9", "paws": "78.7 ± 2.9", "ropaws": "85.6 ± 3.0",
                },
                400: {
                    "fixmatch": "94.1", "openmatch": "94.1", "paws": "91.2 ± 0.3", "ropaws": "93.9 ± 0.1",
                },
            },
        ),
        _paper("cifar10", "tiny-imagenet", 150_000, {25: {"paws": "60.4 ± 5.3", "ropaws": "83.1 ± 1.8"}}),
        _paper("cifar10", "svhn", 123_257, {25: {"paws": "47.1 ± 0.4", "ropaws": "81.2 ± 0.4"}}),
        _paper("cifar100", "svhn", 123_257, {25: {"paws": "36.9 ± 0.2", "ropaws": "51.5 ± 1.7"}}),
        _paper("cifar100", "tiny-imagenet", 150_000, {25: {"paws": "46.0 ± 0.5", "ropaws": "59.8 ± 1.3"}}),
        _opencos("cifar10", "cifar100", {}),
        _opencos(
            "cifar10", "svhn",
            {
                "fixmatch": "68.0 ± 0.7", "uasd": "66.7 ± 1.0", "realmix": "58.2 ± 5.3", "ds3l": "50.0 ± 8.3",
                "openmatch": "74.7 ± 1.0", "opencos": "79.0 ± 1.1",
            },
        ),
        _opencos(
            "cifar10", "tiny-imagenet",
            {
                "fixmatch": "70.5 ± 1.2", "uasd": "74.0 ± 0.4", "realmix": "69.2 ± 2.3", "ds3l": "69.1 ± 2.3",
                "openmatch": "78.0 ± 0.8", "opencos": "82.5 ± 1.3",
            },
        ),
        _opencos(
            "cifar100", "svhn",
            {
                "fixmatch": "41.7 ± 1.3", "uasd": "39.5 ± 0.8", "realmix": "44.1 ± 1.0", "ds3l": "29.0 ± 1.0",
                "openmatch": "29.0 ± 1.3", "opencos": "49.2 ± 1.2",
            },
        ),
        _opencos(
            "cifar100", "tiny-imagenet",
            {
                "fixmatch": "46.0 ± 1.0", "uasd": "44.6 ± 0.8", "realmix": "47.6 ± 1.4", "ds3l": "40.2 ± 0.9",
                "openmatch": "32.2 ± 2.6", "opencos": "54.0 ± 1.8",
            },
        ),
        Protocol(
            "control",
            "a fixed in-class pool of 10,000 CIFAR-10 images with 0, 1, 2 and 4 times as many of CIFAR-100",
            ("control-0x", "control-1x", "control-2x", "control-4x"),
            (4, 25),
            (10_000, 20_000, 30_000, 50_000),
            {},
        ),
    )
}  # fmt: skip


def get_protocol(name: str) -> Protocol:
    if name not in PROTOCOLS:
        close = nearest(name, PROTOCOLS)
        raise ValueError(
            f"--protocol: unknown protocol {name!r}, did you mean {close!r}? `ropaws bench --list` shows all"
        )
    return PROTOCOLS[name]


def _recipe(protocol: Protocol, source: str, labels: int) -> Callable[[], RunConfig]:
    def recipe() -> RunConfig:
        return protocol.base(labels, source)

    config = recipe()
    figures = protocol.published.get(labels, {})
    listed = ", ".join(f"{method} {value}" for method, value in figures.items() if method != "ropaws")
    known = f"Published accuracy in percent: {listed} ({protocol.selection})." if listed else ""
    own = (
        f"Paper: RoPAWS {figures['ropaws']} %." if "ropaws" in figures else "The paper has no figure for it."
    )
    recipe.__doc__ = (
        f"{protocol.about}; {labels} labels per class.\n\n    {known}\n    {own}\n"
        f"    {config.train.steps:,} steps of {config.train.batch:,}: days on one current GPU."
    )
    return recipe


def _name(protocol: Protocol, source: str, labels: int) -> str:
    base = protocol.name if len(protocol.sources) == 1 else source
    return f"{base}-{labels}"


# The paper's own mixes have recipes of their own already.
PROTOCOL_RECIPES: dict[str, Callable[[], RunConfig]] = {
    _name(protocol, source, labels): _recipe(protocol, source, labels)
    for protocol in PROTOCOLS.values()
    if not protocol.name.startswith("paper-") and protocol.name != FROM_SCRATCH
    for source in protocol.sources
    for labels in protocol.labels
}
