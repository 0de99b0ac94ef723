"""The `saccade` command."""


def main() -> int:
    return 0
