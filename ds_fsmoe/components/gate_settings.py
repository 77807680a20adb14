# SPDX-License-Identifier: Apache-2.0
"""Re-exports the bases and helpers of custom gates at the path that scripts of version 0.2.0 import."""

from ds_fsmoe.components.gate import CapacitySettings, OptionError, SettingsGate, option, takes_options_of

__all__ = ["CapacitySettings", "OptionError", "SettingsGate", "option", "takes_options_of"]
