"""Maps names of published weights to the server's names: those of LFM2, norms after mixers (`post_operator_norm`,
`post_ffn_norm`), and gates of heads (`self_attn.gate_proj`)."""

from families.lfm2.names import targets, weights

__all__ = ["targets", "weights"]
