"""One meaning per call: what ``docs/calls.md`` promises of every backend, asked of every backend."""
