"""OpenCV starts a thread when it is imported, which stays: so it is imported before any test runs, and starts no more."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    import cv2

    cv2.setNumThreads(0)
