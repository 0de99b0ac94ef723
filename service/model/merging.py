"""Merges an adapter into the weights of a model while they are loaded.

A change concerns a parameter of the model's transformers class, whose name the family maps to the server's tensors as
it maps names in files. So it does not matter whether the files name a tensor differently or divide it in another way.
Everything is computed in float32, and rounded or quantised once by the code that lays the weights out. The formulas are
those of PEFT's `merge_and_unload`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from families import CheckpointError, Target
from service.model.adapter import Adapter, Added, Change, LowRank, Rows, Shape
from service.model.formats.tensors import FormatError, StoredWeight, listed
from service.model.modelconfig import ModelConfig
from service.model.weight_sources import EMBEDDINGS, HEAD, Source, expected_weights, joined, made, untied

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

Read = Callable[[str], "Tensor"]
"""Reads a tensor of an adapter, in float32."""
Step = Callable[["Tensor", int | None], "Tensor"]
"""Makes one change of a weight in any floating-point dtype, or of the entry of that index of a stack. Does not write to
the weight."""


class Merge(NamedTuple):
    """A change of one of the server's tensors."""

    change: Change
    target: Target
    """How the parameter contributes to the tensor."""
    shape: Shape
    """Of the parameter."""

    @property
    def by_entry(self) -> bool:
        """Whether it changes the entries of a stack one by one."""
        return self.target.how == "stack" or (isinstance(self.change, LowRank) and self.change.stacked(self.shape))

    def step(self, read: Read) -> Step:
        change, target = self.change, self.target
        if isinstance(change, LowRank):
            return _low_rank(change, target, self.shape, read)
        values = read(change.tensor.name)
        if isinstance(change, Added):
            added = _made(values * change.scale, target._replace(offset=0.0))
            return lambda weight, entry: weight + added
        if isinstance(change, Rows):
            ids = list(change.ids)

            def replaced(weight: Tensor, entry: int | None) -> Tensor:
                found = weight.float().clone()
                found[ids] = values
                return found

            return replaced
        if target.how in ("whole", "part"):  # of a whole stack, if there is an entry
            return lambda weight, entry: _made(values if entry is None else values[entry], target)
        return lambda weight, entry: _made(values, target)


def _low_rank(change: LowRank, target: Target, shape: Shape, read: Read) -> Step:
    down, up = read(change.tensor.name), read(change.up.name)
    lengths = None if change.magnitude is None else read(change.magnitude.name).flatten()
    target = target._replace(offset=0.0)
    if stacked := change.stacked(shape):
        transposed = change.transposed(shape)
        down = down.unflatten(0, (shape[0], -1))  # [experts, r, in]
        up = up.unflatten(1, (-1, shape[0])).permute(2, 0, 1).contiguous()  # [experts, out, r]

    def step(weight: Tensor, entry: int | None) -> Tensor:
        if stacked:
            product = up[entry] @ down[entry]
            product = product.t() if transposed else product
        elif change.table:
            product = (up @ down).t()
        else:
            product = (up.flatten(1) @ down.flatten(1)).view(-1, *down.shape[1:])
        changed = _made(product * change.scale, target) + weight  # float32, whatever dtype the weight has
        if lengths is None:
            return changed
        if change.table:
            return changed * (lengths / changed.norm(dim=0))
        factors = _made(lengths, target) / changed.flatten(1).norm(dim=1)
        return changed * factors.view(-1, *[1] * (changed.dim() - 1))

    return step


def _made(tensor: Tensor, target: Target) -> Tensor:
    return cast("Tensor", made(tensor, target))


class Merging:
    """The changes of one weight, with the tensors that they take."""

    def __init__(self, merges: Sequence[Merge], read: Read) -> None:
        self.by_entry = any(merge.by_entry for merge in merges)
        self._steps = [(merge, merge.step(read)) for merge in merges]

    def __call__(self, weight: Tensor, place: int | None = None) -> Tensor:
        """The weight after all changes, float32. `place`: of an entry of a stack, or of one of several tensors that are
        joined. Raises CheckpointError if the result has numbers that are not finite."""
        for merge, step in self._steps:
            if merge.target.how not in ("stack", "joined") or merge.target.place == place:
                weight = step(weight, place)
        weight = weight.float()
        if not bool(weight.isfinite().all()):
            names = ", ".join(merge.change.tensor.name for merge, _ in self._steps)
            raise CheckpointError(f"adapter: with {names}, numbers of the weight are NaN or infinite")
        return weight


