"""Ray's checkpoints for rows with ids of any type, and the file that describes the job to which an output belongs."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ray.data.block import BlockAccessor
from ray.data.checkpoint import CheckpointConfig
from ray.data.checkpoint.checkpoint_filter import NumpyArrayBasedCheckpointFilter

from saccade.errors import AlreadyExists
from saccade.ray.ids import ID, row_id


class RowFilter(NumpyArrayBasedCheckpointFilter):
    """Drops rows that have been answered. The input has ids of any type, and the checkpoint has their 64-bit form."""

    def filter_rows_for_block(self, block: Any) -> Any:
        """The rows of a block that have not been answered, as a `pyarrow.Table`. Raises InvalidArgument for an invalid
        id."""
        import numpy as np
        import pyarrow as pa

        table = BlockAccessor.for_block(block).to_arrow()
        done = self.checkpointed_ids
        column = self.ckpt_config.saccade_source_column
        ids = np.fromiter((row_id(value) for value in table[column].to_pylist()), np.int64, len(table))
        places = np.minimum(np.searchsorted(done, ids), len(done) - 1)
        return table.filter(pa.array(done[places] != ids)) if len(done) else table


def checkpoint_config(folder: str, source_column: str) -> CheckpointConfig:
    """Checkpoints in a folder. They are kept after the job: if it is started again, no row is answered again."""
    config = CheckpointConfig(ID, folder, delete_checkpoint_on_success=False, checkpoint_filter_cls=RowFilter)
    config.saccade_source_column = source_column
    return config


def claim(output: str, description: dict[str, Any]) -> bool:
    """Records in a file next to the output that it belongs to this job. Returns whether that was recorded before.

    Raises:
        AlreadyExists: the output belongs to another job, or has files that belong to no job.
    """
    from pyarrow import fs

    files, path = fs.FileSystem.from_uri(output) if "://" in output else (fs.LocalFileSystem(), output)
    name, text = f"{path.rstrip('/')}.job.json", json.dumps(description, indent=1, sort_keys=True, default=repr)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if files.get_file_info(name).type == fs.FileType.File:
        with files.open_input_stream(name) as stream:
            held = json.loads(stream.read())
        if held.get("digest") == digest:
            return True
        changed = sorted(
            key for key in {*held, *description} - {"digest"} if held.get(key) != json.loads(text).get(key)
        )
        raise AlreadyExists(
            f"{output!r} belongs to a job with other options ({', '.join(changed)}); name another output, or delete "
            f"it, {name!r} and the folder of checkpoints",
            reason="BATCH_OUTPUT_FOREIGN",
        )
    inside = fs.FileSelector(path, allow_not_found=True)
    if any(item.type == fs.FileType.File for item in files.get_file_info(inside)):
        raise AlreadyExists(
            f"{output!r} has files that are not this job's; name another output", reason="BATCH_OUTPUT_FOREIGN"
        )
    files.create_dir(path, recursive=True)
    # Object stores show only complete files; elsewhere a driver that is killed meanwhile would leave a part.
    whole = files.type_name not in ("local", "hdfs")
    scratch = name if whole else f"{name}.new"
    with files.open_output_stream(scratch) as stream:
        stream.write(json.dumps({**json.loads(text), "digest": digest}, indent=1).encode())
    if not whole:
        files.move(scratch, name)
    return False
