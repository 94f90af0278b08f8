# SPDX-License-Identifier: Apache-2.0
"""Model configurations: dataclasses with a place for the fields that they do not know."""

import dataclasses


@dataclasses.dataclass
class ConfigBase:
    @classmethod
    def from_dict(cls, source):
        known = {each.name for each in dataclasses.fields(cls)}
        fields = {name: value for name, value in source.items() if name in known}
        rest = {name: value for name, value in source.items() if name not in known}
        return cls(**fields, kwargs=rest)
