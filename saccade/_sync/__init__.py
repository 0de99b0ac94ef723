# Generated from saccade/_async/__init__.py by `make sdk`. Do not edit.
"""The asyncio façade, written by hand; `make sdk` generates the synchronous one, `saccade/_sync`, from it."""
