"""Copies of what is on a group of ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any


class OnGroup:
    """A copy is on the same group. Most groups cannot be pickled."""

    remedy = ""  # what to do instead of pickling

    def _its_group(self) -> Any:
        return vars(self).get("_group", vars(self).get("group"))

    def __copy__(self) -> Any:
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self._its_group())] = self._its_group()
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        group = self._its_group()
        try:
            pickle.dumps(group)
        except Exception as error:
            raise TypeError(f"a {type(self).__name__} on a {type(group).__name__} cannot be pickled: {self.remedy}") from error
        return vars(self)
