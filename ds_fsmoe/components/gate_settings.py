# SPDX-License-Identifier: Apache-2.0
"""The bases and helpers for gates of one's own, at the path that scripts of version 0.2.0 import."""

from ds_fsmoe.components.gate import CapacitySettings, OptionError, SettingsGate, option, takes_options_of

__all__ = ["CapacitySettings", "OptionError", "SettingsGate", "option", "takes_options_of"]
