"""The asyncio façade, written by hand; `make sdk` generates the synchronous one, `saccade/_sync`, from it."""
