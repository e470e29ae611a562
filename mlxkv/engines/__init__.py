"""Plan -> trace, one file per engine, each in a process of its own."""


class AlreadySaid(Exception):
    """A process of ours has refused and has said why on stderr."""