def assembled(source: Source, shape: Shape, read: Callable[[int], Any], merging: Merging | None) -> Any:
    """The native tensor, or a `Stack`, made from the stored tensors of its source. `read`: returns the one of that
    index; `shape`: of the result."""
    from kernels.linear import Stack  # imported here because it needs torch

    if source.target.how == "stack":
        return Stack(read if merging is None else lambda index: merging(read(index), index), shape)
    if source.target.how == "joined":
        pieces = range(len(source.names))
        return joined([read(index) if merging is None else merging(read(index), index) for index in pieces])
    whole = made(read(0), source.target)
    if merging is None:
        return whole
    if merging.by_entry:
        return Stack(lambda index: merging(cast("Tensor", whole)[index], index), shape)
    return merging(cast("Tensor", whole))


class Merges:
    """An adapter's changes of the weights of a model."""

    def __init__(self, adapter: Adapter, by_name: Mapping[str, Sequence[Merge]]) -> None:
        self._adapter, self._by_name = adapter, by_name

    def __len__(self) -> int:
        """Number of weights that are changed."""
        return len(self._by_name)

    def of(self, name: str) -> Merging | None:
        """The changes of the weight of a native name. Reads the tensors that they take. Raises CheckpointError."""
        merges = self._by_name.get(name)
        return None if merges is None else Merging(merges, self._read)

    def _read(self, name: str) -> Tensor:
        from service.model.formats.unpack import load  # imported here because it needs torch

        files = self._adapter.files
        try:
            values = load(StoredWeight(name, "plain", files.table[name].shape, {"values": name}), files.read)
        except FormatError as error:
            raise CheckpointError(f"{self._adapter.path}: {error}") from error
        return cast("Tensor", values).float()


def match_adapter(
    adapter: Adapter, config: ModelConfig, sources: dict[str, Source], stored: Mapping[str, StoredWeight]
) -> tuple[Merges, ModelConfig]:
    """An adapter's changes of the weights of `sources`, and the model's configuration with the adapter. If only one of
    two tied matrices is changed, or both differently, they are not tied any more: `sources` get the vocabulary
    projection. Raises CheckpointError listing the tensors that fit no weight."""
    targets = config.weight_targets()

    def known(parameter: str) -> bool:
        found = [target.name for target in targets(parameter)]
        return not found or any(name in sources for name in found)

    changes = adapter.changes(known)
    if adapter.files.paths:
        adapter.check_named(*_modules(config, sources, stored), _holders(sources), known)
    if config.decoder.tie_word_embeddings:
        config, changes = _of_tied(adapter, config, changes, sources)
    expected, _ = expected_weights(config)
    merges, not_served, problems = _find_merges(changes, targets, sources, stored, expected)
    if changes and not merges and not problems:
        problems = ["none of them changes a part of the model that is served"]
    if problems:
        raise CheckpointError(
            f"{adapter.path}: tensors of the adapter do not fit {config.name}:\n  {listed(problems, 40)}"
        )
    if not_served:
        log.info(
            "%s: %d changes are of parts of the model that are not served, such as %s",
            adapter.name, len(not_served), not_served[0],
        )  # fmt: skip
    base = adapter.config.base
    if base and _last(base) != _last(config.name):
        log.warning("%s: its configuration says that it is for %s; it is used for %s", adapter.path, base, config.name)
    return Merges(adapter, merges), replace(config, name=f"{config.name}+{adapter.name}")


def _modules(
    config: ModelConfig, sources: Mapping[str, Source], stored: Mapping[str, StoredWeight]
) -> tuple[list[str], list[str]]:
    """Names in the files of the decoder's linear layers and of the table of embeddings; last parts of the names of
    modules of transformers that share a weight. Experts are no layers, since transformers has them as parameters."""
    decoder = config.decoder
    names = {EMBEDDINGS, *decoder.linear_weights()} - decoder.mtp_weights().keys()
    found = [sources[native] for native in names if native in sources]
    weights = [stored[name] for source in found if source.target.how != "stack" for name in source.names]
    layers = [weight.module for weight in weights if len(weight.shape) == 2 and weight.parts]
    return layers, ["lm_head", "embed_tokens", "embeddings"] if decoder.tie_word_embeddings else []


