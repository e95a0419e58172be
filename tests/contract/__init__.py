"""One meaning per call: what ``docs/capabilities.md`` promises of every backend, asked of every backend."""
