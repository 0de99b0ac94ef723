"""Reads tables, WebDataset shards and folders of images as datasets of encoded files."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saccade.errors import InvalidArgument
from saccade.ray.rows import RowFormat

IMAGE_SUFFIXES = ("png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif")
SUFFIXES = {"parquet": ("parquet",), "webdataset": ("tar",), "images": IMAGE_SUFFIXES}
DEFAULT_IDS = {"webdataset": "__key__", "images": "path"}
DEFAULT_IMAGES = {"images": ("bytes",)}


@dataclass(frozen=True)
class Source:
    """Files of one format.

    `parquet`: their rows. `webdataset`: a row for each sample of the tar files, with `__key__` and a column of bytes
    for each extension. `images`: a row for each file, with `bytes` and `path`.
    """

    paths: Sequence[str]
    format: str

    def read(self, rows: RowFormat) -> Any:
        """The dataset, with only the columns that `rows` needs if the format allows that. Files stay encoded.

        Raises:
            InvalidArgument: the source lacks a column.
        """
        from ray import data

        paths = list(self.paths)
        if self.format == "parquet":
            self._check_columns(paths[0], rows.columns)
            return data.read_parquet(paths).select_columns(rows.columns)
        if self.format == "webdataset":
            return data.read_webdataset(paths, decoder=None)
        if unknown := set(rows.columns) - {"bytes", "path"}:
            raise InvalidArgument(f"columns: a folder of images has bytes and path, not {', '.join(sorted(unknown))}")
        return data.read_binary_files(paths, include_paths=True, file_extensions=list(IMAGE_SUFFIXES))

    @staticmethod
    def _check_columns(path: str, columns: Sequence[str]) -> None:
        from pyarrow import fs, parquet

        files, name = fs.FileSystem.from_uri(path) if "://" in path else (None, path)
        found = parquet.read_schema(name, filesystem=files).names
        if missing := [column for column in columns if column not in found]:
            raise InvalidArgument(f"columns: {path!r} has {', '.join(found)}, not {', '.join(missing)}")


def find_source(source: str, given: str = "auto") -> Source:
    """The files of a source.

    Args:
        source: a file, a folder or a pattern such as "data/*.parquet"; or a URL such as s3://bucket/folder.
        given: the format, or "auto" for the one that follows from the files' suffixes.

    Raises:
        InvalidArgument: there are no files, or files of several formats.
    """
    if given != "auto" and given not in SUFFIXES:
        raise InvalidArgument(f"format: expected auto, {', '.join(SUFFIXES)}, got {given!r}")
    paths = _remote(source) if "://" in source else _local(source)
    by_format: dict[str, list[str]] = {}
    for path in paths:
        suffix = path.rpartition(".")[2].lower()
        for form, suffixes in SUFFIXES.items():
            if suffix in suffixes and given in ("auto", form):
                by_format.setdefault(form, []).append(path)
    if len(by_format) != 1:
        found = ", ".join(f"{len(files)} {form}" for form, files in by_format.items()) or "none"
        raise InvalidArgument(f"source: expected files of one format in {source!r}, found {found}")
    ((form, files),) = by_format.items()
    return Source(sorted(files), form)


def _local(source: str) -> list[str]:
    if os.path.isdir(source):
        found = [os.path.join(folder, name) for folder, _, names in os.walk(source) for name in names]
    else:
        found = [source] if os.path.isfile(source) else glob.glob(source, recursive=True)
    return [os.path.abspath(path) for path in found if os.path.isfile(path)]


def _remote(source: str) -> list[str]:
    from pyarrow import fs

    scheme = source.partition("://")[0]
    files, path = fs.FileSystem.from_uri(source)
    info = files.get_file_info(path)
    if info.type == fs.FileType.Directory:
        inside = files.get_file_info(fs.FileSelector(path, recursive=True))
        return [f"{scheme}://{item.path}" for item in inside if item.type == fs.FileType.File]
    return [source] if info.type == fs.FileType.File else []
