# SPDX-License-Identifier: Apache-2.0
"""What a gate of one's own is made with, by the path that scripts written for 0.2.0 import it from."""

from ds_fsmoe.components.gate import CapacitySettings, OptionError, SettingsGate, option, takes_options_of

__all__ = ["CapacitySettings", "OptionError", "SettingsGate", "option", "takes_options_of"]
