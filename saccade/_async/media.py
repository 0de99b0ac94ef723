"""`client.media`: files that are uploaded once and then used by their ids."""

from __future__ import annotations

from saccade._async.session import AsyncSession
from saccade._core.images import ImageInput
from saccade._core.media import delete_steps, get_steps, upload_file_steps
from saccade.types import Media


class AsyncMediaMethods:
    """`client.media`: uploads files for use in several requests."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def upload(self, image: ImageInput, *, timeout: float | None = None) -> Media:
        """Uploads an image or a video file, unless the server has it already. The result can be used in requests and
        batches: `images=[media]`, `videos=[media]`."""
        return await self._session._run(upload_file_steps(image), timeout)

    async def get(self, media_id: str, *, timeout: float | None = None) -> Media:
        """The uploaded file with this id. Raises NotFound."""
        return await self._session._run(get_steps(media_id), timeout)

    async def delete(self, media_id: str, *, timeout: float | None = None) -> None:
        """Deletes an uploaded file. Raises NotFound."""
        await self._session._run(delete_steps(media_id), timeout)
