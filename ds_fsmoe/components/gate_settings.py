# SPDX-License-Identifier: Apache-2.0
"""Re-exports the bases and helpers of custom gates from ``gate``.

Scripts of version 0.2.0 import them from this path.
"""

from ds_fsmoe.components.gate import CapacitySettings, OptionError, SettingsGate, option, takes_options_of

__all__ = ["CapacitySettings", "OptionError", "SettingsGate", "option", "takes_options_of"]
