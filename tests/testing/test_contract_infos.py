"""``VectorEnvContract`` and keys of infos that look like masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vecenv.testing.contract import _check_masks

MASK = np.ones(2, np.bool_)
ROWS = np.zeros(2)


def test_key_that_begins_with_an_underscore_has_a_mask_of_its_own() -> None:
    _check_masks({"_hidden": ROWS, "__hidden": MASK, "x": ROWS, "_x": MASK}, 2)


@pytest.mark.parametrize("infos", [{"x": ROWS}, {"_x": MASK}, {"x": ROWS, "_x": MASK, "_y": MASK}], ids=str)
def test_key_without_a_mask_and_mask_without_a_key_are_errors(infos: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="has no mask"):
        _check_masks(infos, 2)
