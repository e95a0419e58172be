"""Imports OpenCV before any test runs, because its import starts a thread that stays."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    import cv2

    cv2.setNumThreads(0)
