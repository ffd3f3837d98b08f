"""The version, for the package, its builds, and processes that compare theirs."""

__version__ = "0.1.0"
