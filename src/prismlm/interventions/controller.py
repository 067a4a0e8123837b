"""A controller: one scale for each of a few prototypes, kept in a file.

    α′_i = s_i α_i        z′ = z + Σ_i (s_i − 1) α_i p_i        s_i ≥ 0

so a logit changes by exactly scale · Σ (s_i − 1) α_i W p_i, and every other prototype and the
residual stay. Source: *Prototype Language Models*, arXiv 2607.00510.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from prismlm.errors import FormatError, InputError, check_number, check_path, check_whole, shown
from prismlm.files import json_text
from prismlm.outputs import output_file

FORMAT_VERSION = 1
META = "prismlm_controller"


@dataclass(frozen=True)
class Controller:
    """α′_i = s_i α_i for the listed prototypes, wherever they are active.

    Attributes:
        scales: (prototype, s) pairs, each prototype once; sorted when made.
        head: :func:`prismlm.lens.layout.prototypes_fingerprint` of the head that it was made for;
            "" fits any head with these prototypes.
        description: for people.
        made: how it was made, as JSON values.
    """

    scales: tuple[tuple[int, float], ...]
    head: str = ""
    description: str = ""
    made: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        limits, scales = "a number of 0 or more, since activations are not negative", {}
        for pair in self.scales:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                expected = "a prototype and its scale, such as (412, 0.5)"
                raise InputError(f"a pair of scales is {shown(pair)}: expected {expected}.")
            number = check_whole("the prototype", pair[0])
            if number in scales:
                raise InputError(f"prototype {number} has two scales: give it one.")
            name = f"the scale of prototype {number}"
            scales[number] = check_number(name, pair[1], limits, lambda s: s >= 0)
        object.__setattr__(self, "scales", tuple(sorted(scales.items())))

    @property
    def prototypes(self) -> list[int]:
        """The listed prototypes, ascending."""
        return [number for number, _ in self.scales]

    @property
    def factors(self) -> list[float]:
        """s of each listed prototype."""
        return [factor for _, factor in self.scales]

    def check_head(self, fingerprint: str) -> None:
        """Raise InputError unless the controller is for the head of this fingerprint."""
        if self.head and self.head != fingerprint:
            name = f" {self.description!r}" if self.description else ""
            raise InputError(
                f"the controller{name} was made for the prototype head {self.head[:8]}, and this "
                f"model has {fingerprint[:8]}, whose prototypes mean other things: open the model "
                "it was made for, or calibrate one for this model."
            )

    def save(self, path: Path | str) -> None:
        """Write ``prototypes`` int64 and ``scales`` float32 with metadata, as safetensors."""
        meta = {"format_version": FORMAT_VERSION, "head": self.head}
        meta |= {"description": self.description, "made": dict(self.made)}
        tensors = {
            "prototypes": torch.tensor(self.prototypes, dtype=torch.int64),
            "scales": torch.tensor(self.factors, dtype=torch.float32),
        }
        with output_file(path) as temporary:
            save_file(tensors, str(temporary), metadata={META: json_text(meta)})

    @classmethod
    def load(cls, path: Path | str) -> Controller:
        """Read a controller. FormatError, naming the file, for one that is not valid."""
        path = check_path("the controller", path)
        try:
            with safe_open(str(path), "pt") as file:
                meta = json.loads((file.metadata() or {})[META])
                prototypes = file.get_tensor("prototypes").tolist()
                scales = file.get_tensor("scales").tolist()
            version = meta["format_version"]
            if version != FORMAT_VERSION:
                raise FormatError(
                    f"{path} has format version {version!r}; this prismlm reads {FORMAT_VERSION}: "
                    "use the prismlm that wrote it, or make it anew."
                )
            pairs = tuple(zip(prototypes, scales, strict=True))
            return cls(pairs, meta["head"], meta["description"], meta["made"])
        except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
            raise FormatError(
                f"{path} is not a controller ({error}): expected a file that `prismlm calibrate` "
                "or `prismlm suppress` writes."
            ) from error
