"""The contract: the promises of ``docs/capabilities.md``, tested for every backend."""
