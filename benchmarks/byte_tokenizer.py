"""A byte-level BPE tokenizer of a given size, trained on the source of Python's standard library: for random
checkpoints whose answers must be text."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

SPECIAL = ("<pad>", "<s>", "</s>")
END = 2
"""Id of the last of these, the end of a text."""


def add_tokenizer(model: Path, vocab: int) -> None:
    """Writes the tokenizer's files into a model's folder, unless it has them. Ids from 0 are `SPECIAL`."""
    if (model / "tokenizer_config.json").exists():
        return
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train([str(file) for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))], trainer)
    assert tokenizer.get_vocab_size() == vocab, f"{tokenizer.get_vocab_size()} tokens were found, not {vocab}"
    tokenizer.save(str(model / "tokenizer.json"))
    names = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[END]}
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}, indent=1)
    )
