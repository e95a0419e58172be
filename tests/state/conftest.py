"""Imports OpenCV before any test runs: its import starts a thread that never ends, which tests would report."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    import cv2

    cv2.setNumThreads(0)