def _holders(sources: Mapping[str, Source]) -> set[str]:
    """Modules that have weights, under the names that files give them. transformers has all experts of a layer as
    parameters of one module, `experts`, also where the files have them one by one or under other names."""
    modules = {source.names[0].rpartition(".")[0] for source in sources.values()}
    one_by_one = {re.sub(r"\.\d+\.\w+$", "", module) for module in modules}
    return modules | one_by_one | {f"{module.rpartition('.')[0]}.experts" for module in modules}


def _of_tied(
    adapter: Adapter, config: ModelConfig, changes: list[Change], sources: dict[str, Source]
) -> tuple[ModelConfig, list[Change]]:
    """See `match_adapter`. PEFT ties trained rows of the embeddings, and with `ensure_weight_tying` everything;
    otherwise it leaves the other matrix as it is."""
    targets = config.weight_targets()

    def of(name: str) -> list[Change]:
        return [change for change in changes if any(target.name == name for target in targets(change.parameter))]

    head = of(HEAD)
    rows = [change for change in of(EMBEDDINGS) if isinstance(change, Rows)]
    if adapter.config.tied or (not head and len(rows) == len(of(EMBEDDINGS))):
        return config, [change for change in changes if change not in head]
    table = sources[EMBEDDINGS]
    sources[HEAD] = Source(table.names, table.target._replace(name=HEAD))
    if not any(isinstance(change, Rows) for change in head):
        changes = [*(replace(change, parameter=HEAD) for change in rows), *changes]
    return untied(config), changes


def _last(name: str) -> str:
    """The last part of a path or hub id."""
    return name.rstrip("/").rpartition("/")[2].lower()


def _find_merges(
    changes: Sequence[Change], targets: Callable[[str], Sequence[Target]], sources: Mapping[str, Source],
    stored: Mapping[str, StoredWeight], expected: Mapping[str, Shape],
) -> tuple[dict[str, list[Merge]], list[str], list[str]]:  # fmt: skip
    """(native name -> its changes in order, parameters that are not served, problems)."""
    merges: dict[str, list[Merge]] = {}
    not_served: list[str] = []
    problems: list[str] = []
    for change in changes:
        found = targets(change.parameter)
        if not found:
            not_served.append(change.parameter)
        for target in found:
            source, native = sources.get(target.name), expected.get(target.name)
            if source is None or native is None:
                problems.append(f"{change.tensor.name}: the model has no parameter {change.parameter}")
                continue
            shape = _parameter_shape(target, source, stored, native)
            if target.shared:
                problems.append(f"{change.tensor.name} would change {change.parameter}, which several layers share")
            elif problem := _misfit(change, target, shape, native) or _quantised(source, stored):
                problems.append(f"{change.tensor.name} {problem}")
            merges.setdefault(target.name, []).append(Merge(change, target, shape))
    return merges, not_served, problems


def _parameter_shape(target: Target, source: Source, stored: Mapping[str, StoredWeight], native: Shape) -> Shape:
    """The shape of a parameter that contributes to a tensor of shape `native`; `()` if none could."""
    if (target.how == "joined") != (source.target.how == "joined"):
        return ()
    match target.how:
        case "stack":
            return native[1:]
        case "joined":
            return stored[source.names[target.place]].shape if target.place < len(source.names) else ()
        case "part":
            at = max(0, len(native) - 2)
            return (*native[:at], native[at] // target.num_taken * target.parts, *native[at + 1 :])
        case _:
            return native


def _misfit(change: Change, target: Target, shape: Shape, native: Shape) -> str:
    """Why a parameter of this shape cannot be changed so; empty if it can."""
    if target.how == "stack" and target.place >= native[0]:
        return f"is for expert {target.place}, but there are {native[0]}"
    if isinstance(change, Rows) and target != Target(target.name):
        return "has rows for a parameter that is not a table of embeddings"
    return change.misfit(shape)


def _quantised(source: Source, stored: Mapping[str, StoredWeight]) -> str:
    for name in source.names:
        if (scheme := stored[name].scheme) != "plain":
            return (
                f"would change {name}, which is stored as {scheme}: an adapter is merged into weights of 16 or 32 bits "
                "only; serve the original model, with --weights to quantise it afterwards"
            )
    return ""
