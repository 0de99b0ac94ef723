"""The static buffers of decoder graphs: their definitions, writing a step into them, and the batch of a graph.

Every bucket of a kind is a prefix of that kind's buffers; kinds share no buffers. `set_batch` writes a step into the
first rows and fill values into the rest, so no values of an earlier step are left in a bucket that is about to run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decoder.batch import Batch, BatchBuilder, ScanRows, VerifyRows, VerifyTensors
from decoder.config import DecoderConfig, DecoderOptions
from kernels.chunk_scan import chunk_table
from kernels.dispatch import implementation
from kernels.scan_tables import ScanTables
from kernels.transfer import upload


@dataclass(frozen=True)
class Field:
    """One static buffer, `[rows(size), *rest]` in a bucket of `size`."""

    rest: tuple[int, ...]
    dtype: torch.dtype
    fill: float | None
    """Value of rows that a step does not use; `None`: the step's last value is repeated."""
    rows: Callable[[int], int] = int

    def bytes(self, size: int) -> int:
        return math.prod((self.rows(size), *self.rest)) * self.dtype.itemsize


def table_width(config: DecoderConfig, options: DecoderOptions) -> int:
    """Largest number of pages of a sequence; 0 if the model has no pages."""
    return -(-options.max_len // options.page_size) if config.pages else 0


def decode_fields(config: DecoderConfig, options: DecoderOptions) -> dict[str, Field]:
    """Buffers of decode graphs; a row is a request. Padded rows: slot -1, length 0, place -1."""
    long = torch.int64
    fields = {
        "x": Field((config.hidden_size,), options.dtype, 0.0),
        "slots": Field((), long, -1),
        "lengths": Field((), long, 0),
    }
    if config.pages:
        fields |= {"tables": Field((table_width(config, options),), long, -1), "places": Field((), long, -1)}
    return fields | position_fields(config)


def position_fields(config: DecoderConfig, rows: Callable[[int], int] = int) -> dict[str, Field]:
    """The buffer of the positions of `rows(size)` tokens, if layers read positions. Padded tokens: 0."""
    return {"positions": Field((config.position_axes,), torch.int64, 0, rows)} if config.position_axes else {}


def runs_kernels(options: DecoderOptions) -> bool:
    """Whether layers run Triton kernels instead of the references."""
    return implementation(torch.device(options.device).type)[0] == "triton"


def _saves(options: DecoderOptions, size: int) -> int:
    """Number of checkpoints that fit a mixed bucket of `size` tokens."""
    return -(-size // options.page_size) + min(size, options.max_seqs)


def scan_room(config: DecoderConfig, options: DecoderOptions, size: int) -> dict[str, int]:
    """Sizes of a mixed bucket's scan tables."""
    rows, chunk = min(size, options.max_seqs), BatchBuilder.scan_chunk(config, options)
    return ScanTables.room(size, rows, _saves(options, size), chunk)


def mixed_fields(config: DecoderConfig, options: DecoderOptions) -> dict[str, Field]:
    """Buffers of mixed graphs. Padded rows: slot -1, length 0; padded tokens belong to no row and have place -1."""
    long, chunk = torch.int64, BatchBuilder.scan_chunk(config, options)

    def rows(size: int) -> int:
        return min(size, options.max_seqs)

    def saves(size: int) -> int:
        return _saves(options, size)

    fields = {
        "x": Field((config.hidden_size,), options.dtype, 0.0),
        "slots": Field((), long, -1, rows),
        "initial": Field((), torch.bool, 0, rows),
        "starts": Field((), long, None, lambda size: rows(size) + 1),
        "computed": Field((), long, 0, rows),
    }
    if config.slots:
        fields |= {
            "chunks": Field((4,), long, -1, lambda size: size // chunk + 2 * rows(size) + saves(size)),
            "state_saves": Field((2,), long, -1, saves),
            "window_saves": Field((3,), long, -1, saves),
        }
        if runs_kernels(options):
            fields["scan_tables"] = Field(
                (), torch.int32, -1, lambda size: ScanTables.length(**scan_room(config, options, size))
            )
    if config.pages:
        fields |= {"tables": Field((table_width(config, options),), long, -1, rows), "places": Field((), long, -1)}
    return fields | position_fields(config)


def verify_fields(config: DecoderConfig, options: DecoderOptions) -> dict[str, Field]:
    """Buffers of verify graphs: `size` updates, then `size` rows of 1 + K tokens. Padded rows: slots and batch slot -1,
    length 0, accepted 1 (0 if inputs are replayed); padded tokens: length 0, place -1."""
    long, width = torch.int64, options.num_drafts + 1

    def tokens(size: int) -> int:
        return size * (1 + width)

    fields = {
        "x": Field((config.hidden_size,), options.dtype, 0.0, tokens),
        "slots": Field((), long, -1),
        "lengths": Field((), long, 0, tokens),
        "batch_slots": Field((), long, -1),
        "row_slots": Field((options.slots_per_seq,), long, -1),
        "accepted": Field((), long, 0 if options.spec_state == "replay" else 1),
        "counts": Field((), long, 0),
    }
    if config.pages:
        fields |= {
            "tables": Field((table_width(config, options),), long, -1, tokens),
            "places": Field((), long, -1, tokens),
        }
    return fields | position_fields(config, tokens)


def graph_fields(kind: str, config: DecoderConfig, options: DecoderOptions) -> dict[str, Field]:
    """Buffers of graphs of a kind: `decode`, `verify` or `mixed`."""
    made = {"decode": decode_fields, "verify": verify_fields, "mixed": mixed_fields}
    return made[kind](config, options)


def hidden_field(kind: str, config: DecoderConfig, options: DecoderOptions) -> Field:
    """The output buffer of a graph."""
    dtype = torch.float32 if config.residual_in_fp32 else options.dtype
    return Field((config.hidden_size,), dtype, 0.0, graph_fields(kind, config, options)["x"].rows)


class BatchBuffers:
    """The buffers of one kind of graph, allocated for the largest bucket."""

    def __init__(self, fields: Mapping[str, Field], largest: int, device: str) -> None:
        self.fields, self.largest = dict(fields), largest
        self.tensors = {
            name: torch.full(
                (field.rows(largest), *field.rest), field.fill or 0, dtype=field.dtype, device=torch.device(device)
            )
            for name, field in fields.items()
        }

    def view(self, size: int) -> dict[str, Tensor]:
        """The buffers of one bucket: prefixes of `tensors`."""
        return {name: tensor[: self.fields[name].rows(size)] for name, tensor in self.tensors.items()}

    def set_batch(self, size: int, values: Mapping[str, Tensor]) -> None:
        """Writes every field: the values, then fill values up to the end of the bucket."""
        for name, view in self.view(size).items():
            value, fill = values[name], self.fields[name].fill
            count = value.shape[0]
            view[:count].copy_(value)
            if count < view.shape[0]:
                view[count:].fill_(fill) if fill is not None else view[count:].copy_(value[-1:])


def decode_values(x_TD: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Values of `decode_fields` for a batch; `x_TD`: its rows `[T, d]`."""
    return {
        "x": x_TD,
        "slots": batch.slots_U,
        "lengths": batch.lengths_Q,
        "tables": batch.tables_QW,
        "places": batch.places_T,
    } | positions_of(batch)


def positions_of(batch: Batch) -> dict[str, Tensor]:
    """The value of the positions' buffer, if the batch has positions."""
    return {} if batch.positions_TA is None else {"positions": batch.positions_TA}


def decode_batch(view: Mapping[str, Tensor], longest: int) -> Batch:
    """The batch of a decode graph: its tensors are the buffers `view`. `longest`: upper bound of the lengths."""
    empty = view["slots"][:0]
    return Batch(
        ids_T=empty,
        splices=(),
        updates=view["slots"].shape[0],
        slots_U=view["slots"],
        known_slots=None,
        queries=view["x"].shape[0],
        lengths_Q=view["lengths"],
        longest=longest,
        tables_QW=view.get("tables", empty),
        places_T=view.get("places", empty),
        verify=None,
        scan=None,
        samples=None,
        positions_TA=view.get("positions"),
    )


def places_of(batch: Batch, size: int, width: int) -> Tensor:
    """Index in a verify bucket of each token of the batch."""
    assert batch.verify is not None
    rows = batch.verify.tensors
    given = rows.places_VT.shape[1]
    row, place = torch.div(rows.packed, given, rounding_mode="floor"), rows.packed % given
    return torch.cat((torch.arange(batch.updates, device=row.device), size + row * width + place))


def verify_values(
    x_TD: Tensor, batch: Batch, fields: Mapping[str, Field], size: int, places: Tensor
) -> dict[str, Tensor]:
    """The batch's tokens at `places`, fill values elsewhere."""
    assert batch.verify is not None
    rows = batch.verify.tensors

    def spread(name: str, value: Tensor) -> Tensor:
        fill = fields[name].fill
        assert fill is not None
        full = value.new_full((fields[name].rows(size), *value.shape[1:]), fill)
        return full.index_copy_(0, places, value)

    values = {
        "x": spread("x", x_TD),
        "slots": batch.slots_U,
        "lengths": spread("lengths", batch.lengths_Q),
        "batch_slots": rows.batch_slots_V,
        "row_slots": rows.slots_VT,
        "accepted": rows.accepted_V,
        "counts": rows.lengths_V,
    }
    if "tables" in fields:
        values |= {"tables": spread("tables", batch.tables_QW), "places": spread("places", batch.places_T)}
    return values | {name: spread(name, value) for name, value in positions_of(batch).items()}


def verify_batch(view: Mapping[str, Tensor], longest: int, span: int, width: int) -> Batch:
    """The batch of a verify graph. The places of its tokens are constants of the graph."""
    size, empty = view["slots"].shape[0], view["slots"][:0]
    packed = torch.arange(size * width, device=empty.device)
    rows = VerifyTensors(
        batch_slots_V=view["batch_slots"],
        slots_VT=view["row_slots"],
        accepted_V=view["accepted"],
        lengths_V=view["counts"],
        places_VT=packed.view(size, width),
        packed=packed,
        span=span,
        slot_runs=None,
    )
    return replace(decode_batch(view, longest), verify=VerifyRows(None, span > 0, lambda: rows))


def mixed_values(x_TD: Tensor, batch: Batch, room: Mapping[str, int] | None) -> dict[str, Tensor]:
    """`room`: sizes of the bucket's scan tables, if it has any."""
    scan = batch.scan
    assert scan is not None and not isinstance(scan.chunks, Tensor)
    tables = {} if room is None else {"scan_tables": scan.padded_tables(room, x_TD.device).buffer}
    return (
        tables
        | positions_of(batch)
        | {
            "x": x_TD,
            "slots": scan.slots_R,
            "initial": scan.initial_R,
            "starts": scan.starts_R,
            "computed": scan.computed_R,
            "tables": scan.tables_RW,
            "places": batch.places_T,
            "chunks": _rows(chunk_table(scan.chunks), 4, x_TD),
            "state_saves": _rows(scan.state_saves, 2, x_TD),
            "window_saves": _rows(scan.window_saves, 3, x_TD),
        }
    )


def _rows(values: Tensor | SequenceOf[tuple[int, ...]], width: int, like: Tensor) -> Tensor:
    assert not isinstance(values, Tensor)
    return upload(values, torch.int64, like.device).view(-1, width)


def mixed_batch(view: Mapping[str, Tensor], room: Mapping[str, int], chunk: int) -> Batch:
    """The batch of a mixed graph: its tensors are the buffers `view`. `room`: largest numbers of `rows`,
    `entries` and `saves` of the scan tables; `chunk`: tokens per chunk of the scan."""
    empty, tables = view["slots"][:0], view.get("scan_tables")
    scan = ScanRows(
        slots_R=view["slots"],
        initial_R=view["initial"],
        starts_R=view["starts"],
        computed_R=view["computed"],
        tables_RW=view.get("tables", empty),
        chunks=view.get("chunks", ()),
        state_saves=view.get("state_saves", ()),
        window_saves=view.get("window_saves", ()),
        static_tables=(
            None if tables is None else ScanTables(tables, chunk, room["rows"], room["entries"], room["saves"])
        ),
    )
    return Batch(
        ids_T=empty,
        splices=(),
        updates=0,
        slots_U=empty,
        known_slots=None,
        queries=0,
        lengths_Q=empty,
        longest=0,
        tables_QW=empty,
        places_T=view.get("places", empty),
        verify=None,
        scan=scan,
        samples=None,
        positions_TA=view.get("positions"),
    )
