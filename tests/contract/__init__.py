"""One meaning per call: what ``docs/architecture.md`` promises of every backend, asked of every backend."""
