# Generated from saccade/_async/media.py by `make sdk`. Do not edit.
"""`client.media`: files that are uploaded once and then used by their ids."""

from __future__ import annotations

from saccade._core.images import ImageInput
from saccade._core.media import delete_steps, get_steps, upload_file_steps
from saccade._sync.session import Session
from saccade.types import Media


class MediaMethods:
    """`client.media`: uploads files for use in several requests."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def upload(self, image: ImageInput, *, timeout: float | None = None) -> Media:
        """Uploads an image or a video file, unless the server has it already. The result can be used in requests and
        batches: `images=[media]`, `videos=[media]`."""
        return self._session._run(upload_file_steps(image), timeout)

    def get(self, media_id: str, *, timeout: float | None = None) -> Media:
        """The uploaded file with this id. Raises NotFound."""
        return self._session._run(get_steps(media_id), timeout)

    def delete(self, media_id: str, *, timeout: float | None = None) -> None:
        """Deletes an uploaded file. Raises NotFound."""
        self._session._run(delete_steps(media_id), timeout)
