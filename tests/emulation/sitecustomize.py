"""Python imports this in every process that has this folder on its PYTHONPATH, spawned workers too."""

import os

if os.environ.get("VECENV_EMULATE"):
    import elsewhere

    elsewhere.install(os.environ["VECENV_EMULATE"])
