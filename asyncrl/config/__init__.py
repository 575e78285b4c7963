"""Config: one strict, frozen schema of pipeline.yaml, its loader, and the checks that refuse what would hang or mislead.
Imports errors only (and pydantic, PyYAML).

`load_config` reads a file and overrides into a `LoadedConfig`; `checks` refuse what two fields, or a field and a fact about model
and data, say wrong together; `explain` is one key in words; `plan` is what a launch would start.
"""

from asyncrl.config.load import LoadedConfig, Places, dump_config, load_config, load_mapping
from asyncrl.config.schema import Config

__all__ = ["Config", "LoadedConfig", "Places", "dump_config", "load_config", "load_mapping"]
